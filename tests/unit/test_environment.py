import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from eyas.environment import (
    ENGINES,
    KEYS,
    env_versions,
    installed_differences,
    installed_engine,
    locked_versions,
    tidy_lock,
)
from eyas.errors import EyasError

ROOT = Path(__file__).parents[2]
LOCKS = {engine: (ROOT / "locks" / f"{engine}.txt").read_text() for engine in ENGINES}
WHERE = "python_full_version < '3.13' and platform_machine == 'x86_64' and sys_platform == 'linux'"
COMPILED = f"""\
# a header of uv's
click==8.5.1 ; {WHERE} \\
    --hash=sha256:aa \\
    --hash=sha256:bb
networkx==3.6.1 ; python_full_version < '3.12' and platform_machine == 'x86_64' and sys_platform == 'linux' \\
    --hash=sha256:cc
torch==2.13.0 ; {WHERE} \\
    --hash=sha256:dd \\
    --hash=sha256:ee
torchlike==1.0 ; {WHERE} \\
    --hash=sha256:ff
"""


def test_tidy_keeps_every_pin_and_drops_what_all_share() -> None:
    assert tidy_lock(COMPILED, "cpu").splitlines()[1:] == [
        "click==8.5.1 \\",
        "    --hash=sha256:aa \\",
        "    --hash=sha256:bb",
        "networkx==3.6.1 ; python_full_version < '3.12' \\",
        "    --hash=sha256:cc",
        "torch==2.13.0",
        "torchlike==1.0 \\",
        "    --hash=sha256:ff",
    ]
    assert "    --hash=sha256:ee\n" in tidy_lock(COMPILED, "cuda")


@pytest.mark.parametrize("engine", ENGINES)
def test_tidying_a_lock_again_changes_nothing(engine: str) -> None:
    assert tidy_lock(LOCKS[engine], engine) == LOCKS[engine]


@pytest.mark.parametrize("engine", ENGINES)
def test_locks_name_no_place_and_cover_both_pythons(engine: str) -> None:
    text = LOCKS[engine]
    assert not re.search(r"https?:|file:|find-links|index-url|^-e|@ ", text, re.MULTILINE)
    pins = [Requirement(line.removesuffix(" \\")) for line in text.splitlines() if line[:1].isalnum()]
    for python in ("3.11.7", "3.12.1"):
        here = {
            "python_full_version": python,
            "python_version": python[:4],
            "sys_platform": "linux",
            "platform_machine": "x86_64",
            "implementation_name": "cpython",
            "platform_python_implementation": "CPython",
        }
        names = [pin.name for pin in pins if pin.marker is None or pin.marker.evaluate(here)]
        assert len(names) == len(set(names)) and {"torch", ENGINES[engine], "dvc", "pytest"} <= set(names)


def test_cpu_lock_takes_either_build_of_torch_and_no_cuda_libraries() -> None:
    assert re.search(r"^torch==2\.13\.0$", LOCKS["cpu"], re.MULTILINE)
    assert not re.search(r"^(nvidia|cuda|triton|torchvision|torchaudio|torchcodec)", LOCKS["cpu"], re.MULTILINE)


def test_env_json_is_what_the_locks_say() -> None:
    written = json.loads((ROOT / "locks" / "env.json").read_text())
    assert written == env_versions(LOCKS) and set(written) == set(KEYS)


def test_locks_that_disagree_are_refused() -> None:
    other = LOCKS["cuda"].replace(f"numpy=={locked_versions(LOCKS['cuda'])['numpy']}", "numpy==1.0")
    with pytest.raises(EyasError, match=r"numpy is locked as .* for cpu, 1\.0 for cuda"):
        env_versions({"cpu": LOCKS["cpu"], "cuda": other})


def test_a_key_that_no_lock_has_is_refused() -> None:
    with pytest.raises(EyasError, match="vllm is locked as nothing"):
        env_versions({"cpu": "", "cuda": ""})


def test_what_is_installed_is_what_is_locked() -> None:
    assert installed_engine() in ENGINES
    assert installed_differences(ROOT / "locks" / "env.json") == []


def test_a_difference_is_named(tmp_path: Path) -> None:
    file = tmp_path / "env.json"
    file.write_text('{"numpy": "0.1", "no-such-package": "1"}')
    first, second = installed_differences(file)
    assert re.fullmatch(r"numpy \d\S+, locked 0\.1", first)
    assert second == "no-such-package is not installed, locked 1"


@pytest.mark.parametrize(("text", "said"), [(None, "no such file"), ("{", "make lock")])
def test_env_json_missing_or_broken(tmp_path: Path, text: str | None, said: str) -> None:
    if text is not None:
        (tmp_path / "env.json").write_text(text)
    with pytest.raises(EyasError, match=said):
        installed_differences(tmp_path / "env.json")


def test_locking_needs_the_standard_library_only() -> None:
    """`make lock` runs this module in a bare venv: -S and -I keep site-packages away."""
    code = f"import sys; sys.path.insert(0, {str(ROOT / 'src')!r}); import eyas.environment"
    subprocess.run([sys.executable, "-I", "-S", "-c", code], check=True)
