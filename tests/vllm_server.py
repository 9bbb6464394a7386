"""A small HTTP server that behaves like vLLM's where answers are asked for, and misbehaves on request.

Its answers follow from the prompt and, unless greedy, from the seed, so that runs can be compared.
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.tiny import END, VOCAB

Misbehaviour = Callable[["Handler", dict[str, Any], int], bool]  # whether it has dealt with the request


def words(body: dict[str, Any]) -> list[int]:
    """The token ids of an answer; every third one is cut by max_tokens."""
    source = random.Random(repr((body["prompt"], body["seed"] if body["temperature"] else None)))
    ids = [source.randrange(3, VOCAB) for _ in range(body["max_tokens"])]
    return ids if source.randrange(3) == 0 else [*ids[: source.randrange(1, 8)], END]


def completion(body: dict[str, Any], ids: list[int]) -> dict[str, Any]:
    """vLLM's response with these ids."""
    choice = {
        "index": 0,
        "text": "",
        "finish_reason": "stop" if ids[-1] == END else "length",
        "logprobs": {"token_logprobs": [-i / 100 for i in ids], "tokens": [], "text_offset": [], "top_logprobs": []},
        "prompt_token_ids": body["prompt"],
        "token_ids": ids,
    }
    return {"id": "1", "object": "text_completion", "created": 0, "model": body["model"], "choices": [choice]}


class Handler(BaseHTTPRequestHandler):
    """One request."""

    protocol_version = "HTTP/1.1"
    server: FakeServer

    def reply(self, value: Any, status: int = 200, kind: str = "application/json") -> None:
        """Answer with JSON, or with text of another kind."""
        content = (json.dumps(value) if kind == "application/json" else value).encode()
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def do_GET(self) -> None:
        """Version, models, health."""
        fake = self.server
        fake.paths.append(self.path)
        if self.path in fake.pages:
            status, value = fake.pages[self.path]
            self.reply(value, status, "application/json" if not isinstance(value, str) else "text/html")
        else:
            self.reply({"detail": "Not Found"}, 404)

    def do_POST(self) -> None:
        """An answer."""
        fake = self.server
        content = self.rfile.read(int(self.headers["content-length"]))
        if len(content) < int(self.headers["content-length"]):
            return  # the one who asked was killed
        body = json.loads(content)
        with fake.lock:
            fake.asked.append(body)
            fake.keys.add(self.headers["authorization"])
            fake.busy += 1
            fake.busiest = max(fake.busiest, fake.busy)
            number = len(fake.asked)
        try:
            if not fake.misbehave(self, body, number):
                time.sleep(fake.delay_s)
                self.reply(completion(body, words(body)))
        except (BrokenPipeError, ConnectionResetError):
            pass  # the one who asked is gone
        finally:
            with fake.lock:
                fake.busy -= 1

    def log_message(self, *args: Any) -> None:
        """Say nothing."""


class FakeServer(ThreadingHTTPServer):
    """Use it as a context manager; `url` is its base URL."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, root: str = "tiny", max_model_len: int = 512, misbehave: Misbehaviour | None = None) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        card = {"id": "the-target", "object": "model", "root": root, "parent": None, "max_model_len": max_model_len}
        self.pages: dict[str, tuple[int, Any]] = {
            "/version": (200, {"version": "0.32.0+cpu"}),
            "/v1/models": (200, {"object": "list", "data": [card]}),
            "/health": (200, ""),
        }
        self.misbehave: Misbehaviour = misbehave or (lambda handler, body, number: False)
        self.delay_s = 0.0
        self.lock = threading.Lock()
        self.paths: list[str] = []
        self.asked: list[dict[str, Any]] = []
        self.keys: set[str | None] = set()
        self.busy = self.busiest = 0
        self.stop = threading.Event()
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def url(self) -> str:
        """As in machine.yaml."""
        return f"http://127.0.0.1:{self.server_port}/v1"

    def __exit__(self, *args: Any) -> None:
        self.stop.set()
        self.shutdown()
        super().__exit__(*args)
