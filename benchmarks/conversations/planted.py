"""Plants faults into 100,000 generated conversations: each must be found under its own name, and no good row may be lost or changed.

    python benchmarks/conversations/planted.py --rows 100000 --share 0.01 --seed 0

Writes JSON lines, lists, CSV and Parquet, in every shape that Eyas reads, with a share of faulty rows of every kind and as many
that can be mended; reads them back, and compares each row with what was planted: the messages of the good ones, the rules of the
mended ones, the reasons of the others. Exit status 1 if one is wrong. The result is a JSON file in benchmarks/conversations/results/.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import random
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from eyas.console import Progress, console
from eyas.conversations.faults import REJECTED, REPAIRED, BadRow
from eyas.conversations.reading import read_rows
from eyas.conversations.rules import validate
from eyas.errors import EyasError
from eyas.files import write_json_atomic
from eyas.stage import machine_description

WORDS = [
    "harbour",
    "pilot",
    "café",
    "tide",
    "港",
    "lantern",
    "🌊",
    "mole",
    "rope",
    "chart",
    "bell",
    "17",
    "fog",
    "<|im_start|>",
    "[INST]",
    "<think>",
    "gull",
]
TOOL = {"type": "function", "function": {"name": "tide", "parameters": {"type": "object"}}}
Row = dict[str, Any]
Chat = list[Row]


def text(dice: random.Random) -> str:
    return "Say " + " ".join(dice.choices(WORDS, k=dice.randint(3, 40)))


def chat(dice: random.Random) -> Chat:
    return [{"role": ("user", "assistant")[i % 2], "content": text(dice)} for i in range(2 * dice.randint(1, 4))]


def call(dice: random.Random, **more: Any) -> Row:
    return {
        "id": f"call_{dice.random()}",
        "type": "function",
        "function": {"name": "tide", "arguments": {"day": dice.randint(1, 9)}},
        **more,
    }


# --- good rows: the row as people keep it, and the messages that it means ------------------------------------------


def sharegpt(turns: Chat, dice: random.Random) -> Row:
    names = {"user": "human", "assistant": "gpt"}
    return {"id": dice.random(), "conversations": [{"from": names[t["role"]], "value": t["content"]} for t in turns]}


def in_parts(turns: Chat, dice: random.Random) -> Row:
    return {"messages": [{**t, "content": [{"type": "text", "text": t["content"]}]} for t in turns]}


def with_tools(turns: Chat, dice: random.Random) -> Row:
    one = call(dice)
    turns[1:1] = [
        {"role": "assistant", "content": "", "tool_calls": [one]},
        {"role": "tool", "content": "3 m", "tool_call_id": one["id"]},
    ]
    as_text = json.loads(json.dumps(turns))
    as_text[1]["tool_calls"][0]["function"]["arguments"] = json.dumps(one["function"]["arguments"])
    as_text[1]["content"] = None
    return {"messages": as_text, "tools": [TOOL]}


def with_reasoning(turns: Chat, dice: random.Random) -> Row:
    turns[1]["reasoning_content"] = "Hm, a harbour."
    return {"messages": [{k.replace("reasoning_content", "thinking"): v for k, v in t.items()} for t in turns]}


def single(question: str, answer: str) -> Callable[[Chat, random.Random], Row]:
    def shape(turns: Chat, dice: random.Random) -> Row:
        del turns[2:]
        return {question: turns[0]["content"], answer: turns[1]["content"], "score": float("nan")}

    return shape


def mt_bench(turns: Chat, dice: random.Random) -> Row:
    turns[:] = [t for t in turns if t["role"] == "user"]
    return {"category": "writing", "turns": [t["content"] for t in turns]}


WITH_MESSAGES = (lambda turns, dice: {"messages": turns}, in_parts, with_tools, with_reasoning)
SHAPES: list[Callable[[Chat, random.Random], Row]] = [
    *WITH_MESSAGES,
    lambda turns, dice: {"messages": json.dumps(turns)},
    lambda turns, dice: {"conversation": turns, "model": "kimi-k2"},
    *(sharegpt, mt_bench),
    *(single("prompt", "response"), single("instruction", "output"), single("question", "answer")),
]

# --- faults: a good conversation, damaged --------------------------------------------------------------------------


def changed(position: int, **keys: Any) -> Callable[[Chat, random.Random], Row]:
    """One turn of a conversation with other values, or without a key where the value is ``...``."""

    def fault(turns: Chat, dice: random.Random) -> Row:
        merged = {**turns[position], **keys}
        turns[position] = {key: value for key, value in merged.items() if value is not ...}
        return {"messages": turns}

    return fault


def inserted(position: int, *extra: Row) -> Callable[[Chat, random.Random], Row]:
    def fault(turns: Chat, dice: random.Random) -> Row:
        turns[position:position] = [dict(turn) for turn in extra]
        return {"messages": turns}

    return fault


def calling(calls: list[Any], *results: Row) -> Callable[[Chat, random.Random], Row]:
    return inserted(
        1,
        {"role": "assistant", "content": None, "tool_calls": calls},
        *({"role": "tool", "content": "3 m", **r} for r in results),
    )


CALL = {"id": "1", "type": "function", "function": {"name": "tide", "arguments": "{}"}}
ROW_FAULTS: dict[str, list[Callable[[Chat, random.Random], Row]]] = {
    "unknown_shape": [lambda turns, dice: {"text": turns[0]["content"]}, lambda turns, dice: {}],
    "empty_conversation": [lambda turns, dice: {"messages": []}, lambda turns, dice: {"turns": []}],
    "bad_turn": [
        changed(0, role=...),
        lambda turns, dice: {"messages": [t["content"] for t in turns]},
        changed(1, value="else"),
    ],
    "unknown_role": [changed(1, role="kimi-k2"), changed(0, role="critic"), changed(1, role=None)],
    "null_content": [changed(1, content=None), changed(0, content=...)],
    "not_text": [
        changed(0, content=7),
        changed(0, content=[{"type": "image_url", "image_url": "x"}]),
        changed(1, content={"text": "x"}),
    ],
    "empty_turn": [changed(0, content=" \n"), changed(0, content="")],
    "turn_too_long": [changed(0, content="x" * (5 << 20))],
    "invalid_text": [changed(0, content="broken \ud83d pair"), changed(-1, content="\udc00")],
    "misplaced_system": [
        inserted(1, {"role": "system", "content": "Be brief."}),
        inserted(1, {"role": "developer", "content": "Be brief."}),
    ],
    "two_user_turns": [inserted(1, {"role": "user", "content": "Anybody?"})],
    "two_assistant_turns": [inserted(2, {"role": "assistant", "content": "And so on."})],
    "missing_answer": [calling([CALL], {}, {"role": "user", "content": "Well?"})],
    "no_user_turn": [
        lambda turns, dice: {"messages": turns[1:2]},
        lambda turns, dice: {"messages": [{"role": "system", "content": "x"}]},
    ],
    "unclosed_think": [changed(1, content="<think>\nThe tide"), changed(-1, content="\n<think>It is")],
    "unopened_think": [changed(1, content="The tide is low.\n</think>\n\nLow.")],
    "two_reasonings": [
        changed(1, content="<think>High.</think>Low.", reasoning_content="Low."),
        changed(1, thinking="a", reasoning="b"),
    ],
    "misplaced_reasoning": [changed(0, reasoning_content="I ask myself")],
    "bad_tools": [
        lambda turns, dice: {
            "messages": turns,
            "tools": dice.choice(["tide", [{"type": "function"}], [{"type": "web_search"}]]),
        }
    ],
    "bad_tool_call": [calling([{"id": "1"}], {}), calling([CALL, CALL], {}, {}), changed(0, tool_calls=[CALL])],
    "bad_tool_arguments": [
        calling([{"function": {"name": "tide", "arguments": bad}}], {})
        for bad in ("day=1", "[1]", '{"a": 1, "a": 2}', "{")
    ],
    "orphan_tool_result": [
        inserted(1, {"role": "tool", "content": "3 m"}),
        calling([CALL], {}, {}),
        changed(1, role="observation"),
    ],
    "mismatched_tool_result": [calling([CALL], {"tool_call_id": "2"}), calling([CALL], {"name": "moon"})],
    "unanswered_tool_call": [calling([CALL]), calling([CALL, {**CALL, "id": "2"}], {"tool_call_id": "2"})],
}
LINE_FAULTS: dict[str, list[Callable[[bytes], bytes]]] = {
    "malformed_json": [
        lambda line: line[:-3],
        lambda line: line.replace(b":", b"", 1),
        lambda line: line[:9] + b"\0" + line[9:],
    ],
    "not_utf8": [lambda line: line[:-4] + b"\xe9" + line[-4:], lambda line: b"\xff\xfe" + line],
    "line_too_long": [lambda line: b'{"pad": "' + b"x" * (17 << 20) + b'", ' + line[1:]],
    "duplicate_key": [lambda line: b'{"id": 1, "id": 2, ' + line[1:]],
    "not_an_object": [
        lambda line: b"[" + line + b"]",
        lambda line: b"null",
        lambda line: json.dumps(line.decode()).encode(),
    ],
}
HUGE = ("turn_too_long", "line_too_long")
MENDED: dict[str, Callable[[Chat, random.Random], Row]] = {
    "leading_assistant_dropped": inserted(0, {"role": "assistant", "content": "How can I help?"}),
    "nul_removed": lambda turns, dice: {"messages": [{**turns[0], "content": turns[0]["content"] + "\0"}, *turns[1:]]},
    "nan_as_missing": lambda turns, dice: {"instruction": float("nan"), "messages": float("nan"), "prompt": turns},
    "developer_as_system": inserted(0, {"role": "developer", "content": "Be brief."}),
    "empty_system_dropped": inserted(0, {"role": "system", "content": " "}),
    "empty_last_answer_dropped": lambda turns, dice: {
        "messages": [*turns, {"role": "user", "content": "?"}, {"role": "assistant", "content": ""}]
    },
    "inline_think_split": changed(1, content="<think>\nHm.\n</think>\n\nLow."),
    "function_call_as_tool_call": changed(-1, content=None, function_call={"name": "tide", "arguments": "{}"}),
    "bare_tools_wrapped": lambda turns, dice: {"messages": turns, "tools": [TOOL["function"]]},
}
Expected = tuple[str, Any]


class Planter:
    """Rows, each with what must become of it; every ``1 / share``-th is faulty, and as many can be mended."""

    def __init__(self, share: float, seed: int) -> None:
        self.dice, self.share = random.Random(seed), share
        self.turn: Counter[str] = Counter()

    def _next(self, counter: str, kinds: dict[str, Any]) -> str:
        self.turn[counter] += 1
        name = list(kinds)[self.turn[counter] % len(kinds)]
        # of the huge ones a few are enough
        if name in HUGE and self.turn[name] >= 5:
            return self._next(counter, kinds)
        self.turn[name] += 1
        return name

    def good(self, shapes: Sequence[Callable[[Chat, random.Random], Row]] = SHAPES) -> tuple[Row, Expected]:
        turns = chat(self.dice)
        row = self.dice.choice(shapes)(turns, self.dice)
        return row, ("kept", json.loads(json.dumps(turns)))

    def row(self) -> tuple[Row, Expected]:
        chance = self.dice.random()
        if chance < self.share:
            name = self._next("fault", ROW_FAULTS)
            return self.dice.choice(ROW_FAULTS[name])(chat(self.dice), self.dice), ("rejected", name)
        if chance < 2 * self.share:
            rule = self._next("mended", MENDED)
            return MENDED[rule](chat(self.dice), self.dice), ("mended", rule)
        return self.good()

    def with_messages(self) -> tuple[Row, Expected]:
        """A row with a list of messages, which a table can hold as text."""
        row, expected = self.row()
        while not row.get("messages") or not isinstance(row["messages"], list):
            row, expected = self.good(WITH_MESSAGES) if expected[0] == "kept" else self.row()
        return row, expected

    def line(self) -> tuple[bytes, Expected]:
        """A line; of the faults of JSON lines a share of their own."""
        everything = {**ROW_FAULTS, **LINE_FAULTS}
        if self.dice.random() < self.share * len(LINE_FAULTS) / len(everything):
            name = self._next("line", LINE_FAULTS)
            return self.dice.choice(LINE_FAULTS[name])(json.dumps(self.good()[0]).encode()), ("rejected", name)
        row, expected = self.row()
        return json.dumps(
            row, ensure_ascii=self.dice.random() < 0.5 or expected == ("rejected", "invalid_text")
        ).encode(), expected


def write_lines(path: Path, planter: Planter, rows: int) -> list[Expected]:
    found = []
    with path.open("wb") as stream:
        for _ in range(rows):
            line, expected = planter.line()
            stream.write(line + b"\n")
            found.append(expected)
    return found


def write_list(path: Path, planter: Planter, rows: int) -> list[Expected]:
    """A list that is cut off in its last row, and before it an object with two lists, of which the second is doubtful."""
    entries = [planter.row() for _ in range(rows)]
    second = [planter.good() for _ in range(rows // 500)]
    two = {"data": [row for row, _ in entries], "test": [row for row, _ in second]}
    path.write_text(json.dumps(two, indent=1)[:-1] + "}\n[" + json.dumps(planter.good()[0])[:-2], encoding="utf-8")
    return (
        [expected for _, expected in entries]
        + [("rejected", "second_list")] * len(second)
        + [("rejected", "unreadable_rest")]
    )


def write_csv(path: Path, planter: Planter, rows: int) -> list[Expected]:
    buffer = io.StringIO(newline="")
    writer = csv.writer(buffer)
    writer.writerow(["id", "messages", "tools"])
    found: list[Expected] = []
    for _ in range(rows):
        row, expected = planter.with_messages()
        cells = [str(len(found)), json.dumps(row["messages"]), json.dumps(row["tools"]) if "tools" in row else ""]
        if planter.dice.random() < planter.share / 10:
            cells, expected = [*cells, "more"], ("rejected", "bad_csv_row")
        writer.writerow(cells)
        found.append(expected)
    path.write_text(buffer.getvalue(), encoding="utf-8", newline="")
    return found


def write_parquet(path: Path, planter: Planter, rows: int) -> list[Expected]:
    entries = [planter.with_messages() for _ in range(rows)]
    texts = {key: [json.dumps(row[key]) if key in row else None for row, _ in entries] for key in ("messages", "tools")}
    pq.write_table(pa.table({**texts, "embedding": [[0.5] * 8] * rows}), path, row_group_size=1000)
    return [expected for _, expected in entries]


def outcomes(path: Path) -> Iterator[Expected]:
    with Progress(f"reading {path.name}", path.stat().st_size, "bytes") as progress:
        for _, row in read_rows(path, progress.advance):
            try:
                if isinstance(row, BadRow):
                    raise row
                conversation, repairs = validate(row)
            except BadRow as fault:
                yield "rejected", fault.reason
                continue
            if repairs:
                yield "mended", "+".join(repairs)
            else:
                yield "kept", [message.as_dict() for message in conversation.messages]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--share", type=float, default=0.01)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--result", type=Path, default=Path("benchmarks/conversations/results/planted.json"))
    options = parser.parse_args()
    planter = Planter(options.share, options.seed)
    writers = {
        "chats.jsonl": write_lines,
        "chats.json": write_list,
        "chats.csv": write_csv,
        "chats.parquet": write_parquet,
    }
    shares = {"chats.jsonl": 0.7, "chats.json": 0.1, "chats.csv": 0.1, "chats.parquet": 0.1}
    planted, found, wrong = Counter[str](), Counter[str](), Counter[str]()
    total, good = 0, 0
    with tempfile.TemporaryDirectory() as folder:
        for name, write in writers.items():
            path = Path(folder, name)
            expected = write(path, planter, round(options.rows * shares[name]))
            got = list(outcomes(path))
            total += len(expected)
            if len(got) != len(expected):
                wrong[f"{name}: {len(got)} rows for {len(expected)}"] += 1
            for number, (a, b) in enumerate(zip(expected, got, strict=False), 1):
                good += a[0] == "kept"
                if a[0] != "kept":
                    planted[a[1]] += 1
                    found[a[1]] += a == b
                if a != b:
                    shown = [value if value[0] != "kept" else ("kept",) for value in (a, b)]
                    wrong[f"{name}: {shown[0]} became {shown[1]}"] += 1
                    console.print(f"{name}, row {number}: {ascii(a)[:300]} became {ascii(b)[:300]}", markup=False)
    faults = {name: count for name, count in sorted(planted.items()) if name in REJECTED}
    result = {
        "command": f"python benchmarks/conversations/planted.py --rows {options.rows} --share {options.share} --seed {options.seed}",
        "rows": total,
        "good_rows": good,
        "planted_faults": sum(faults.values()),
        "kinds_of_faults": len(faults),
        "kinds_of_repairs": len(planted) - len(faults),
        "planted": dict(sorted(planted.items())),
        "found_under_its_name": dict(sorted(found.items())),
        "wrong": dict(wrong),
        "machine": machine_description(),
    }
    write_json_atomic(options.result, result)
    console.print_json(
        json.dumps({key: value for key, value in result.items() if key not in ("planted", "found_under_its_name")})
    )
    missing = (REJECTED.keys() | REPAIRED.keys()) - planted.keys()
    if wrong or missing:
        raise EyasError(f"{sum(wrong.values())} rows came out wrong; never planted: {sorted(missing)}")


if __name__ == "__main__":
    main()
