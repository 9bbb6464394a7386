"""The KV connector through which vLLM hands over hidden states (vLLM's plug-in point ``kv_connector_module_path``).

vLLM's ``extract_hidden_states`` method keeps the wanted layers' states in a KV-cache group of their own. When a request
ends, this connector gathers that request's slots and writes one row to the spool, in the worker that has them
(tensor-parallel rank 0). It inherits the scheduler's part from vLLM's example connector, which writes one
safetensors file a request and needs CUDA; the worker's part is our own and runs on a CPU as well.

Shape legend: T tokens, L layers, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Semaphore
from typing import Any

import numpy as np
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
    PendingSave,
    extract_from_kv_cache,
)
from vllm.logger import init_logger
from vllm.v1.request import RequestStatus

from eyas.extraction.connector_config import SPOOL_PARAMETER
from eyas.store.format import StoreSpec
from eyas.store.spool import RowSpool

logger = init_logger("vllm.eyas.connector")
_WRITERS_PER_GPU = 8
_ROWS_IN_MEMORY = 64


class StoreConnector(ExampleHiddenStatesConnector):  # type: ignore[misc]  # vLLM has no type stubs
    """Writes each finished request's hidden states as a row of the spool named by the request (default ``rows``)."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        extra = self._kv_transfer_config.get_from_extra_config
        self._spec = StoreSpec.from_json(extra("spec", None))
        self._root = Path(extra("spool_root", None))
        self._spools: dict[str, RowSpool] = {}
        self._copied: set[str] = set()
        self._writers: ThreadPoolExecutor | None = None
        self._room = Semaphore(_ROWS_IN_MEMORY)  # pinned host memory is bounded, however slow the disk

    def wait_for_save(self) -> None:
        """Nothing to prepare: rows appear by atomic rename, so no lock file is needed."""

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Note what is to be saved; an aborted request leaves no row."""
        if request.status == RequestStatus.FINISHED_ABORTED:
            self._request_filenames.pop(request.request_id, None)
            return False, None
        delay, _ = super().request_finished(request, block_ids)
        pending = self._pending_saves.get(request.request_id)
        if pending is not None:
            # the parent's field for a file name carries the spool's name from the scheduler to the worker
            pending.filename = (request.kv_transfer_params or {}).get(SPOOL_PARAMETER, "rows")
        return delay, None

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Save what the scheduler noted, and report requests whose cache blocks may be freed."""
        if self.has_connector_metadata() and self._is_tp_rank_zero:
            for pending in self._get_connector_metadata().pending_saves:
                self._save(pending)
        self._accumulated_finished_req_ids.update(finished_req_ids)
        done = {
            request
            for request in self._accumulated_finished_req_ids & (self._copied | self._req_copy_events.keys())
            if request in self._copied or self._req_copy_events[request].query()
        }
        for request in done:
            self._copied.discard(request)
            self._req_copy_events.pop(request, None)
        self._accumulated_finished_req_ids -= done
        return done or None, None

    def _save(self, pending: PendingSave) -> None:
        assert self._kv_cache is not None
        blocks = torch.tensor(pending.block_ids, dtype=torch.long)
        slots = (blocks[:, None] * self._block_size + torch.arange(self._block_size)).flatten()
        tokens = pending.token_ids.shape[0]
        input_ids = pending.token_ids.numpy().astype(np.int32)
        if self._kv_cache.device.type == "cpu":
            hidden_TLH = extract_from_kv_cache(self._kv_cache, slots, tokens).to(torch.bfloat16)
            self._write(pending, input_ids, hidden_TLH, lambda: None)
            self._copied.add(pending.req_id)
            return
        self._room.acquire()
        stream = self._get_copy_stream()
        ready = torch.cuda.Event()
        ready.record()
        stream.wait_event(ready)
        with torch.cuda.stream(stream):
            device_TLH = extract_from_kv_cache(self._kv_cache, slots.to(self._kv_cache.device), tokens)
            hidden_TLH = torch.empty(device_TLH.shape, dtype=torch.bfloat16, device="cpu", pin_memory=True)
            hidden_TLH.copy_(device_TLH.to(torch.bfloat16), non_blocking=True)
        copied = torch.cuda.Event()
        copied.record(stream)
        self._req_copy_events[pending.req_id] = copied
        if self._writers is None:
            self._writers = ThreadPoolExecutor(_WRITERS_PER_GPU, thread_name_prefix="eyas-store")
        future = self._writers.submit(self._write, pending, input_ids, hidden_TLH, copied.synchronize)
        future.add_done_callback(self._written)

    def _written(self, future: Future[None]) -> None:
        self._room.release()
        error = future.exception()
        if error is not None:
            logger.error("a row of hidden states could not be written: %r", error)

    def _write(
        self, pending: PendingSave, input_ids: np.ndarray, hidden_TLH: torch.Tensor, wait: Callable[[], Any]
    ) -> None:
        wait()
        spool = self._spools.get(pending.filename)
        if spool is None:
            spool = self._spools[pending.filename] = RowSpool(self._root / pending.filename, self._spec)
        spool.write(input_ids, hidden_TLH.contiguous().view(torch.uint16).numpy())
