"""Record the target's hidden states for rows of token ids, into a spool of rows.

Shape legend: T tokens, L layers, H hidden size.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from eyas.errors import EyasError
from eyas.extraction.connector_config import SPOOL_PARAMETER, connector_options
from eyas.extraction.engine import generate, open_engine
from eyas.params import Machine, TargetParams
from eyas.store.format import StoreSpec, row_key
from eyas.store.spool import RowSpool

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

    def record(
        self,
        rows: Sequence[Sequence[int]],
        description: str,
        spool: str = "rows",
        before_each: Callable[[], None] | None = None,
    ) -> float:
        """Record every row that the spool lacks; returns the seconds that it took.

        Args:
            rows: token ids.
            description: for the progress bar.
            spool: the spool's place under the root.
            before_each: called before a row is handed to the engine, and may wait.

        Raises:
            EyasError: a row did not arrive (the disk is full, or the engine's log has the reason).
        """
        from vllm import SamplingParams

        params = SamplingParams(
            max_tokens=1, temperature=0.0, extra_args={"kv_transfer_params": {SPOOL_PARAMETER: spool}}
        )
        wanted = {row_key(self.spec.fingerprint, row): row for row in rows}
        kept = RowSpool(self.root / spool, self.spec)
        missing = kept.missing(wanted)
        started = time.monotonic()
        if missing:
            prompts = [wanted[key] for key in missing]
            generate(self.engine, prompts, [params] * len(prompts), description=description, before_each=before_each)
            self._flush()
        self._wait(kept, missing)
        lost = kept.missing(missing)
        if lost:
            free_mib = shutil.disk_usage(self.root).free >> 20
            raise EyasError(
                f"{len(lost)} of {len(missing)} rows were not recorded (first: {lost[0]}); {free_mib} MiB are free on "
                "the disk; the engine's log says why. Recorded rows are kept, run again to go on"
            )
        return time.monotonic() - started

    def _wait(self, kept: RowSpool, missing: Sequence[str]) -> None:
        """Wait for the writers, until all rows are there or none has come for a minute."""
        absent, since = [key for key in missing if not kept.arrived(key)], time.monotonic()
        while absent and time.monotonic() - since < _PATIENCE_SECONDS:
            time.sleep(0.05)
            still = [key for key in absent if not kept.arrived(key)]
            if len(still) < len(absent):
                absent, since = still, time.monotonic()

    def _flush(self) -> None:
        """One more request: an engine hands over a request's states in the step after its last."""
        from vllm import SamplingParams

        params = SamplingParams(
            max_tokens=2, ignore_eos=True, extra_args={"kv_transfer_params": {SPOOL_PARAMETER: "flush/rows"}}
        )
        generate(self.engine, [[0, 0]], [params], description="flush")
