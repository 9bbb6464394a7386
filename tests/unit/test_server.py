"""A running server as the engine: what is asked of it, and what becomes of a server that misbehaves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eyas.errors import EyasError
from eyas.extraction import asking
from eyas.extraction.answers import AnswerLog
from eyas.extraction.asking import ask_server
from eyas.extraction.dialogues import PROBE, Dialogue, dialogue
from eyas.extraction.responses import Answering
from eyas.extraction.server import Server, open_server
from eyas.params import Machine, ResponseParams, TargetParams
from eyas.templates.chat import ChatTemplate
from tests.tiny import END
from tests.vllm_server import FakeServer, Handler, Misbehaviour, completion, words

PARAMS = ResponseParams(temperature=0.7, top_p=0.9, max_tokens=12, seed=5, drop_looped=True)
TARGET = TargetParams(source="somebody/tiny", max_model_len=512)


@pytest.fixture(scope="module")
def chat(tiny_target: Path) -> ChatTemplate:
    return ChatTemplate(tiny_target)


def machine(fake: FakeServer, timeout_s: float = 30.0, concurrency: int = 8) -> Machine:
    return Machine(endpoint=fake.url, endpoint_concurrency=concurrency, endpoint_timeout_s=timeout_s)


def opened(fake: FakeServer, **options: Any) -> Server:
    return open_server(fake.url, machine(fake, **options), TARGET, Path("/models/tiny"))


def conversations(count: int, kind: str = "sampled") -> list[Dialogue]:
    users = [{"role": "user", "content": text} for text in ("Hello!", "How are you?", "And now?")]
    return [
        dialogue({"conversation_id": f"{n:08x}" * 8, "split": "train", "source": "s"}, kind, users[: 1 + n % 3], [])
        for n in range(count)
    ]


def ask(server: Server, chat: ChatTemplate, dialogues: list[Dialogue], log: Path) -> int:
    answers = AnswerLog(log)
    answering = Answering(iter(dialogues), lambda _: None, lambda _: None, answers, {}, chat, PARAMS, 512)
    try:
        ask_server(server, answering)
    finally:
        answers.close()
    return answering.asked


def test_answers_are_the_servers_token_ids(chat: ChatTemplate, tmp_path: Path) -> None:
    states = [*conversations(40), *conversations(1, PROBE)]
    with FakeServer() as fake:
        fake.delay_s = 0.01
        server = opened(fake)
        assert (server.model, server.version) == ("the-target", "0.32.0")
        assert ask(server, chat, states, tmp_path / "log.jsonl") == len(fake.asked)
        assert 2 <= fake.busiest <= 8
        bodies = {(tuple(body["prompt"]), body["seed"], body["temperature"]): body for body in fake.asked}
        assert ask(server, chat, conversations(40), tmp_path / "log.jsonl") == 0
    assert [len(state.turns) for state in states] == [1 + n % 3 for n in range(40)] + [1]
    for state in states:
        context: list[int] = []
        for turn in state.turns:
            prompt = context[: turn.shared] + turn.prompt_ids
            (body,) = [b for (ids, _, t), b in bodies.items() if list(ids) == prompt and words(b) == turn.token_ids][:1]
            assert turn.logprobs == [-i / 100 for i in turn.token_ids]
            assert turn.finish_reason == ("stop" if turn.token_ids[-1] == END else "length")
            assert body["temperature"] == (0.0 if state.kind == PROBE else 0.7)
            context = prompt + turn.token_ids
    sampled = next(body for body in fake.asked if body["temperature"])
    assert {name: sampled[name] for name in ("model", "max_tokens", "top_p", "top_k", "min_p", "logprobs")} == {
        "model": "the-target", "max_tokens": 12, "top_p": 0.9, "top_k": 0, "min_p": 0.0, "logprobs": 0,
    }  # fmt: skip
    assert sampled["return_token_ids"] and sampled["repetition_penalty"] == 1.0


def test_the_key_goes_to_the_server_and_nowhere_else(
    chat: ChatTemplate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    with FakeServer() as fake:
        ask(opened(fake), chat, conversations(1), tmp_path / "log.jsonl")
        assert fake.keys == {"Bearer sk-secret"}
        fake.pages["/v1/models"] = 401, {"error": {"message": "Incorrect API key provided: sk-secret"}}
        with pytest.raises(EyasError, match="OPENAI_API_KEY") as error:
            opened(fake)
        assert "sk-secret" not in str(error.value)
    assert "sk-secret" not in "".join(capfd.readouterr())
    monkeypatch.delenv("OPENAI_API_KEY")
    with FakeServer() as fake:
        ask(opened(fake), chat, conversations(1), tmp_path / "other.jsonl")
        assert fake.keys == {"Bearer EMPTY"}


def drop(handler: Handler, *_: Any) -> bool:
    handler.close_connection = True
    handler.connection.close()
    return True


@pytest.mark.parametrize(
    "fault",
    [
        lambda handler, body: handler.reply({"error": "out of order"}, 500),
        lambda handler, body: handler.reply({"error": "too many"}, 429),
        lambda handler, body: handler.reply("<html>Bad Gateway</html>", 502, "text/html"),
        drop,
    ],
    ids=["500", "429", "502", "dropped"],
)
def test_what_fails_for_a_moment_is_asked_again(
    chat: ChatTemplate, tmp_path: Path, fault: Callable[[Handler, dict[str, Any]], None]
) -> None:
    def twice(handler: Handler, body: dict[str, Any], number: int) -> bool:
        if number <= 2:
            fault(handler, body)
        return number <= 2

    with FakeServer(misbehave=twice) as fake:
        assert ask(opened(fake), chat, conversations(1), tmp_path / "log.jsonl") == 1
        assert len(fake.asked) == 3


def always(reply: Callable[[Handler, dict[str, Any]], None]) -> Misbehaviour:
    def misbehave(handler: Handler, body: dict[str, Any], number: int) -> bool:
        reply(handler, body)
        return True

    return misbehave


def changed(**values: Any) -> Misbehaviour:
    """A completion whose choice differs; a value of None leaves the key out."""

    def reply(handler: Handler, body: dict[str, Any]) -> None:
        value = completion(body, [5, 6, END])
        choice = value["choices"][0] | values
        handler.reply(value | {"choices": [{k: v for k, v in choice.items() if v is not None}]})

    return always(reply)


@pytest.mark.parametrize(
    ("misbehave", "message"),
    [
        (changed(token_ids=None), r"no token ids; Eyas needs vLLM 0\.10\.2"),
        (changed(prompt_token_ids=[1]), r"read another prompt \(1 tokens\)"),
        (changed(logprobs=None), r"no log-probability for each token"),
        (changed(logprobs={"token_logprobs": [-1.0]}), r"no log-probability for each token"),
        (changed(finish_reason="length"), r"after 3 of 12 tokens \(finish_reason length\)"),
        (changed(finish_reason="abort"), r"finish_reason abort"),
        (always(lambda h, b: h.reply("<html>", 200, "text/html")), r"not a completion"),
        (always(lambda h, b: h.reply({"choices": []})), r"not a completion"),
        (always(lambda h, b: h.reply("{", 200, "application/json; x")), r"not JSON"),
        (always(lambda h, b: h.reply({"error": {"message": "too long"}}, 400)), r"status 400: .*too long"),
        (always(lambda h, b: h.reply({"error": "nobody"}, 401)), r"set the server's in the variable OPENAI_API_KEY"),
        (always(lambda h, b: h.reply({"error": "broken"}, 500)), r"status 500: .*broken"),
        (drop, r"cannot be reached any more"),
    ],
)  # fmt: skip
def test_a_server_that_stays_wrong_is_named(
    chat: ChatTemplate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, misbehave: Misbehaviour, message: str
) -> None:
    monkeypatch.setattr(asking, "_RETRIES", 1)

    def later(handler: Handler, body: dict[str, Any], number: int) -> bool:
        return number > 3 and misbehave(handler, body, number)

    with FakeServer(misbehave=later) as fake:
        with pytest.raises(EyasError, match=message + r".*; 3 answers of this run are kept, run again"):
            ask(opened(fake, concurrency=1), chat, conversations(9), tmp_path / "log.jsonl")
        fake.misbehave = lambda handler, body, number: False
        assert ask(opened(fake), chat, conversations(9), tmp_path / "log.jsonl") == 18 - 3


@pytest.mark.parametrize("healthy", [False, True])
def test_a_server_that_hangs_is_noticed(chat: ChatTemplate, tmp_path: Path, healthy: bool) -> None:
    def hang(handler: Handler, body: dict[str, Any], number: int) -> bool:
        if number > 2:
            fake.pages["/health"] = (200, "") if healthy else (503, "")
            fake.stop.wait(60)
        return number > 2

    with FakeServer(misbehave=hang) as fake:
        message = r"has finished nothing for \d+ s; if" if healthy else r"hangs: .* does not answer /health"
        with pytest.raises(EyasError, match=message + r".*; 2 answers of this run are kept, run again"):
            ask(opened(fake, timeout_s=0.5), chat, conversations(9), tmp_path / "log.jsonl")


@pytest.mark.parametrize(
    ("page", "reply", "message"),
    [
        ("/v1/models", (200, "<html>Welcome</html>"), "is not a vLLM server"),
        ("/v1/models", (200, {"data": [{"name": "x"}]}), "is not a vLLM server"),
        ("/v1/models", (404, ""), "is not a vLLM server"),
        ("/version", (404, ""), "is not a vLLM server"),
        ("/version", (200, ["0.32"]), "is not a vLLM server"),
        ("/v1/models", (503, ""), "status 503; wait until the server is ready"),
        ("/v1/models", (302, ""), "is not a vLLM server"),
        ("/v1/models", (200, {"data": []}), "serves nothing, but the target is somebody/tiny"),
        (
            "/v1/models",
            (200, {"data": [{"id": "other", "root": "somebody/large", "max_model_len": 512}]}),
            r"serves other \(from somebody/large\), but the target is somebody/tiny.*--served-model-name somebody/tiny",
        ),
        (
            "/v1/models",
            (200, {"data": [{"id": "tiny", "root": "x", "parent": "large", "max_model_len": 512}]}),
            "serves nothing",  # an adapter is another model
        ),
        (
            "/v1/models",
            (200, {"data": [{"id": "tiny", "root": "x", "max_model_len": 511}]}),
            r"context of 511 tokens, target\.max_model_len is 512; start the server with --max-model-len 512",
        ),
    ],
)
def test_what_serves_something_else_is_named(page: str, reply: tuple[int, Any], message: str) -> None:
    with FakeServer() as fake:
        fake.pages[page] = reply
        with pytest.raises(EyasError, match=message):
            opened(fake)


@pytest.mark.parametrize("root", ["somebody/tiny", "/models/tiny", "/elsewhere/tiny/", "tiny"])
def test_the_target_is_found_among_what_is_served(root: str) -> None:
    with FakeServer(root=root) as fake:
        other = {"id": "other", "root": "large", "max_model_len": 9}
        fake.pages["/v1/models"][1]["data"].insert(0, other)
        assert opened(fake).model == "the-target"


def test_no_server_and_no_url() -> None:
    target, nowhere = TARGET, Machine()
    with FakeServer() as fake:
        url = fake.url
    with pytest.raises(EyasError, match=r"no server answers at http://127.0.0.1:\d+ .*`vllm serve`"):
        open_server(url, nowhere, target, Path("tiny"))
    for endpoint in ("127.0.0.1:8000", "ftp://127.0.0.1/v1", ""):
        with pytest.raises(EyasError, match="is not a URL such as"):
            open_server(endpoint, nowhere, target, Path("tiny"))
    with pytest.raises(EyasError, match="no password in the URL") as error:
        open_server("http://me:secret@127.0.0.1:8000/v1", nowhere, target, Path("tiny"))
    assert "secret" not in str(error.value)
