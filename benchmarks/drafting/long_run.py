"""A longer training on text that the target itself wrote, and many short ones: acceptance by amount of data and by setting.

    python -m benchmarks.drafting.long_run prompts DATA INPUTS               DATA: outputs of the profile `smoke`; from a checkout's root
    python -m benchmarks.drafting.long_run target GGUF INPUTS TARGET         the bundled target out of its file, where there is no network
    python -m benchmarks.drafting.long_run generate TARGET INPUTS ROWS       answers, and users' turns that the target makes up
    python -m benchmarks.drafting.long_run extract TARGET ROWS FOLDER        hidden states in float32, into FOLDER/store
    python -m benchmarks.drafting.long_run train TARGET INPUTS ROWS FOLDER RESULTS SETTINGS
    python -m benchmarks.drafting.long_run assemble RESULTS NAME HEAD        a head that was kept, as vLLM serves it, in the folder HEAD
    python -m benchmarks.drafting.long_run plot REPORT PICTURE               acceptance by tokens, of the shares in a committed report

Prompts are the bundled catalogue's, and ones that the target samples where the template opens a user's turn (Magpie,
https://arxiv.org/abs/2406.08464). What resembles a prompt of smoke's validation split or of its benchmark sets is left out of both.
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
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from eyas.console import console
from eyas.conversations.contamination import BenchmarkIndex
from eyas.conversations.loops import is_looped
from eyas.conversations.screen import is_crude, is_english
from eyas.conversations.shingles import words
from eyas.drafting.data import TokenRow, TrainingData
from eyas.drafting.gradients import Together
from eyas.drafting.heads import export, make_head
from eyas.drafting.heldout import Heldout
from eyas.drafting.ranks import Ranks, training_device
from eyas.drafting.records import Training, epoch_row
from eyas.drafting.stopping import Stop
from eyas.drafting.training import fit
from eyas.errors import EyasError
from eyas.extraction.reference import reference_states
from eyas.files import value_hash
from eyas.params import DraftParams, Machine, TargetParams, TrainParams
from eyas.store.format import StoreSpec, row_key
from eyas.store.reader import StoreReader
from eyas.store.spool import RowSpool
from eyas.store.writer import Sealer, publish
from eyas.targets.gguf import convert_gguf
from eyas.targets.head import load_head
from eyas.targets.resolve import describe_target, resolve_target, text_config
from eyas.vocabulary import DraftVocabulary, choose, count_tokens

SOURCE, TEMPERATURE = "bundled:smollm2-135m", 0.7
SMOKE, VALIDATION, LONG, EXTRA = range(4)  # groups of rows
_CATALOGUE = ("package:chitchat", "package:evals", "package:arena-hard")
_MOST_CHARS, _FEWEST_WORDS = 400, 4
_EXTRA_PROMPTS = 256
_PART_BYTES = 14 << 20
_CHUNK_ROWS = 4096
_TRAIN = {"epochs": 3, "lr": 1e-3, "tokens_per_step": 512, "ttt_steps": 3, "autocast": "bfloat16"}  # smoke's


class Row(NamedTuple):
    """One row of tokens; a prompt without its answer has no mask."""

    group: int
    conversation: int
    ids: list[int]
    mask: list[bool]


def note(text: str) -> None:
    """A line for whoever waits."""
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


def save_rows(path: Path, rows: Sequence[Row], more: dict[str, Any]) -> None:
    """Rows and a JSON-able value in one compressed file."""
    flat = list(itertools.chain.from_iterable(row.ids for row in rows))
    if flat and max(flat) > 0xFFFF:
        raise EyasError("the file of rows holds token ids below 65,536 only")
    temporary = path.with_suffix(".part.npz")
    np.savez_compressed(
        temporary,
        ids=np.array(flat, dtype=np.uint16),
        mask=np.fromiter(itertools.chain.from_iterable(row.mask for row in rows), bool),
        table=np.array([(row.group, row.conversation, len(row.ids), len(row.mask)) for row in rows], dtype=np.int32),
        more=np.array(json.dumps(more)),
    )
    os.replace(temporary, path)


def load_rows(path: Path) -> tuple[list[Row], dict[str, Any]]:
    """What `save_rows` wrote."""
    with np.load(path) as file:
        ids, mask, more = file["ids"].tolist(), file["mask"].tolist(), json.loads(str(file["more"]))
        rows, start, masked = [], 0, 0
        for group, conversation, length, labels in file["table"].tolist():
            rows.append(Row(group, conversation, ids[start : start + length], mask[masked : masked + labels]))
            start, masked = start + length, masked + labels
    return rows, more


def prompts(arguments: argparse.Namespace) -> None:
    """Smoke's rows as they are; prompts as ids; what generation needs to know of the template."""
    from eyas.conversations import bundled
    from eyas.conversations.rules import validate
    from eyas.conversations.sources import read_source
    from eyas.params import SourceParams
    from eyas.tables import CONVERSATIONS, PROBE, PROMPTS, TOKENS, read_table
    from eyas.templates.chat import ChatTemplate

    directory = resolve_target(TargetParams(source=SOURCE, max_model_len=1024))
    template = ChatTemplate(directory, trust_remote_code=False)
    data: Path = arguments.data
    own: dict[str, list[str]] = {"train": [], "validation": []}
    for conversation in read_table(data / "conversations" / "conversations.parquet", CONVERSATIONS):
        own[conversation["split"]] += [
            m["content"] for m in json.loads(conversation["messages"]) if m["role"] == "user"
        ]
    kept_out = own["validation"] + [
        turn for prompt in read_table(data / "conversations" / "prompts.parquet", PROMPTS) for turn in prompt["turns"]
    ]
    table = [row for row in read_table(data / "tokens" / "tokens.parquet", TOKENS) if row["kind"] != PROBE]
    numbers = {name: number for number, name in enumerate(dict.fromkeys(row["conversation_id"] for row in table))}
    rows = [
        Row(
            SMOKE if row["split"] == "train" else VALIDATION,
            numbers[row["conversation_id"]],
            row["input_ids"],
            row["loss_mask"],
        )
        for row in table
    ]
    texts: dict[str, None] = {}
    for source in _CATALOGUE:
        for found in read_source(SourceParams(source=source), bundled.TRAINING, source):
            turns = validate(found.content)[0].user_turns  # type: ignore[arg-type]  # bundled rows have no faults
            # later turns of small talk are openings too where they are long enough
            texts |= dict.fromkeys(t for t in turns if len(t) <= _MOST_CHARS and len(words(t)) >= _FEWEST_WORDS)
    seen = BenchmarkIndex(kept_out)
    clean = [text for text in sorted(texts, key=value_hash) if not seen.contains(text)]
    known = BenchmarkIndex(own["train"])
    extra = [text for text in clean if not known.contains(text)][:_EXTRA_PROMPTS]
    kept_out += extra
    seen = BenchmarkIndex(extra)
    train = [text for text in clean if not seen.contains(text)]
    for text in extra + train:
        ids = template.prompt_ids([{"role": "user", "content": text}])
        rows.append(Row(EXTRA if len(rows) < len(table) + len(extra) else LONG, len(rows), ids, []))
    word = "WORD"
    opening, rest = template.render([{"role": "user", "content": word}], generation_prompt=True).split(word)
    more = {
        "kept_out": kept_out,
        "opening": template.encode(opening),
        "rest": template.encode(rest),
        "ends": template.end_ids,
        "special": template.special_ids,
        "weights_hash": describe_target(TargetParams(source=SOURCE, max_model_len=1024), directory)["weights_hash"],
    }
    save_rows(arguments.inputs, rows, more)
    note(
        f"{len(texts)} prompts in the catalogue, {len(train)} to train on, {len(extra)} held out besides smoke's; "
        f"{len(table)} rows of smoke; {arguments.inputs.stat().st_size >> 10} KiB"
    )


def target(arguments: argparse.Namespace) -> None:
    """Convert the target's file, and see that it became what smoke had."""
    arguments.target.mkdir(parents=True)
    convert_gguf(arguments.gguf, arguments.target)
    wanted = load_rows(arguments.inputs)[1]["weights_hash"]
    found = describe_target(TargetParams(source=str(arguments.target), max_model_len=1024), arguments.target)
    if found["weights_hash"] != wanted:
        raise EyasError(f"{arguments.target}: the weights are others than smoke's; is the file whole?")
    note(f"target in {arguments.target}")


def answers(
    model: Any, asked: Sequence[list[int]], more: dict[str, Any], temperature: float, most: int
) -> list[list[int]]:
    """Sampled continuations, each with the token that ended it, if one did."""
    device, width, end = model.device, max(map(len, asked)), more["ends"][0]
    ids = torch.tensor([[end] * (width - len(p)) + p for p in asked], device=device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in asked], device=device)
    with torch.inference_mode():
        out = model.generate(
            ids, attention_mask=mask, max_new_tokens=most, do_sample=True, temperature=temperature, top_k=0, top_p=1.0,
            eos_token_id=more["ends"], pad_token_id=end,
        )  # fmt: skip
    found = out[:, width:].tolist()
    ends = set(more["ends"])
    return [row[: next((i + 1 for i, token in enumerate(row) if token in ends), len(row))] for row in found]


def invented(
    model: Any, tokenizer: Any, more: dict[str, Any], count: int, index: BenchmarkIndex
) -> Iterator[list[int]]:
    """Prompts with users' turns that the target makes up; those that do not end, are no English or are kept out are dropped."""
    for ids in answers(model, [more["opening"]] * count, more, 1.0, 80):
        text = tokenizer.decode(ids, skip_special_tokens=True)
        fits = ids[-1] in more["ends"] and len(text) <= _MOST_CHARS and len(words(text)) >= _FEWEST_WORDS
        if fits and is_english(text) and not is_crude(text) and not index.contains(text):
            yield more["opening"] + ids[:-1] + more["rest"]


def generate(arguments: argparse.Namespace) -> None:
    """Smoke's rows, then answers to the catalogue's prompts, then to prompts of the target's own, until there are enough."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    began, device = time.monotonic(), training_device()

    def late() -> bool:
        return time.monotonic() - began > float(arguments.seconds)

    inputs, more = load_rows(arguments.inputs)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(arguments.target, dtype=dtype).to(device).eval()
    tokenizer, index = AutoTokenizer.from_pretrained(arguments.target), BenchmarkIndex(more["kept_out"])
    torch.manual_seed(arguments.seed)
    batch: int = arguments.batch
    rows = [row for row in inputs if row.mask]
    held = [row for row in inputs if row.group == EXTRA]
    repeated = [row for row in inputs if row.group == LONG] * arguments.samples
    repeated.sort(key=lambda row: len(row.ids))
    waiting = [repeated[i : i + batch] for i in range(0, len(repeated), batch)]
    random.Random(arguments.seed).shuffle(waiting)
    waiting.append(held)  # the first one: taken from the end
    own: list[Row] = []
    total = looped = 0
    invented_texts: set[tuple[int, ...]] = set()
    while total < arguments.tokens and not late():
        started, before = time.monotonic(), total
        if waiting:
            asked = waiting.pop()
        else:
            while len(own) < batch and not late():
                found = map(tuple, invented(model, tokenizer, more, 2 * batch, index))
                fresh = [ids for ids in dict.fromkeys(found) if ids not in invented_texts]
                number = len(inputs) + len(invented_texts)
                invented_texts.update(fresh)
                own += [Row(LONG, number + i, list(ids), []) for i, ids in enumerate(fresh)]
                note(f"{len(fresh)} of {2 * batch} turns that the target made up are kept")
            own.sort(key=lambda row: len(row.ids))
            asked, own = own[:batch], own[batch:]
        if not asked:
            break
        made = answers(model, [row.ids for row in asked], more, TEMPERATURE, arguments.max_tokens)
        for row, answer in zip(asked, made, strict=True):
            if is_looped(answer):
                looped += 1
                continue
            rows.append(
                Row(row.group, row.conversation, row.ids + answer, [False] * len(row.ids) + [True] * len(answer))
            )
            total += len(answer)
        taken = time.monotonic() - started
        note(
            f"{total:,} of {arguments.tokens:,} tokens generated, {looped} looped answers dropped, {(total - before) / taken:,.0f} tokens/s"
        )
    seconds = time.monotonic() - began
    figures = {"generated_tokens": total, "seconds": seconds, "looped": looped, "invented_prompts": len(invented_texts)}
    save_rows(arguments.rows, rows, figures)
    note(f"{len(rows)} rows, {sum(len(row.ids) for row in rows):,} tokens, {json.dumps(figures)}")


def extract(arguments: argparse.Namespace) -> None:
    """Float32 states of all rows, rounded to bfloat16, by the project's writer; two rows are compared with `reference_states`."""
    from transformers import AutoModelForCausalLM

    device, directory = training_device(), arguments.target
    torch.set_float32_matmul_precision("highest")
    sizes = text_config(directory)
    described = describe_target(TargetParams(source=str(directory), max_model_len=1024), directory)
    identity = {"engine": "transformers", "dtype": "float32", "weights_hash": described["weights_hash"]}
    spec = StoreSpec(tuple(arguments.layers), sizes.hidden_size, arguments.codec, identity, arguments.shard_mib)
    rows = load_rows(arguments.rows)[0]
    random.Random(0).shuffle(rows)
    by_key = {row_key(spec.fingerprint, row.ids): row.ids for row in rows}
    lengths = {key: len(ids) for key, ids in by_key.items()}
    decoder = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).get_decoder().to(device).eval()
    caught: dict[int, torch.Tensor] = {}

    def enter(layer: int) -> None:
        def hook(_module: Any, args: tuple[torch.Tensor, ...], kwargs: dict[str, torch.Tensor]) -> None:
            caught[layer] = (args[0] if args else kwargs["hidden_states"]).bfloat16()

        module = decoder.norm if layer == len(decoder.layers) else decoder.layers[layer]
        module.register_forward_pre_hook(hook, with_kwargs=True)

    for layer in spec.layers:
        enter(layer)
    spool, began, done = RowSpool(arguments.folder / "work" / "rows", spec), time.monotonic(), 0
    keys, tokens = list(by_key), sum(lengths.values())
    note(f"{len(keys)} rows, {tokens:,} tokens, {tokens * spec.row_bytes / 1e9:.1f} GB of states")
    with (
        Sealer(spool, spec, lengths, arguments.workers) as sealer,
        ThreadPoolExecutor(8) as pool,
        torch.inference_mode(),
    ):
        pending: list[Any] = []
        for first in range(0, len(keys), _CHUNK_ROWS):
            for batch in _batches(keys[first : first + _CHUNK_ROWS], lengths, arguments.batch_tokens):
                width = lengths[batch[-1]]
                # padded behind: no position sees what comes after it
                ids = [by_key[key] + [0] * (width - lengths[key]) for key in batch]
                decoder(torch.tensor(ids, device=device), use_cache=False)
                bits = torch.stack([caught[layer] for layer in spec.layers], 2).view(torch.int16).cpu().numpy()
                for future in pending:
                    future.result()
                pending = [
                    pool.submit(spool.write, np.array(by_key[key], np.int32), bits[i, : lengths[key]].view(np.uint16))
                    for i, key in enumerate(batch)
                ]
                sealer.wait_for_room()
            done += sum(map(lengths.__getitem__, keys[first : first + _CHUNK_ROWS]))
            note(f"{done:,} of {tokens:,} tokens, {done / (time.monotonic() - began):,.0f} tokens/s")
        for future in pending:
            future.result()
    publish(spool, arguments.folder / "store", spec, keys, arguments.workers)
    seconds = time.monotonic() - began
    with StoreReader(arguments.folder / "store") as reader:
        for key in keys[:2]:
            stored = torch.from_numpy(reader.read(key).hidden_TLH.view(np.int16)).view(torch.bfloat16).float()
            (wanted,) = reference_states(directory, [by_key[key]], spec.layers, trust_remote_code=False)
            off = float((stored - wanted).norm() / wanted.norm())
            note(f"row {key[:8]}: differs from the reference by {off:.1e} of the norm (rounding alone: 2e-3)")
            if off > 1e-2:
                raise EyasError("the stored states are not the target's")
    note(f"{tokens:,} tokens stored in {seconds:.0f} s, {tokens / seconds:,.0f} tokens/s")


def _batches(keys: Sequence[str], lengths: dict[str, int], most: int) -> Iterator[list[str]]:
    """Keys by length, so many that padded to the longest they have at most so many tokens."""
    batch: list[str] = []
    for key in sorted(keys, key=lengths.__getitem__):
        if batch and lengths[key] * (len(batch) + 1) > most:
            yield batch
            batch = []
        batch.append(key)
    yield batch


def train(arguments: argparse.Namespace) -> None:
    """Settings one after another, or several at a time in processes of their own."""
    text = arguments.settings
    settings = json.loads(text if text.lstrip().startswith("[") else Path(text).read_text())
    arguments.results.mkdir(parents=True, exist_ok=True)
    first, step = map(int, arguments.part.split(":"))
    console.quiet = step > 1  # others talk at the same time
    if arguments.jobs > 1:
        # short trainings: compiling would take longer than they do
        environment = os.environ | {"TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "benchmarks.drafting.long_run", *sys.argv[1:], "--jobs", "1", "--part"]
        children = [
            subprocess.Popen([*command, f"{i}:{arguments.jobs}"], env=environment) for i in range(arguments.jobs)
        ]
        if sum(child.wait() != 0 for child in children):
            note("a process has failed")
        return
    stop = threading.Timer(arguments.seconds, os.kill, (os.getpid(), signal.SIGTERM))
    stop.daemon = True
    stop.start()
    results, began = arguments.results / f"results-{first}.jsonl", time.monotonic()
    done = {json.loads(line)["name"] for file in arguments.results.glob("*.jsonl") for line in file.open()}
    bench = Bench(arguments)
    for setting in settings[first::step]:
        if setting["name"] in done:
            continue
        if time.monotonic() - began > arguments.seconds - 5:
            break
        try:
            record = bench.run(setting)
        except EyasError as error:  # a stop, or a setting that cannot be
            note(f"{setting['name']}: {error}")
            continue
        except Exception:
            note(f"{setting['name']}: {traceback.format_exc()}")
            continue
        with results.open("a") as file:
            file.write(json.dumps(record) + "\n")
    stop.cancel()


class Bench:
    """Rows and store, opened once, and a training for each setting."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._folder, self._results, self._directory = arguments.folder, arguments.results, arguments.target
        self._workers, self._special = arguments.workers, load_rows(arguments.inputs)[1]["special"]
        self._reader = StoreReader(arguments.folder / "store")
        fingerprint = self._reader.spec.fingerprint
        self._groups: dict[int, list[TokenRow]] = {group: [] for group in (SMOKE, VALIDATION, LONG, EXTRA)}
        for row in load_rows(arguments.rows)[0]:
            ids, mask = np.array(row.ids, np.int32), np.array(row.mask, bool)
            if mask[1:].any():
                key = row_key(fingerprint, ids)
                self._groups[row.group].append(TokenRow(f"{row.conversation}", key, ids, mask))
        self._target, self._vocab_size = load_head(self._directory), text_config(self._directory).vocab_size

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
        training = fit(model, data, params, self._target, TEMPERATURE, work, Machine(checkpoints_kept=1))
        extra = TrainingData(self._reader, rows, self._groups[EXTRA], self._workers)
        judge = Heldout(extra, params, self._target, TEMPERATURE, Ranks())
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
    """The trained tensors and the draft vocabulary, in files of a limited size."""
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


def assemble(arguments: argparse.Namespace) -> None:
    """The head out of its parts and the target: ``config.json`` and ``model.safetensors``, as vLLM serves it."""
    tensors: dict[str, torch.Tensor] = {}
    metadata: dict[str, str] = {}
    paths = sorted(arguments.results.glob(f"head-{arguments.name}-[0-9].safetensors"))
    if not paths:
        raise EyasError(f"{arguments.results}: no head-{arguments.name}-0.safetensors")
    for path in paths:
        with safe_open(path, "pt") as part:
            metadata = part.metadata()
            tensors |= {name: part.get_tensor(name) for name in part.keys()}  # noqa: SIM118
    directory = arguments.target or resolve_target(TargetParams(source=SOURCE, max_model_len=1024))
    setting = json.loads(metadata["setting"])
    ids = tensors.pop("target_ids").numpy().astype(np.int64)
    t2d_V = np.zeros(text_config(directory).vocab_size, dtype=bool)
    t2d_V[ids] = True
    vocabulary = DraftVocabulary(ids - np.arange(len(ids)), t2d_V, np.zeros(len(t2d_V), dtype=np.int64))
    params = TrainParams(**(_TRAIN | setting.get("train", {})))
    draft, layers = DraftParams(**setting.get("draft", {})), json.loads(metadata["layers"])
    model = make_head(draft, directory, SOURCE, vocabulary, layers, ttt_steps=params.ttt_steps, seed=params.seed)
    if set(tensors) != {name for name, weight in model.named_parameters() if weight.requires_grad}:
        raise EyasError(f"{arguments.results}: {len(paths)} parts are not one whole head; are all of them there?")
    model.load_state_dict(tensors, strict=False)
    arguments.head.mkdir(parents=True)
    export(model, arguments.head)
    note(f"{arguments.head}: {len(paths)} parts made the head {arguments.name}")


def plot(arguments: argparse.Namespace) -> None:
    """Held-out acceptance length over tokens trained on, from the trainings whose names begin with `share-`."""
    from matplotlib.figure import Figure

    records = [r for r in json.loads(arguments.report.read_text())["trainings"] if r["name"].startswith("share-")]
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
    figure.savefig(arguments.picture, dpi=130)


def main(words: Iterable[str] | None = None) -> None:
    """Do one of the steps."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    steps = parser.add_subparsers(required=True)

    def step(function: Any, *paths: str) -> argparse.ArgumentParser:
        added = steps.add_parser(function.__name__, help=(function.__doc__ or "").splitlines()[0])
        added.set_defaults(function=function)
        for path in paths:
            added.add_argument(path, type=Path)
        return added

    step(prompts, "data", "inputs")
    step(target, "gguf", "inputs", "target")
    generating = step(generate, "target", "inputs", "rows")
    generating.add_argument("--tokens", type=int, default=5_500_000, help="to generate")
    generating.add_argument("--seconds", type=float, default=300, help="no batch begins later")
    generating.add_argument("--batch", type=int, default=2048, help="rows at a time")
    generating.add_argument("--samples", type=int, default=3, help="answers to each prompt of the catalogue")
    generating.add_argument("--max-tokens", type=int, default=160, help="longest answer")
    generating.add_argument("--seed", type=int, default=0)
    extracting = step(extract, "target", "rows", "folder")
    extracting.add_argument("--layers", type=int, nargs="+", default=[2, 15, 27, 30])
    extracting.add_argument("--codec", choices=("none", "lossless"), default="none")
    extracting.add_argument("--shard-mib", type=int, default=256)
    extracting.add_argument("--batch-tokens", type=int, default=32768)
    training = step(train, "target", "inputs", "rows", "folder", "results")
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
    assembling = step(assemble, "results")
    assembling.add_argument("name")
    assembling.add_argument("head", type=Path)
    assembling.add_argument("--target", type=Path, help="the target's folder; default: the bundled one")
    step(plot, "report", "picture")
    arguments = parser.parse_args(None if words is None else list(words))
    arguments.function(arguments)


if __name__ == "__main__":
    main()
