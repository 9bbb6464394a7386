"""Do planted faults of a draft head show: each is put into a copy of a trained head, and served by vLLM as the benchmark does.

    python -m benchmarks.benchmark.planted DATA RESULT.json

DATA is a finished ``data/smoke``, whose head has all norm flags. Where one of two of them is lost, ``norm_before_fc`` or
``norm_output``, a norm comes right behind and takes away the scale that is left; what is really lost are the gains, and those of a short
training are nearly alike. So these two are planted in the same head written with other gains: powers of two, which the matrices and norms that
read the result undo.

The result has for each head and each copy emitted tokens and target steps by prompt, and what `eyas.comparison.judgement`
says of the copy against the sound one, which must not be told apart from a sound copy.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from eyas.benchmark.methods import EAGLE3, methods
from eyas.benchmark.process import EngineProcess, Setting
from eyas.benchmark.prompts import choose_prompts
from eyas.comparison.judgement import acceptance_length, judge_counts
from eyas.errors import EyasError
from eyas.files import write_json_atomic
from eyas.params import Machine, load_profile
from eyas.stage import process_environment
from eyas.tables import CONVERSATIONS, read_table
from eyas.targets.resolve import open_target
from eyas.templates.chat import ChatTemplate

Plants = Mapping[str, Callable[[Path], None]]
MACHINE = Machine(cpu_kv_cache_gib=1)


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


def _lose(flag: str) -> Callable[[dict[str, Any]], None]:
    def change(config: dict[str, Any]) -> None:
        if not config[flag]:
            raise EyasError(f"{flag} is off in this head; what is not there cannot be lost")
        config[flag] = False

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


def rescale(head: Path) -> None:
    """The same head with gains far from each other.

    Exact in every format, but for the scale of `hidden_norm`, whose root mean square the new gains change a little from token to token.
    """
    file = head / "model.safetensors"
    tensors = load_file(file)
    random = torch.Generator().manual_seed(0)
    entering, leaving = (
        2.0 ** torch.randint(-2, 3, (len(tensors[name]),), generator=random)
        for name in ("input_norm.weight", "norm.weight")
    )
    tensors["input_norm.weight"] *= entering
    tensors["fc.weight"] *= leaving[:, None] / entering
    tensors["norm.weight"] *= leaving
    tensors["lm_head.weight"] /= leaving.to(tensors["lm_head.weight"].dtype)
    tensors["layers.0.hidden_norm.weight"] *= leaving.square().mean().sqrt() / leaving
    save_file(tensors, file)


AS_TRAINED: Plants = {
    "sound": lambda head: None,
    "sound, served again": lambda head: None,
    "shuffled layers": _shuffle_layers,
    "stale vocabulary map": _stale_vocabulary,
    "wrong rope base": _config(_wrong_rope),
    "norm_before_residual lost": _config(_lose("norm_before_residual")),
}
RESCALED: Plants = {
    "sound": lambda head: None,
    "norm_before_fc lost": _config(_lose("norm_before_fc")),
    "norm_output lost": _config(_lose("norm_output")),
}


def serve_planted(data: Path, head: Path, plants: Plants, heldout: int, max_tokens: int) -> dict[str, Any]:
    """Serve the held-out prompts with each copy of a head; by plant, counts by prompt, or the engine's refusal."""
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
            directory, profile.target, MACHINE, prompts, max_tokens, [concurrency], work, work / "engine.log"
        )
        for name, plant in plants.items():
            copy = work / "head"
            shutil.copytree(head, copy)
            plant(copy)
            method = next(m for m in methods(profile.benchmark, copy) if m.name == EAGLE3)
            try:
                with EngineProcess(method, setting) as engine:
                    engine.wait()
                    traces = engine.serve(range(len(prompts)), concurrency, lambda: None).traces
                served[name] = {p.prompt_id: [t.emitted, t.target_steps] for p, t in zip(prompts, traces, strict=True)}
                told = f"{acceptance_length(served[name]):.3f} tokens per step over {len(prompts)} prompts"
            except EyasError as error:
                told = str(error).partition(" (engine log")[0]
                served[name] = {"refused": told}
            print(f"{name}: {told}", flush=True)
            shutil.rmtree(copy)
    return served


def judged(served: Mapping[str, Any]) -> dict[str, Any]:
    """Counts of a head's copies, with the word for each against the sound one, paired by prompt."""
    verdicts = {
        name: "refused by the engine" if "refused" in counts else judge_counts(served["sound"], counts).word
        for name, counts in served.items()
        if name != "sound"
    }
    return {"verdicts": verdicts, "counts": served}


def main() -> None:
    """Serve, judge, write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("result", type=Path)
    parser.add_argument("--prompts", type=int, default=48)
    parser.add_argument("--max-tokens", type=int, default=32)
    given = parser.parse_args()
    os.environ.update(process_environment(MACHINE))  # the engines' processes inherit it
    serve = partial(serve_planted, given.data, heldout=given.prompts, max_tokens=given.max_tokens)
    with tempfile.TemporaryDirectory() as scratch:
        rescaled = Path(scratch) / "head"
        shutil.copytree(given.data / "draft_head", rescaled)
        rescale(rescaled)
        result = {
            "as trained": judged(serve(given.data / "draft_head", AS_TRAINED)),
            "rescaled": judged(serve(rescaled, RESCALED)),
        }
    write_json_atomic(given.result, result)
    print(json.dumps({head: found["verdicts"] for head, found in result.items()}, indent=2))


if __name__ == "__main__":
    main()
