"""A longer training on text that the target itself wrote, and many short ones: acceptance by amount of data and by setting.

    python benchmarks/drafting/long_run.py prompts DATA INPUTS               DATA: outputs of the profile `smoke`; from a checkout's root
    python benchmarks/drafting/long_run.py target GGUF INPUTS TARGET         the bundled target out of its file, where there is no network
    python benchmarks/drafting/long_run.py generate TARGET INPUTS ROWS       answers, and users' turns that the target makes up
    python benchmarks/drafting/long_run.py extract TARGET ROWS FOLDER        hidden states in float32, into FOLDER/store
    python benchmarks/drafting/long_run.py train TARGET INPUTS ROWS FOLDER RESULTS SETTINGS
    python benchmarks/drafting/long_run.py assemble RESULTS NAME HEAD        a head that was kept, as vLLM serves it, in the folder HEAD
    python benchmarks/drafting/long_run.py plot REPORT PICTURE               acceptance by tokens, of the shares in a committed report

`long_text.py` has the first three steps, `long_states.py` has `extract`; this file takes their rows and store, and gives trainings.
Store, reader and training loop are the project's own; without a GPU all runs on the CPU. A head is judged as `eyas.drafting` does
it: on smoke's validation rows after each epoch, and at the end on prompts that are new to smoke's training rows as well.

SETTINGS is JSON, or a file of it: a list of ``{"name": …, "data": "smoke" | "long", "share": 1, "keep": false, "vocab": 8192,
"draft": {…}, "train": {…}}``; only the name is needed. Shares are nested. RESULTS gets ``results.jsonl``, from which a rerun sees what
is done, and the trained tensors of heads that are to be kept, in float32, in files of at most 14 MiB. A training that the time limit
stops goes on in the next run.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import ValidationError
from safetensors import safe_open
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.drafting.long_states import extract
from benchmarks.drafting.long_text import (
    EXTRA,
    LONG,
    SMOKE,
    SOURCE,
    TEMPERATURE,
    VALIDATION,
    convert_target,
    generate,
    load_rows,
    write_prompts,
)
from benchmarks.store.common import note
from eyas.console import console
from eyas.drafting.data import TokenRow, TrainingData
from eyas.drafting.gradients import Together
from eyas.drafting.heads import export, make_head
from eyas.drafting.heldout import Heldout
from eyas.drafting.ranks import Ranks
from eyas.drafting.records import Training, epoch_row
from eyas.drafting.stopping import Stop
from eyas.drafting.training import fit
from eyas.errors import EyasError
from eyas.params import DraftParams, Machine, TargetParams, TrainParams
from eyas.store.format import row_key
from eyas.store.reader import StoreReader
from eyas.targets.head import load_head
from eyas.targets.resolve import resolve_target, text_config
from eyas.vocabulary import DraftVocabulary, choose, count_tokens

_PART_BYTES = 14 << 20
_TRAIN = {"epochs": 3, "lr": 1e-3, "tokens_per_step": 512, "ttt_steps": 3, "autocast": "bfloat16"}  # smoke's


def train(
    target: Path,
    inputs: Path,
    rows: Path,
    folder: Path,
    results: Path,
    settings: str,
    *,
    jobs: int,
    part: str,
    seconds: float,
    workers: int,
) -> None:
    """Settings one after another, or several at a time in processes of their own.

    Args:
        target: the target's folder.
        inputs: what `write_prompts` wrote.
        rows: what `generate` wrote.
        folder: has the store of `extract`; gets the trainings under way.
        results: gets a line for each setting, and the heads that are kept.
        settings: JSON, or a file of it.
        jobs: trainings at a time; above one, this command line runs in so many processes.
        part: ``FIRST:STEP``: of the settings, only every STEP-th one from FIRST on.
        seconds: a training that is not done by then is kept for a rerun.
        workers: processes that read shards.
    """
    wanted = json.loads(settings if settings.lstrip().startswith("[") else Path(settings).read_text())
    results.mkdir(parents=True, exist_ok=True)
    first, step = map(int, part.split(":"))
    console.quiet = step > 1  # others talk at the same time
    if jobs > 1:
        # short trainings: compiling would take longer than they do
        environment = os.environ | {"TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(Path(__file__).resolve()), *sys.argv[1:], "--jobs", "1", "--part"]
        children = [subprocess.Popen([*command, f"{i}:{jobs}"], env=environment) for i in range(jobs)]
        if failed := sum(child.wait() != 0 for child in children):
            sys.exit(f"{failed} of {jobs} processes have failed")
        return
    stop = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGTERM))
    stop.daemon = True
    stop.start()
    records, began = results / f"results-{first}.jsonl", time.monotonic()
    done = {json.loads(line)["name"] for file in results.glob("*.jsonl") for line in file.open()}
    bench = Bench(target, inputs, rows, folder, results, workers)
    for setting in wanted[first::step]:
        if setting["name"] in done:
            continue
        if time.monotonic() - began > seconds - 5:
            break
        try:
            record = bench.run(setting)
        except (EyasError, ValidationError, torch.OutOfMemoryError) as error:  # a stop, or a setting that cannot be
            note(f"{setting['name']}: {error}")
            continue
        with records.open("a") as file:
            file.write(json.dumps(record) + "\n")
    stop.cancel()


class Bench:
    """Rows and store, opened once, and a training for each setting."""

    def __init__(self, target: Path, inputs: Path, rows: Path, folder: Path, results: Path, workers: int) -> None:
        """The arguments are those of `train`."""
        self._folder, self._results, self._directory = folder, results, target
        self._workers, self._special = workers, load_rows(inputs)[1]["special"]
        self._reader = StoreReader(folder / "store")
        fingerprint = self._reader.spec.fingerprint
        self._groups: dict[int, list[TokenRow]] = {group: [] for group in (SMOKE, VALIDATION, LONG, EXTRA)}
        for row in load_rows(rows)[0]:
            ids, mask = np.array(row.ids, np.int32), np.array(row.mask, bool)
            if mask[1:].any():
                key = row_key(fingerprint, ids)
                self._groups[row.group].append(TokenRow(f"{row.conversation}", key, ids, mask))
        self._head, self._vocab_size = load_head(target), text_config(target).vocab_size

    def _rows(self, setting: dict[str, Any]) -> list[TokenRow]:
        """A share of the rows, by tokens; keys are hashes, so their order is random, and a smaller share is a part of a larger one."""
        rows = self._groups[SMOKE]
        if setting.get("data", "smoke") == "long":
            rows = sorted(rows + self._groups[LONG], key=lambda row: row.key)
        wanted = setting.get("share", 1) * sum(row.slots for row in rows)
        before = itertools.accumulate((row.slots for row in rows), initial=0)
        return [row for row, tokens in zip(rows, before, strict=False) if tokens < wanted]

    def run(self, setting: dict[str, Any]) -> dict[str, Any]:
        """Train and judge; gives the record, and keeps the head if the setting says so.

        Raises:
            EyasError: as `fit`.
        """
        rows, name = self._rows(setting), setting["name"]
        params, draft = TrainParams(**(_TRAIN | setting.get("train", {}))), DraftParams(**setting.get("draft", {}))
        counts_V, heldout_V = (
            count_tokens(((r.input_ids, r.loss_mask) for r in part), self._vocab_size)
            for part in (rows, self._groups[VALIDATION])
        )
        vocabulary = choose(counts_V, setting.get("vocab", 8192), self._special)
        layers = self._reader.spec.layers
        model = make_head(
            draft, self._directory, SOURCE, vocabulary, layers, ttt_steps=params.ttt_steps, seed=params.seed
        )
        data = TrainingData(self._reader, rows, self._groups[VALIDATION], self._workers)
        work = self._folder / "trainings" / name
        training = fit(model, data, params, self._head, TEMPERATURE, work, Machine(checkpoints_kept=1))
        extra = TrainingData(self._reader, rows, self._groups[EXTRA], self._workers)
        judge = Heldout(extra, params, self._head, TEMPERATURE, Ranks())
        _, wider = judge.evaluate(Together(model), Stop())
        trained = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
        record = {
            "name": name,
            "setting": setting | {"train": params.model_dump(mode="json"), "draft": draft.model_dump(mode="json")},
            "rows": len(rows),
            "tokens": sum(row.slots for row in rows),
            "supervised_tokens": sum(row.supervised for row in rows),
            "trained_weights": trained,
            "weights_a_draft": trained + model.lm_head.weight.numel(),
            "coverage": vocabulary.coverage(counts_V),
            "validation_coverage": vocabulary.coverage(heldout_V),
            "epochs": [epoch_row(epoch) for epoch in training.epochs],
            "best": epoch_row(training.best),
            "extra": vars(wider),
            "steps": len(training.steps),
            "seconds": training.seconds,
            "tokens_per_s": training.tokens_per_s,
            "waiting_share": training.waiting_share,
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        }
        if setting.get("keep"):
            save_parts(self._results, setting, model, vocabulary, layers)
        shutil.rmtree(work)
        note(_line(record, training))
        return record


def _line(record: dict[str, Any], training: Training) -> str:
    best, extra = training.best, record["extra"]
    positions = " ".join(f"{share:.3f}" for share in extra["by_position"])
    return (
        f"{record['name']}: acceptance length {extra['length']:.3f} ({extra['low']:.3f} to {extra['high']:.3f}; {positions}), "
        f"on smoke's rows {best.heldout.length:.3f}, epoch {best.epoch} of {len(training.epochs)}, loss {best.train_loss:.3f}, "
        f"held out {best.heldout_loss:.3f}, {record['tokens']:,} tokens, {record['steps']} steps, "
        f"{record['weights_a_draft'] / 1e6:.1f} M weights, {training.seconds:.0f} s, {training.tokens_per_s:,.0f} tokens/s"
    )


def save_parts(
    folder: Path, setting: dict[str, Any], model: Any, vocabulary: DraftVocabulary, layers: Sequence[int]
) -> None:
    """The trained tensors (float32) and ``target_ids`` int32 [draft vocabulary], in files of a limited size.

    Args:
        folder: gets ``head-NAME-0.safetensors`` and so on.
        setting: goes into each file, with the layers.
        model: the trained head.
        vocabulary: its draft vocabulary.
        layers: recorded layer ids.
    """
    tensors = {"target_ids": torch.from_numpy(vocabulary.target_ids.astype(np.int32))}
    tensors |= {n: w.detach().float().cpu().contiguous() for n, w in model.named_parameters() if w.requires_grad}
    parts: list[dict[str, torch.Tensor]] = [{}]
    for name, tensor in tensors.items():
        if parts[-1] and sum(t.nbytes for t in parts[-1].values()) + tensor.nbytes > _PART_BYTES:
            parts.append({})
        parts[-1][name] = tensor
    metadata = {"setting": json.dumps(setting), "layers": json.dumps(list(layers))}
    for number, part in enumerate(parts):
        save_file(part, folder / f"head-{setting['name']}-{number}.safetensors", metadata)


def assemble(results: Path, name: str, head: Path, *, target: Path | None) -> None:
    """The head out of its parts and the target: ``config.json`` and ``model.safetensors``, as vLLM serves it.

    Args:
        results: has the parts (`save_parts`).
        name: of the setting.
        head: the folder to make.
        target: the target's folder; the bundled one without it.

    Raises:
        EyasError: a part is missing.
    """
    tensors: dict[str, torch.Tensor] = {}
    metadata: dict[str, str] = {}
    paths = sorted(results.glob(f"head-{name}-[0-9].safetensors"))
    if not paths:
        raise EyasError(f"{results}: no head-{name}-0.safetensors")
    for path in paths:
        tensors |= load_file(path)
        with safe_open(path, "pt") as part:
            metadata = part.metadata()
    directory = target or resolve_target(TargetParams(source=SOURCE, max_model_len=1024))
    setting = json.loads(metadata["setting"])
    ids = tensors.pop("target_ids").numpy().astype(np.int64)
    t2d_V = np.zeros(text_config(directory).vocab_size, dtype=bool)
    t2d_V[ids] = True
    vocabulary = DraftVocabulary(ids - np.arange(len(ids)), t2d_V, np.zeros(len(t2d_V), dtype=np.int64))
    params = TrainParams(**(_TRAIN | setting.get("train", {})))
    draft, layers = DraftParams(**setting.get("draft", {})), json.loads(metadata["layers"])
    model = make_head(draft, directory, SOURCE, vocabulary, layers, ttt_steps=params.ttt_steps, seed=params.seed)
    if set(tensors) != {key for key, weight in model.named_parameters() if weight.requires_grad}:
        raise EyasError(f"{results}: {len(paths)} parts are not one whole head; are all of them there?")
    model.load_state_dict(tensors, strict=False)
    head.mkdir(parents=True)
    export(model, head)
    note(f"{head}: {len(paths)} parts made the head {name}")


def plot(report: Path, picture: Path) -> None:
    """Held-out acceptance length over tokens trained on, from the trainings whose names begin with `share-`.

    Args:
        report: JSON whose ``trainings`` are lines of `train`.
        picture: the file to write.
    """
    from matplotlib.figure import Figure

    records = [r for r in json.loads(report.read_text())["trainings"] if r["name"].startswith("share-")]
    records.sort(key=lambda record: (record["tokens"], record["trained_weights"]))
    narrow = [r for r in records if "vocab" not in r["setting"]]
    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = figure.subplots()
    millions = [r["tokens"] / 1e6 for r in narrow]
    lengths = [r["extra"]["length"] for r in narrow]
    spread = [
        [r["extra"]["length"] - r["extra"]["low"] for r in narrow],
        [r["extra"]["high"] - r["extra"]["length"] for r in narrow],
    ]
    axes.errorbar(millions, lengths, spread, marker="o", capsize=3, label="256 held-out prompts, 95 % interval")
    own = [max(epoch["heldout_acceptance_length"] for epoch in r["epochs"]) for r in narrow]
    axes.plot(millions, own, marker="s", linestyle="--", label="the profile smoke's validation rows")
    for wide in (r for r in records if r not in narrow):
        axes.plot(wide["tokens"] / 1e6, wide["extra"]["length"], "^", label="wider head, 256 held-out prompts")
    axes.set_xscale("log")
    axes.set_xticks(millions, [f"{value:.2g}" for value in millions], minor=False)
    axes.minorticks_off()
    axes.set_xlabel("million tokens trained on")
    axes.set_ylabel("acceptance length, k = 3")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(picture, dpi=130)


def main(words: Iterable[str] | None = None) -> None:
    """Do one of the steps."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    steps = parser.add_subparsers(required=True)

    def step(name: str, function: Callable[..., None], *paths: str) -> argparse.ArgumentParser:
        added = steps.add_parser(name, help=(function.__doc__ or "").splitlines()[0])
        added.set_defaults(function=function)
        for path in paths:
            added.add_argument(path, type=Path)
        return added

    step("prompts", write_prompts, "data", "inputs")
    step("target", convert_target, "gguf", "inputs", "target")
    generating = step("generate", generate, "target", "inputs", "rows")
    generating.add_argument("--tokens", type=int, default=5_500_000, help="to generate")
    generating.add_argument("--seconds", type=float, default=300, help="no batch begins later")
    generating.add_argument("--batch", type=int, default=2048, help="rows at a time")
    generating.add_argument("--samples", type=int, default=3, help="answers to each prompt of the catalogue")
    generating.add_argument("--max-tokens", type=int, default=160, help="longest answer")
    generating.add_argument("--seed", type=int, default=0)
    extracting = step("extract", extract, "target", "rows", "folder")
    extracting.add_argument("--layers", type=int, nargs="+", default=[2, 15, 27, 30])
    extracting.add_argument("--codec", choices=("none", "lossless"), default="none")
    extracting.add_argument("--shard-mib", type=int, default=256)
    extracting.add_argument("--batch-tokens", type=int, default=32768)
    training = step("train", train, "target", "inputs", "rows", "folder", "results")
    training.add_argument("settings", help="JSON, or a file of it")
    training.add_argument("--jobs", type=int, default=1, help="trainings at a time")
    training.add_argument("--part", default="0:1", help=argparse.SUPPRESS)
    training.add_argument(
        "--seconds", type=float, default=86400, help="a training that is not done by then is kept for a rerun"
    )
    for parser_of_workers, workers in ((extracting, 12), (training, 8)):
        parser_of_workers.add_argument(
            "--workers", type=int, default=workers, help="processes that write or read shards"
        )
    assembling = step("assemble", assemble, "results")
    assembling.add_argument("name")
    assembling.add_argument("head", type=Path)
    assembling.add_argument("--target", type=Path, help="the target's folder; default: the bundled one")
    step("plot", plot, "report", "picture")
    arguments = vars(parser.parse_args(None if words is None else list(words)))
    function: Callable[..., None] = arguments.pop("function")
    function(**arguments)


if __name__ == "__main__":
    main()
