"""Write this machine's class into ``losses.json``; the others stay."""

from __future__ import annotations

import tempfile
from pathlib import Path

from eyas.files import write_json_atomic
from tests.golden import FILE, hardware_class, kept, losses

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        write_json_atomic(FILE, dict(sorted((kept() | {hardware_class(): losses(Path(name))}).items())))
    print(f"{FILE}: {hardware_class()}")
