"""How vLLM is told to record hidden states; apart from the connector, so that it can be read without vLLM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from eyas.store.format import StoreSpec

SPOOL_PARAMETER = "eyas_spool"
_CONNECTOR_MODULE = "eyas.extraction.connector"


def connector_options(spec: StoreSpec, spool_root: Path) -> dict[str, Any]:
    """Arguments of `vllm.LLM` that record the layers of ``spec`` into spools under ``spool_root``."""
    return {
        "speculative_config": {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(spec.layers)}},
        },
        "kv_transfer_config": {
            "kv_connector": "StoreConnector",
            "kv_connector_module_path": _CONNECTOR_MODULE,
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"spec": spec.to_json(), "spool_root": str(spool_root.absolute())},
        },
    }
