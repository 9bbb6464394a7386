"""What is written through gathered writes is what a plain file would hold, and a write that fails is told once HDF5 is done."""

from __future__ import annotations

import os
import resource
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.store import newfile
from eyas.store.newfile import NewFile

_STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("follow"), st.integers(0, 700)),  # more bytes where the file stands
        st.tuples(st.just("jump"), st.integers(0, 2000), st.integers(1, 300)),
        st.tuples(st.just("read"), st.integers(0, 2000), st.integers(1, 300)),
        st.tuples(st.just("truncate"), st.integers(0, 2000)),
        st.tuples(st.just("end")),
        st.tuples(st.just("writeback")),
    ),
    max_size=25,
)


@pytest.fixture(autouse=True, scope="module")
def small_buffer() -> Iterator[None]:
    before, newfile._GATHERED_BYTES = newfile._GATHERED_BYTES, 256
    yield
    newfile._GATHERED_BYTES = before


@given(_STEPS)
def test_gathered_writes_are_those_of_a_plain_file(steps: list[tuple[object, ...]]) -> None:
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "gathered"
        fresh = 0
        with NewFile(path) as gathered, (Path(name) / "plain").open("w+b", buffering=0) as plain:
            for kind, *given_numbers in steps:
                numbers = [int(str(number)) for number in given_numbers]
                if kind in ("jump", "read"):
                    assert gathered.seek(numbers[0]) == plain.seek(numbers[0])
                if kind in ("follow", "jump"):
                    fresh += 1
                    data = bytes((fresh + place) % 251 for place in range(numbers[-1]))
                    # h5py seeks before each write, and does not look where the file stands after it
                    at = gathered.tell()
                    plain.seek(at)
                    assert gathered.write(memoryview(data)) == plain.write(data)
                if kind == "read":
                    wanted, buffer = plain.read(numbers[1]), bytearray(numbers[1])
                    assert gathered.read(numbers[1]) == wanted
                    assert buffer[: gathered.readinto(memoryview(buffer))] == wanted
                if kind == "truncate":
                    gathered.truncate(numbers[0])
                    plain.truncate(numbers[0])
                if kind == "end":
                    assert gathered.seek(0, os.SEEK_END) == plain.seek(0, os.SEEK_END)
                if kind == "writeback":
                    gathered.start_writeback()
        assert path.read_bytes() == (Path(name) / "plain").read_bytes()


def test_a_failed_write_is_told_at_the_end_and_nothing_more_is_written(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        with pytest.raises(OSError, match=r"File too large: .*new'"), NewFile(tmp_path / "new") as file:
            file.write(memoryview(b"a" * 256))
            resource.setrlimit(resource.RLIMIT_FSIZE, (512, before[1]))
            file.seek(1000)
            assert file.write(memoryview(b"b" * 300)) == 300
            with pytest.raises(OSError):
                file.check()
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
            file.seek(2000)
            file.write(memoryview(b"c" * 600))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (tmp_path / "new").read_bytes() == b"a" * 256
