"""`eyas serve` and `eyas demo` for real: vLLM with the tiny target and a head, and what the demo counts against the server's counters.

The head is not trained, and guesses a token now and then. One server start, which takes a minute.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from eyas.benchmark.prometheus import PageCounters, read_counters
from eyas.drafting.heads import export, make_head
from eyas.files import write_json_atomic
from eyas.params import DraftParams, Profile
from eyas.targets.resolve import describe_target
from eyas.vocabulary import choose
from tests.real_server import free_port, running
from tests.tiny import VOCAB, tiny_profile

K, MAX_TOKENS = 2, 48
LONG = "What is the sea, and why does it sing? " * 30  # several blocks of the cache
ASKED = ["Why do eagles fly?", "What is a hood?", "How many days has a week?", "日本語 and 👩‍🚒?", LONG]
COUNTS = re.compile(r"^(\d+) tokens, (\d+) steps, .* tokens a step, (\d+)% were accepted drafts$", re.MULTILINE)


@pytest.fixture(scope="module")
def checkout(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the profile `tiny` and what serving needs of its outputs."""
    content = tiny_profile(str(tiny_target))
    content["target"]["max_model_len"] = 1024
    content["responses"]["max_tokens"] = MAX_TOKENS
    content["vocab"]["draft_vocab_size"] = VOCAB
    content["benchmark"]["num_speculative_tokens"] = [K]
    folder = tmp_path_factory.mktemp("checkout")
    (folder / "params.yaml").write_text(json.dumps({"active": ["tiny"], "profiles": {"tiny": content}}))
    (folder / "machine.yaml").write_text("cpu_kv_cache_gib: 1\nmax_num_seqs: 4\n")
    data = folder / "data" / "tiny"
    write_json_atomic(data / "target.json", describe_target(Profile.model_validate(content).target, tiny_target))
    vocabulary = choose(np.zeros(VOCAB, dtype=np.int64), None, [0])
    (data / "draft_head").mkdir()
    head = make_head(DraftParams(), tiny_target, "tiny", vocabulary, [1, 2, 3, 4], ttt_steps=K, seed=0)
    export(head, data / "draft_head")
    return folder


@pytest.fixture(scope="module")
def url(checkout: Path) -> Iterator[str]:
    port = free_port()
    command = [sys.executable, "-m", "eyas.cli", "serve", "--profile", "tiny", "--port", str(port)]
    with running(command, port, checkout) as root:
        yield root


def page(url: str) -> str:
    time.sleep(1)  # the counters follow the stream by moments
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
        text: str = answer.read().decode()
    return text


def counters(url: str) -> PageCounters:
    return read_counters(page(url), url)


def demo(checkout: Path, url: str, **environment: str) -> str:
    command = [sys.executable, "-m", "eyas.cli", "demo", "--profile", "tiny", "--endpoint", url]
    result = subprocess.run(
        command,
        cwd=checkout,
        env=os.environ | environment,
        input="\n".join(ASKED),
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def words(shown: str) -> str:
    """What a demo showed without its marks and counts."""
    return COUNTS.sub("", re.sub(r"\x1b\[[0-9;]*m|[\[\]]", "", shown))


def test_the_demo_shows_what_the_server_counts(checkout: Path, url: str) -> None:
    before = counters(url)
    shown = demo(checkout, url)
    counted = counters(url) - before
    answers = [tuple(map(int, numbers)) for numbers in COUNTS.findall(shown)]
    assert len(answers) == len(ASKED) == counted.answers
    assert sum(tokens for tokens, _, _ in answers) == counted.tokens
    # a step that is cut at the end may have accepted more, a stream that fell behind shows two steps as one
    steps = sum(steps for _, steps, _ in answers)
    assert counted.speculation.drafted_steps * 0.9 <= steps <= counted.speculation.drafted_steps + len(ASKED)
    assert counted.speculation.accepted_tokens > 0
    assert re.search(r"\[[^\]]+\]", shown.split("\n\n", 1)[1])
    # from the cache of prefixes the same answers come, in colour too
    coloured = demo(checkout, url, FORCE_COLOR="1", TERM="xterm")
    assert "\x1b[30;42m" in coloured
    assert words(coloured) == words(shown)
    assert re.search(r"^vllm:prefix_cache_hits_total\S* [1-9]", page(url), re.MULTILINE)


def test_a_second_server_is_refused(checkout: Path, url: str) -> None:
    command = [sys.executable, "-m", "eyas.cli", "serve", "--profile", "tiny", "--port", url.rsplit(":", 1)[1]]
    result = subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=False, timeout=120)
    assert result.returncode == 1 and "is in use" in result.stderr
