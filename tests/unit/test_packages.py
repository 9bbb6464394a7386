"""The data lock and the wheel cache, with real pip on local wheels."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from eyas import packages
from eyas.errors import EyasError
from eyas.files import file_sha256

ZEROS = "0" * 64


def make_wheel(folder: Path, name: str = "tiny-prompts") -> Path:
    module = name.replace("-", "_")
    info = f"{module}-1.0.dist-info"
    wheel = folder / f"{module}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"{module}/prompts.jsonl", '{"prompt": "Hi"}\n')
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return wheel


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with ``locks/`` and ``links/``, an empty cache, and a pip that sees ``links/`` alone."""
    (tmp_path / "locks").mkdir()
    (tmp_path / "links").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EYAS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "links"))
    return tmp_path


def lock(checkout: Path, *pins: str) -> None:
    (checkout / packages.LOCK_FILE).write_text("# comment\n\n" + "".join(pin + "\n" for pin in pins))


def test_reads_pins(checkout: Path) -> None:
    lock(checkout, f"tiny-prompts==1.0 --hash=sha256:{ZEROS}", f"other==2.0.post1 --hash=sha256:{ZEROS}")
    assert packages.read_pins() == {
        "tiny-prompts": packages.Pin("tiny-prompts", "1.0", ZEROS),
        "other": packages.Pin("other", "2.0.post1", ZEROS),
    }


@pytest.mark.parametrize("line", ["tiny-prompts==1.0", "tiny-prompts", f"a==1 --hash=sha256:{ZEROS[1:]}", "-r x.txt"])
def test_a_bad_line_is_named(checkout: Path, line: str) -> None:
    lock(checkout, line)
    with pytest.raises(EyasError, match=r"locks/data\.txt:3: expected"):
        packages.read_pins()


def test_a_missing_lock_is_named(checkout: Path) -> None:
    with pytest.raises(EyasError, match=r"locks/data\.txt: no such file"):
        packages.read_pins()


def test_a_package_outside_the_lock_is_refused(checkout: Path) -> None:
    lock(checkout, f"tiny-prompts==1.0 --hash=sha256:{ZEROS}")
    with pytest.raises(EyasError, match="no package `tiny`; it has tiny-prompts"):
        packages.package_wheel("tiny")


def test_a_wheel_is_downloaded_once(checkout: Path) -> None:
    wheel = make_wheel(checkout / "links")
    lock(checkout, f"tiny-prompts==1.0 --hash=sha256:{file_sha256(wheel)}")
    first = packages.package_wheel("tiny-prompts")
    assert first.is_relative_to(checkout / "cache")
    assert file_sha256(first) == file_sha256(wheel)
    wheel.unlink()  # no source is left: the second call can only be the cache
    assert packages.package_wheel("tiny-prompts") == first
    assert [p.name for p in (checkout / "cache" / "packages").iterdir()] == [file_sha256(first)]


def test_a_wheel_with_another_hash_is_refused(checkout: Path) -> None:
    make_wheel(checkout / "links")
    lock(checkout, f"tiny-prompts==1.0 --hash=sha256:{ZEROS}")
    with pytest.raises(EyasError, match="could not download tiny-prompts"):
        packages.package_wheel("tiny-prompts")
    assert list((checkout / "cache" / "packages").glob("*/*.whl")) == []


def test_an_unreachable_package_is_named(checkout: Path) -> None:
    wheel = make_wheel(checkout / "links")
    lock(
        checkout,
        f"tiny-prompts==1.0 --hash=sha256:{file_sha256(wheel)}",
        f"nowhere-to-be-found==1.0 --hash=sha256:{ZEROS}",
    )
    with pytest.raises(EyasError, match="nowhere-to-be-found"):
        packages.fetch_packages()
