"""From conversations to token rows with masks: `prepare` and `encode` against speculators and against a plain `datasets.map`.

    python benchmarks/conversations/prepare_encode.py                   100,000 conversations, two processes
    python benchmarks/conversations/prepare_encode.py --quick           2,000, to see that it works

Conversations of two to eight turns are put together from the utterances of the bundled chitchat package; answers are kept.
The target's tokenizer and chat template are SmolLM2's. The contenders, with the same number of processes:

    eyas             JSON lines to conversations.parquet (parsed, checked, near duplicates and splits found) to tokens.parquet
    speculators      `speculators prepare-data` with vLLM's rendering server on the same machine, on the first --render-rows; a run
                     of one conversation is taken off as its start
    map, ids alone   `apply_chat_template` in batches, then saved: nothing checked, and no mask
    map, with masks  the same a conversation at a time, with the mask from the lengths of what comes before and with each answer

The contenders take turns; best of the repeats.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from eyas.conversations.dataset import prepare_dataset
from eyas.errors import EyasError
from eyas.files import write_json_atomic
from eyas.packages import package_wheel
from eyas.params import DatasetParams, TargetParams
from eyas.stage import installed_versions, machine_description
from eyas.tables import CONVERSATIONS, KEPT, RESPONSES, TOKENS, read_batches, table_writer
from eyas.targets.resolve import resolve_target
from eyas.templates.rows import Encoding, encode_batches

_MAX_TOKENS = 4096
_BATCH_ROWS = 256
_WHO = {"parent": resource.RUSAGE_SELF, "largest worker": resource.RUSAGE_CHILDREN}


def write_conversations(path: Path, count: int) -> None:
    """Conversations of different lengths, none twice."""
    with zipfile.ZipFile(package_wheel("chitchat-dataset")) as wheel:
        chats = json.loads(wheel.read("chitchat_dataset/dataset.json")).values()
    texts = [u["text"].strip() for chat in chats for group in chat["messages"] for u in group if len(u["text"]) > 20]
    source = random.Random(0)
    with path.open("w", encoding="utf-8") as stream:
        for _ in range(count):
            turns = [" ".join(source.sample(texts, 2)) for _ in range(2 * source.randint(1, 4))]
            messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(turns)]
            stream.write(json.dumps({"messages": messages}) + "\n")


def eyas(source: Path, folder: Path, directory: Path, workers: int) -> dict[str, Any]:
    """Seconds of `prepare` and of `encode`, and what came out."""
    started = time.perf_counter()
    params = DatasetParams.model_validate(
        {"sources": [{"source": str(source)}], "max_turns": 8, "max_prompt_chars": 10_000}
    )
    (folder / "conversations").mkdir(parents=True)
    prepared = prepare_dataset(params, folder / "conversations", folder / "scratch", workers)
    between = time.perf_counter()
    with table_writer(folder / "responses.parquet", RESPONSES) as write:
        for batch in read_batches(folder / "conversations" / "conversations.parquet", CONVERSATIONS, _BATCH_ROWS):
            write([row | {"kind": KEPT, "turns": []} for row in batch])
    passed_on = time.perf_counter()
    tokens = rows = 0
    with table_writer(folder / "tokens.parquet", TOKENS) as write:
        batches = read_batches(folder / "responses.parquet", RESPONSES, _BATCH_ROWS)
        for encoded in encode_batches(batches, Encoding(_MAX_TOKENS, directory), workers, lambda _: None):
            write(encoded.table)
            tokens += encoded.counts["tokens"]
            rows += encoded.counts["rows"]
    ended = time.perf_counter()
    return {
        "prepare_s": between - started,
        "encode_s": ended - passed_on,
        "seconds": between - started + ended - passed_on,
        "kept": prepared["kept"],
        "rows": rows,
        "tokens": tokens,
        "peak_mib": {who: resource.getrusage(what).ru_maxrss >> 10 for who, what in _WHO.items()},
    }


def plain_map(source: Path, folder: Path, directory: Path, workers: int, masks: bool) -> dict[str, Any]:
    """Seconds of the usual way, nothing checked."""
    from datasets import load_dataset
    from transformers import AutoTokenizer

    started = time.perf_counter()
    tokenizer = AutoTokenizer.from_pretrained(directory)

    def encode(messages: Any, **more: Any) -> Any:
        return tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False, **more)

    def ids_alone(rows: dict[str, Any]) -> dict[str, Any]:
        return {"input_ids": encode(rows["messages"])}

    def with_mask(row: dict[str, Any]) -> dict[str, Any]:
        messages, ids = row["messages"], encode(row["messages"])
        mask = [0] * len(ids)
        for number, message in enumerate(messages):
            if message["role"] == "assistant":
                start = len(encode(messages[:number], add_generation_prompt=True))
                end = len(encode(messages[: number + 1])) - 1  # without the line break behind the turn
                mask[start:end] = [1] * (end - start)
        return {"input_ids": ids, "loss_mask": mask}

    data = load_dataset("json", data_files=str(source), split="train", cache_dir=str(folder / "cache"))
    work = with_mask if masks else ids_alone
    data = data.map(work, batched=not masks, num_proc=workers, remove_columns=["messages"])
    data.save_to_disk(str(folder / "out"))
    return {"seconds": time.perf_counter() - started, "rows": len(data)}


@contextmanager
def render_server(directory: Path, log: Path) -> Iterator[str]:
    """vLLM's server that renders and tokenises without an engine; gives its URL."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    command = [sys.executable, "-m", "vllm.entrypoints.launchers.render.entry", "--model", str(directory)]
    with log.open("w") as stream:
        server = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", port],
            stdout=stream,
            stderr=stream,
            env=os.environ | {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"},
        )
    try:
        for _ in range(300):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
                break
            except OSError:
                if server.poll() is not None:
                    raise EyasError(f"the rendering server ended: {log.read_text()[-2000:]}") from None
                time.sleep(1)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait()


def speculators(source: Path, folder: Path, directory: Path, workers: int, count: int) -> dict[str, Any]:
    """Seconds of `speculators prepare-data` for so many rows, its start taken off."""

    def seconds(rows: int, url: str) -> float:
        part = folder / f"{rows}.jsonl"
        with source.open() as lines:
            part.write_text(
                "".join(json.dumps({"conversations": json.loads(next(lines))["messages"]}) + "\n" for _ in range(rows))
            )
        command = ["speculators", "prepare-data", "--model", str(directory), "--data", str(part)]
        command += ["--output", str(folder / f"out{rows}"), "--seq-length", str(_MAX_TOKENS), "--render-endpoint", url]
        command += ["--num-preprocessing-workers", str(workers), "--minimum-valid-tokens", "1"]
        started = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=(folder / "log").open("w"))
        return time.perf_counter() - started

    with render_server(directory, folder / "server.log") as url:
        start = seconds(1, url)
        return {"seconds": seconds(count, url) - start, "start_s": start, "rows": count}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--render-rows", type=int, default=1_000, help="rows that speculators prepares")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="2,000 rows, once")
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rows, arguments.render_rows, arguments.repeats = 2_000, 100, 1
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    directory = resolve_target(TargetParams(source="bundled:smollm2-135m", max_model_len=_MAX_TOKENS))
    found: dict[str, list[dict[str, Any]]] = {
        "eyas": [],
        "speculators": [],
        "map, ids alone": [],
        "map, with masks": [],
    }
    here = Path.cwd()
    with tempfile.TemporaryDirectory() as temporary:
        name = Path(temporary)
        source = Path("data/input/conversations.jsonl")
        (name / source).parent.mkdir(parents=True)
        write_conversations(name / source, arguments.rows)
        os.chdir(name)
        for _ in range(arguments.repeats):
            for contender, results in found.items():
                folder = name / "work"
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
                if contender == "eyas":
                    results.append(eyas(source, folder, directory, arguments.workers))
                elif contender == "speculators":
                    results.append(speculators(source, folder, directory, arguments.workers, arguments.render_rows))
                else:
                    results.append(
                        plain_map(source, folder, directory, arguments.workers, contender == "map, with masks")
                    )
                print(f"{contender}: {results[-1]}", file=sys.stderr, flush=True)
        os.chdir(here)
    rates = {contender: max(each["rows"] / each["seconds"] for each in results) for contender, results in found.items()}
    for contender, rate in rates.items():
        print(f"{contender:<15} {rate:>8,.0f} rows/s   Eyas has {rates['eyas'] / rate:.2f} times the rate")
    if arguments.out:
        report = {"command": f"python benchmarks/conversations/prepare_encode.py --rows {arguments.rows}"}
        write_json_atomic(
            arguments.out,
            report
            | {
                "machine": machine_description(),
                "versions": installed_versions(),
                "rows_per_s": rates,
                "results": found,
            },
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
