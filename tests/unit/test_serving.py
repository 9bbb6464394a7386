"""`eyas serve` and `eyas demo`: the server's command, and what the terminal shows of a stream."""

from __future__ import annotations

import asyncio
import io
import json
import os
import shlex
import socket
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from eyas.cli import app
from eyas.errors import EyasError
from eyas.extraction.server import Server
from eyas.files import write_json_atomic
from eyas.params import Machine, Profile, TargetParams
from eyas.serving import serve as serving
from eyas.serving.demo import Count, Pieces, Screen, marked, show_answer
from eyas.targets.resolve import describe_target
from eyas.templates.chat import ChatTemplate
from tests.tiny import END, tiny_profile
from tests.vllm_server import FakeServer, Handler, Misbehaviour

GREEN = "\x1b[30;42m"


@pytest.fixture(scope="module")
def chat(tiny_target: Path) -> ChatTemplate:
    return ChatTemplate(tiny_target)


def profile(source: str, **target: Any) -> dict[str, Any]:
    content = tiny_profile(source)
    content["target"] |= target
    # other drafters need a package and a folder that serving does not
    content["benchmark"] |= {
        "num_speculative_tokens": [5, 3],
        "suffix": True,
        "references": [{"name": "other", "source": "/nowhere"}],
    }
    return content


@pytest.fixture
def checkout(tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the profile `tiny`: its target's description, and a head as far as serving looks at it."""
    monkeypatch.chdir(tmp_path)
    content = profile(str(tiny_target))
    (tmp_path / "params.yaml").write_text(json.dumps({"active": ["tiny"], "profiles": {"tiny": content}}))
    data = tmp_path / "data" / "tiny"
    described = describe_target(TargetParams.model_validate(content["target"]), tiny_target)
    write_json_atomic(data / "target.json", described)
    write_json_atomic(data / "draft_head" / "config.json", {})
    return tmp_path


def options(command: Sequence[str]) -> dict[str, str | None]:
    """What is said behind the module's name; switches have no value."""
    given: dict[str, str | None] = {}
    for word in command[3:]:
        if word.startswith("--"):
            given[word] = None
        else:
            given[list(given)[-1]] = word
    return given


@pytest.mark.parametrize("cpu", [True, False])
def test_the_command_of_an_engine(checkout: Path, monkeypatch: pytest.MonkeyPatch, cpu: bool) -> None:
    monkeypatch.setattr(serving, "on_cpu_engine", lambda: cpu)
    machine = Machine(tensor_parallel_size=8, gpu_memory_utilization=0.8, max_num_seqs=16, max_num_batched_tokens=64)
    params = Profile.model_validate(profile("somebody/tiny"))
    command = serving.server_command(params, machine, Path("tiny"), Path("data/tiny/draft_head"), "::1", 8001)
    assert command[:3] == [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    given = options(command)
    speculative = json.loads(given.pop("--speculative-config") or "")
    assert speculative == {
        "method": "eagle3", "model": str(checkout / "data/tiny/draft_head"), "num_speculative_tokens": 5,
    }  # fmt: skip
    common = {
        "--model": str(checkout / "tiny"),
        "--served-model-name": "somebody/tiny",
        "--host": "::1",
        "--port": "8001",
        "--dtype": "float32",
        "--max-model-len": "128",
        "--max-num-seqs": "16",
        "--max-num-batched-tokens": "128",
        "--tensor-parallel-size": "8",
    }
    own: dict[str, str | None] = (
        {"--enforce-eager": None, "--no-enable-chunked-prefill": None} if cpu else {"--gpu-memory-utilization": "0.8"}
    )
    assert given == common | own


def test_foreign_code_runs_only_where_the_profile_says_so(checkout: Path) -> None:
    params = Profile.model_validate(profile("somebody/tiny", trust_remote_code=True))
    command = serving.server_command(params, Machine(), Path("tiny"), Path("data/tiny/draft_head"), "127.0.0.1", 8000)
    assert "--trust-remote-code" in command


class Became(Exception):
    """In place of another program."""


@pytest.fixture
def became(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Path, command and environment of what a process would have become."""
    calls: list[Any] = []

    def execve(*arguments: Any) -> None:
        calls.append(arguments)
        raise Became

    monkeypatch.setattr(os, "execve", execve)
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    return calls


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port


def test_the_printed_line_is_what_runs(checkout: Path, became: list[Any], tiny_target: Path) -> None:
    port = free_port()
    (checkout / "machine.yaml").write_text("cpu_kv_cache_gib: 7\nmax_num_seqs: 3\n")
    result = CliRunner().invoke(app, ["serve", "--profile", "tiny", "--port", str(port)])
    assert isinstance(result.exception, Became), result.output
    ((path, command, environment),) = became
    words = shlex.split(result.output.splitlines()[0])
    variables = dict(word.split("=", 1) for word in words[: words.index(sys.executable)])
    assert words[len(variables) :] == command and command[0] == path
    assert variables.items() <= environment.items() and environment.keys() >= os.environ.keys()
    assert variables["VLLM_NO_USAGE_STATS"] == "1"
    given = options(command)
    assert (given["--model"], given["--max-num-seqs"]) == (str(tiny_target), "3")
    assert (given["--host"], given["--port"]) == ("127.0.0.1", str(port))
    assert f"eyas demo --profile tiny --endpoint http://127.0.0.1:{port}" in result.output
    assert "warning" not in result.output


def test_a_server_for_all_is_warned_of(checkout: Path, became: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ["serve", "--profile", "tiny", "--port", str(free_port()), "--host", "0.0.0.0"]
    assert "warning: anyone who reaches 0.0.0.0" in CliRunner().invoke(app, asked).output
    monkeypatch.setenv("VLLM_API_KEY", "sk-secret")
    with_key = CliRunner().invoke(app, asked).output
    assert "warning" not in with_key and "sk-secret" not in with_key
    assert len(became) == 2


def refusal(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 1 and isinstance(result.exception, SystemExit), result.output
    return result.output


def test_nothing_is_started_without_head_target_or_port(checkout: Path, became: list[Any], tiny_target: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        told = refusal("serve", "--profile", "tiny", "--port", port)
        assert f"port {port} of 127.0.0.1 is in use" in told and "choose another with --port" in told
    told = refusal("serve", "--profile", "tiny", "--host", "192.0.2.1")  # an address of nobody
    assert "192.0.2.1:8000: cannot listen there" in told
    described = json.loads((checkout / "data/tiny/target.json").read_text())
    (checkout / "data/tiny/target.json").write_text(json.dumps(described | {"weights_hash": "other"}))
    assert "has changed since (weights_hash)" in refusal("serve", "--profile", "tiny", "--port", str(free_port()))
    (checkout / "data/tiny/draft_head/config.json").unlink()
    told = refusal("serve", "--profile", "tiny")
    assert "data/tiny/draft_head/config.json: no such file" in told
    assert "`make repro PROFILE=tiny`" in told and "`make pull PROFILE=tiny`" in told
    assert "no profile `tony`; did you mean `tiny`?" in refusal("serve", "--profile", "tony")
    assert not became


@pytest.mark.parametrize(
    ("host", "url"),
    [("127.0.0.1", "http://127.0.0.1:8000"), ("0.0.0.0", "http://127.0.0.1:8000"), ("::1", "http://[::1]:8000")],
)
def test_where_a_server_is_reached(host: str, url: str) -> None:
    assert serving.server_url(host, 8000) == url


TEXTS = ["plain text, two  spaces ", "naïve café", "日本語 and 𝄞 and 👩‍🚒\n\tnext", "a\n\nb"]


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_are_whole_characters_and_the_whole_text(chat: ChatTemplate, text: str) -> None:
    ids = chat.encode(text)
    pieces = Pieces(chat)
    texts = [pieces.text(i) for i in ids]
    assert "".join(texts) == text and pieces.rest() == ""
    assert not any("�" in piece for piece in texts)
    assert texts == chat.pieces(ids)


def test_special_tokens_and_halves_of_characters(chat: ChatTemplate) -> None:
    first, *_ = chat.encode("日")
    pieces = Pieces(chat)
    assert pieces.text(first) == ""
    assert pieces.text(END) == "�"  # the character will not come any more
    assert pieces.text(chat.encode("x")[0]) == "x"
    assert pieces.text(first) == "" and pieces.rest() == "�" and pieces.rest() == ""
    assert "".join(map(pieces.text, chat.encode("a\x1b[2J\rb"))) == "a�[2J�b"  # a terminal would obey


def screen(chat: ChatTemplate, steps: Sequence[Sequence[int]], **settings: Any) -> str:
    out = Console(file=io.StringIO(), highlight=False, _environ={}, **settings)
    shown = Screen(chat, out)
    for step in steps:
        shown.step(step)
    shown.end()
    assert isinstance(out.file, io.StringIO)
    return out.file.getvalue()


def test_accepted_drafts_are_coloured_or_bracketed(chat: ChatTemplate) -> None:
    a, b, c = (chat.encode(text)[0] for text in "abc")
    steps = [[a], [b, b, c], [a], [c, END]]
    coloured = {"force_terminal": True, "color_system": "standard"}
    assert screen(chat, steps, **coloured) == f"a{GREEN}bb\x1b[0mca{GREEN}c\x1b[0m\n"
    assert screen(chat, steps) == "a[bb]ca[c]\n"
    assert screen(chat, steps, no_color=True, **coloured) == "a[bb]ca[c]\n"
    assert str(marked("", Console(file=io.StringIO()))) == ""


def test_a_character_belongs_to_the_token_that_completes_it(chat: ChatTemplate) -> None:
    ids = chat.encode("日")
    assert len(ids) == 3
    assert screen(chat, [ids]) == "日\n"  # the last of its tokens is the target's own
    assert screen(chat, [ids[:2], ids[2:] + ids[:1]]) == "[日]�\n"
    assert screen(chat, [[c] for c in chat.encode("[x] ")]) == "[x] \n"


def test_long_text_and_line_ends_come_out_as_they_are(chat: ChatTemplate) -> None:
    text = "wide " * 60 + "\n\n  indented  \n"
    assert screen(chat, [[i] for i in chat.encode(text)], width=40) == text + "\n"
    assert screen(chat, [[*chat.encode(text), END]], width=40) == f"[{text}]\n"


def test_the_count_leaves_the_prompt_s_own_step_out() -> None:
    count = Count()
    count.add([1])
    assert count.line() == "1 tokens, 0 steps, 0% were accepted drafts"
    for step in ([1, 2, 3], [4], [5, 6]):
        count.add(step)
    assert count.line() == "7 tokens, 3 steps, 2.00 tokens a step, 43% were accepted drafts"


def streaming(steps: Sequence[Sequence[int] | None], shown: threading.Event | None = None) -> Misbehaviour:
    """An answer as vLLM streams it; behind the first step it waits until ``shown``. None: the connection breaks."""

    def stream(handler: Handler, body: dict[str, Any], number: int) -> bool:
        handler.send_response(200)
        handler.send_header("content-type", "text/event-stream")
        handler.send_header("transfer-encoding", "chunked")
        handler.end_headers()

        def send(data: str) -> None:
            handler.wfile.write(f"{len(data):x}\r\n{data}\r\n".encode())
            handler.wfile.flush()

        for index, ids in enumerate(steps):
            if index and shown is not None:
                assert shown.wait(30)
            if ids is None:
                handler.close_connection = True
                return True
            choice = {"index": 0, "text": "", "token_ids": list(ids), "finish_reason": None}
            chunk = {"id": "1", "object": "text_completion", "created": 0, "model": "m", "choices": [choice]}
            send(f"data: {json.dumps(chunk)}\n\n")
        send("data: [DONE]\n\n")
        send("")
        return True

    return stream


def refuse(handler: Handler, body: dict[str, Any], number: int) -> bool:
    handler.reply({"error": "full"}, 503)
    return True


class Watched(io.StringIO):
    """Says when something was written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = threading.Event()

    def write(self, text: str) -> int:
        self.written.set()
        return super().write(text)


def test_steps_are_shown_while_the_answer_comes(chat: ChatTemplate) -> None:
    file = Watched()
    a, b = (chat.encode(text)[0] for text in "ab")
    with FakeServer(misbehave=streaming([[a], [a, b], [], [END]], file.written)) as fake:
        server = Server(fake.url.removesuffix("/v1"), "the-target", "0.32.0", 1, 30.0)
        ask = show_answer(server, chat, "Hi", max_tokens=500, context=128, out=Console(file=file))
        count = asyncio.run(ask)
        (asked,) = fake.asked
    assert file.getvalue() == "a[a]b\n"
    assert (count.tokens, count.steps, count.accepted) == (4, 2, 1)
    prompt = chat.prompt_ids([{"role": "user", "content": "Hi"}])
    assert (asked["prompt"], asked["max_tokens"]) == (prompt, 128 - len(prompt))
    assert asked["temperature"] == 0.0 and asked["return_token_ids"] and asked["stream"]


def test_a_stream_that_breaks_and_a_prompt_that_is_too_long(chat: ChatTemplate) -> None:
    a = chat.encode("a")[0]
    file = io.StringIO()
    with FakeServer(misbehave=streaming([[]])) as fake:
        server = Server(fake.url.removesuffix("/v1"), "the-target", "0.32.0", 1, 30.0)

        def ask(prompt: str) -> None:
            asyncio.run(show_answer(server, chat, prompt, max_tokens=9, context=64, out=Console(file=file)))

        with pytest.raises(EyasError, match="without token ids"):
            ask("Hi")
        with pytest.raises(EyasError, match=r"the prompt has \d+ tokens, target.max_model_len is 64"):
            ask("many words " * 30)
        fake.misbehave = refuse
        with pytest.raises(EyasError, match="status 503"):
            ask("Hi")
        assert file.getvalue() == "\n\n"
        fake.misbehave = streaming([[a], None])
        with pytest.raises(EyasError, match="no whole answer"):
            ask("Hi")
        assert file.getvalue() == "\n\na\n"  # the error begins a line of its own
    with pytest.raises(EyasError, match="no whole answer"):
        ask("Hi")


def demo(fake: FakeServer, *prompt: str, said: str = "") -> Any:
    command = ["demo", "--profile", "tiny", "--endpoint", fake.url, *prompt]
    return CliRunner().invoke(app, command, input=said)


def test_the_demo_answers_its_prompt_or_each_line(checkout: Path, chat: ChatTemplate) -> None:
    a, b = (chat.encode(text)[0] for text in "ab")
    with FakeServer(root=json.loads((checkout / "data/tiny/target.json").read_text())["source"]) as fake:
        fake.misbehave = streaming([[a], [a, b], [END]])
        once = demo(fake, "How are you?")
        assert once.exit_code == 0, once.output
        assert once.stdout == (
            "[drafted and accepted] the target's own\n\na[a]b\n4 tokens, 2 steps, 1.50 tokens a step, 25% were accepted drafts\n\n"
        )
        lines = demo(fake, said="How are you?\nAnd now?\n\nnot asked\n")
        assert lines.exit_code == 0, lines.output
        assert lines.stdout.count("a[a]b\n4 tokens") == 2
        assert len(fake.asked) == 3 and fake.asked[0] == fake.asked[1] != fake.asked[2]
        assert demo(fake, said="How are you?").exit_code == 0  # the end of the input ends it


def test_the_demo_names_what_is_wrong_with_a_server(checkout: Path) -> None:
    with FakeServer(root="somebody/large") as fake:
        told = demo(fake, "Hi").output
        assert "--endpoint: http://127.0.0.1" in told and "serves the-target (from somebody/large)" in told
        fake.pages["/v1/models"] = 401, {}
        assert "--endpoint: http://127.0.0.1" in demo(fake, "Hi").output
    gone = demo(fake, "Hi")
    assert gone.exit_code == 1
    assert (
        f"no server answers at {fake.url}; start one with `make serve PROFILE=tiny` in another terminal" in gone.output
    )
    assert "machine.endpoint" not in gone.output + told


def test_a_benchmark_of_no_server_names_the_option(checkout: Path) -> None:
    with FakeServer() as fake:
        pass
    gone = CliRunner().invoke(app, ["benchmark", "--endpoint", fake.url, "--profile", "tiny"])
    assert gone.exit_code == 1
    assert f"no server answers at {fake.url}; start one with `make serve PROFILE=tiny`" in gone.output
    assert "machine" not in gone.output
