"""The other end of `eyas.benchmark.serve`: start an engine's process, hand it work, end it.

Takes a `Method`, prompts and settings; gives what the engine answers.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from eyas.benchmark.acceptance import Trace
from eyas.benchmark.child import ended
from eyas.benchmark.methods import Method
from eyas.benchmark.prompts import Prompt
from eyas.benchmark.runs import Repeat
from eyas.console import console
from eyas.errors import EyasError
from eyas.files import write_json_atomic
from eyas.params import Machine, TargetParams

_PATIENCE_S = 20


@dataclass(frozen=True)
class Setting:
    """What all engines of a benchmark have in common.

    Attributes:
        directory: the target's.
        target: compute type and context length.
        machine: placement.
        prompts: everything that may be served.
        max_tokens: longest answer.
        concurrency: prompts at a time, each that will be measured.
        work: scratch for requests.
        log: the stage's log; an engine writes beside it, to ``<log's stem>.<method>.log``.
    """

    directory: Path
    target: TargetParams
    machine: Machine
    prompts: Sequence[Prompt]
    max_tokens: int
    concurrency: Sequence[int]
    work: Path
    log: Path


class EngineProcess:
    """An engine in a process of its own. Use it as a context manager; `wait` until it is ready, then `serve`."""

    def __init__(self, method: Method, setting: Setting) -> None:
        self.method, self.log = method, setting.log.with_suffix(f".{method.label}.log")
        self._prompts = list(setting.prompts)
        request = setting.work / f"{method.label}.request.json"
        write_json_atomic(
            request,
            {
                "name": method.label,
                "k": method.k,
                "speculative": method.speculative,
                "max_tokens": setting.max_tokens,
                "concurrency": list(setting.concurrency),
                "directory": str(setting.directory),
                "target": setting.target.model_dump(mode="json"),
                "machine": setting.machine.model_dump(mode="json"),
                "prompts": [asdict(p) for p in self._prompts],
                "log": str(self.log),
            },
        )
        self._process = subprocess.Popen(
            [sys.executable, "-m", "eyas.benchmark.serve", str(request)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=console.file.fileno(),
            text=True,
        )

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the process: by the end of its commands, or at once after an error."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        if kind is not None:
            self._process.kill()
        with contextlib.suppress(BrokenPipeError):  # it has ended already
            self._process.stdin.close()
        try:
            self._process.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def wait(self) -> None:
        """Wait until the engine is ready.

        Raises:
            EyasError: it did not start.
        """
        self._answer(None)

    def serve(self, prompts: Sequence[int], concurrency: int, advance: Callable[[], None]) -> Repeat:
        """Serve prompts, named by their index, so many at a time; ``advance`` is called for each that is finished.

        Raises:
            EyasError: the engine failed, or miscounts.
        """
        self._send({"do": "serve", "prompts": list(prompts), "concurrency": concurrency})
        answer = self._answer(advance)
        return Repeat(answer["seconds"], [Trace(**t) for t in answer["traces"]], answer["step_s"])

    def gaps(self, cases: Sequence[dict[str, Any]]) -> list[float]:
        """For each case the gap between the log-probabilities of tokens ``own`` and ``other`` behind the token ids ``text``.

        Raises:
            EyasError: the engine failed.
        """
        self._send({"do": "gaps", "cases": list(cases)})
        gaps: list[float] = self._answer(None)["gaps"]
        return gaps

    def _send(self, command: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # what happened is said where its answer is missing
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()

    def _answer(self, advance: Callable[[], None] | None) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            message: dict[str, Any] = json.loads(line)
            if "error" in message:
                raise EyasError(f"benchmark, {self.method.label}: {message['error']} (engine log: {self.log})")
            if "done" in message:
                done: dict[str, Any] = message["done"]
                return done
            if advance is not None:
                advance()
        status = self._process.wait()
        raise EyasError(f"benchmark, {self.method.label}: its process {ended(status)}; engine log: {self.log}")
