"""Record the target's hidden states for rows of token ids, into a spool of rows.

Shape legend: T tokens, L layers, H hidden size.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eyas.errors import EyasError
from eyas.extraction.connector_config import SPOOL_PARAMETER, connector_options
from eyas.extraction.engine import generate, open_engine
from eyas.params import Machine, TargetParams
from eyas.store.format import StoreSpec, row_key
from eyas.store.writer import RowSpool

if TYPE_CHECKING:
    from vllm import LLM

_PATIENCE_SECONDS = 60.0


@dataclass
class Recorder:
    """An engine that records, and the folder that its spools are in."""

    engine: LLM
    spec: StoreSpec
    root: Path

    @classmethod
    def open(cls, directory: Path, target: TargetParams, machine: Machine, spec: StoreSpec, root: Path) -> Recorder:
        """Start vLLM with the store connector."""
        return cls(open_engine(directory, target, machine, **connector_options(spec, root)), spec, root)

    def record(self, rows: Sequence[Sequence[int]], description: str, spool: str = "rows") -> float:
        """Record every row that the spool lacks; returns the seconds that it took.

        Raises:
            EyasError: a row did not arrive (the disk is full, or the engine's log has the reason).
        """
        from vllm import SamplingParams

        params = SamplingParams(
            max_tokens=1, temperature=0.0, extra_args={"kv_transfer_params": {SPOOL_PARAMETER: spool}}
        )
        wanted = {row_key(self.spec.fingerprint, row): row for row in rows}
        kept = RowSpool(self.root / spool, self.spec)
        missing = {key: row for key, row in wanted.items() if not kept.has(key)}
        started = time.monotonic()
        if missing:
            generate(self.engine, list(missing.values()), [params] * len(missing), description=description)
            self._flush()
        self._wait(kept, missing)
        lost = [key for key in missing if not kept.has(key)]
        if lost:
            free_mib = shutil.disk_usage(self.root).free >> 20
            raise EyasError(
                f"{len(lost)} of {len(missing)} rows were not recorded (first: {lost[0]}); {free_mib} MiB are free on "
                "the disk; the engine's log says why. Recorded rows are kept, run again to go on"
            )
        return time.monotonic() - started

    def _wait(self, kept: RowSpool, missing: dict[str, Any]) -> None:
        """Wait for the writers, until all rows are there or none has come for a minute."""
        here, since = 0, time.monotonic()
        while here < len(missing) and time.monotonic() - since < _PATIENCE_SECONDS:
            count = sum(kept.has(key) for key in missing)
            if count > here:
                here, since = count, time.monotonic()
            else:
                time.sleep(0.05)

    def _flush(self) -> None:
        """One more request: an engine hands over a request's states in the step after its last."""
        from vllm import SamplingParams

        params = SamplingParams(
            max_tokens=2, ignore_eos=True, extra_args={"kv_transfer_params": {SPOOL_PARAMETER: "flush/rows"}}
        )
        generate(self.engine, [[0, 0]], [params], description="flush")
