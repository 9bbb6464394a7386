"""Do planted faults of a draft head show: each is put into a copy of a trained head, and served by vLLM as the benchmark does.

    python -m benchmarks.benchmark.planted DATA RESULT.json

DATA is a finished ``data/smoke``. The result has, for each copy, emitted tokens and target steps by prompt, and what
`eyas.comparison.judgement` says of it against the sound head. One copy is sound: it must not be told apart.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from eyas.benchmark.methods import EAGLE3, methods
from eyas.benchmark.process import EngineProcess, Setting
from eyas.benchmark.prompts import choose_prompts
from eyas.comparison.judgement import judge_counts
from eyas.errors import EyasError
from eyas.files import write_json_atomic
from eyas.params import Machine, load_profile
from eyas.stage import process_environment
from eyas.tables import CONVERSATIONS, read_table
from eyas.targets.resolve import open_target
from eyas.templates.chat import ChatTemplate


def _config(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    def plant(head: Path) -> None:
        file = head / "config.json"
        config = json.loads(file.read_text())
        change(config)
        file.write_text(json.dumps(config))

    return plant


def _tensor_bytes(head: Path, name: str, change: Callable[[bytes], bytes]) -> None:
    """Change a tensor in place, in the file's bytes: safetensors' NumPy reader knows no bfloat16."""
    file = head / "model.safetensors"
    content = bytearray(file.read_bytes())
    length = int.from_bytes(content[:8], "little")
    start, end = json.loads(content[8 : 8 + length])[name]["data_offsets"]
    at = slice(8 + length + start, 8 + length + end)
    content[at] = change(bytes(content[at]))
    file.write_bytes(content)


def _shuffle_layers(head: Path) -> None:
    """The head of a trainer that read the three layers in another order: vLLM itself ignores the order of the ids in the config."""

    def rotate(content: bytes) -> bytes:
        fc = np.frombuffer(content, np.float32)
        hidden = round((len(fc) / 3) ** 0.5)
        return np.roll(fc.reshape(hidden, 3, hidden), 1, axis=1).tobytes()

    _tensor_bytes(head, "fc.weight", rotate)


def _wrong_rope(config: dict[str, Any]) -> None:
    config["transformer_layer_config"]["rope_parameters"]["rope_theta"] = 100.0


def _lose(*flags: str) -> Callable[[dict[str, Any]], None]:
    def change(config: dict[str, Any]) -> None:
        config.update(dict.fromkeys(flags, False))

    return change


def _stale_vocabulary(head: Path) -> None:
    """The map of an earlier vocabulary, which had another few hundred tokens: all behind the first of them are off."""

    def stale(content: bytes) -> bytes:
        d2t = np.frombuffer(content, np.int64)
        tokens = np.arange(len(d2t)) + d2t
        unused = np.setdiff1d(np.arange(tokens.max()), tokens)[:300]
        kept = np.sort(np.concatenate([tokens[: len(tokens) - len(unused)], unused]))
        return bytes((kept - np.arange(len(kept))).tobytes())

    _tensor_bytes(head, "d2t", stale)


PLANTS: dict[str, Callable[[Path], None]] = {
    "sound": lambda head: None,
    "sound, served again": lambda head: None,
    "shuffled layers": _shuffle_layers,
    "stale vocabulary map": _stale_vocabulary,
    "wrong rope base": _config(_wrong_rope),
    "norm_before_fc lost": _config(_lose("norm_before_fc")),
    "norm_before_residual lost": _config(_lose("norm_before_residual")),
    "norm_output lost": _config(_lose("norm_output")),
    "all norm flags lost": _config(_lose("norm_before_fc", "norm_before_residual", "norm_output")),
}


def serve_planted(data: Path, heldout: int, max_tokens: int) -> dict[str, Any]:
    """Serve the held-out prompts with each copy; by plant, counts by prompt, or the engine's refusal."""
    profile = load_profile("smoke")
    directory, _ = open_target(profile.target, data / "target.json")
    prompts = choose_prompts(
        read_table(data / "conversations" / "conversations.parquet", CONVERSATIONS),
        [],
        heldout=heldout,
        per_set=0,
        encode=ChatTemplate(directory).prompt_ids,
        longest=profile.target.max_model_len - max_tokens,
    )
    concurrency = profile.benchmark.concurrency[0]
    served: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch)
        setting = Setting(
            directory, profile.target, Machine(), prompts, max_tokens, [concurrency], work, work / "engine.log"
        )
        for name, plant in PLANTS.items():
            head = work / "head"
            shutil.copytree(data / "draft_head", head)
            plant(head)
            method = next(m for m in methods(profile.benchmark, head) if m.name == EAGLE3)
            try:
                with EngineProcess(method, setting) as engine:
                    engine.wait()
                    traces = engine.serve(range(len(prompts)), concurrency, lambda: None).traces
                served[name] = {p.prompt_id: [t.emitted, t.target_steps] for p, t in zip(prompts, traces, strict=True)}
            except EyasError as error:
                served[name] = {"refused": str(error).partition(" (engine log")[0]}
            print(name, served[name], flush=True)
            shutil.rmtree(head)
    return served


def judged(served: dict[str, Any]) -> dict[str, str]:
    """The word for each copy against the sound head, paired by prompt."""
    sound = served["sound"]
    return {
        name: "refused by the engine" if "refused" in counts else judge_counts(sound, counts).word
        for name, counts in served.items()
        if name != "sound"
    }


def main() -> None:
    """Serve, judge, write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("result", type=Path)
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--max-tokens", type=int, default=32)
    given = parser.parse_args()
    os.environ.update(process_environment(Machine()))  # the engine's processes inherit it
    served = serve_planted(given.data, given.prompts, given.max_tokens)
    words = judged(served)
    write_json_atomic(given.result, {"verdicts": words, "counts": served})
    print(json.dumps(words, indent=2))


if __name__ == "__main__":
    main()
