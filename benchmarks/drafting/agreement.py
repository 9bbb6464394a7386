"""Does simulated chain drafting say what serving measures? The same head, the same prompts, the same greedy answers.

    python benchmarks/drafting/agreement.py smoke --out FILE        at the root of a checkout whose `train` has run
    python benchmarks/drafting/agreement.py smoke --head FOLDER     another head for the same target: served and counted, no simulation

Serves the profile's held-out prompts with vLLM and its trained head (greedy; the benchmark's length and drafts), takes the
target's states on exactly these answers (transformers in float32, rounded to bfloat16 as the store has them), and walks the
simulation over them. Outputs are only read; the engine's log is in ``.work/PROFILE/agreement``.

Both sides are counted alike: a draft behind the answer's last token counts as not accepted, as the simulation has it. Difference
from the training's own held-out figure: that one walks whole sampled conversations, not the greedy first answers to 32 prompts.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parents[1] / "store"))
from common import write_report

from eyas.benchmark.acceptance import Trace
from eyas.benchmark.methods import EAGLE3, Method
from eyas.benchmark.process import EngineProcess, Setting
from eyas.benchmark.prompts import HELDOUT, Prompt, choose_prompts
from eyas.drafting.acceptance import AcceptanceCounter, target_choice
from eyas.drafting.data import TokenRow, by_key, to_batch
from eyas.drafting.forward import draft_states
from eyas.drafting.inputs import load_inputs
from eyas.drafting.loss import head_loss
from eyas.drafting.planning import make_plan
from eyas.extraction.reference import reference_states
from eyas.params import Machine, Profile, load_machine, load_profile
from eyas.stage import process_environment
from eyas.store.batches import Batch as PlannedBatch
from eyas.store.feed import FedBatch
from eyas.tables import CONVERSATIONS, read_table
from eyas.targets.head import load_head
from eyas.targets.resolve import open_target
from eyas.templates.chat import ChatTemplate


def serve(params: Profile, data: Path, head: Path, work: Path, drafts: int) -> list[tuple[Prompt, Trace]]:
    """Each held-out prompt, and the steps in which its answer was served with this head."""
    machine = load_machine()
    directory, _ = open_target(params.target, data / "target.json")
    template = ChatTemplate(directory, variables=params.target.chat_template_kwargs)
    prompts = choose_prompts(
        read_table(data / "conversations" / "conversations.parquet", CONVERSATIONS),
        [],
        heldout=params.benchmark.heldout_prompts,
        per_set=0,
        encode=template.prompt_ids,
        longest=params.target.max_model_len - params.benchmark.max_tokens,
    )
    method = Method(EAGLE3, drafts, {"method": "eagle3", "model": str(head), "num_speculative_tokens": drafts})
    work.mkdir(parents=True, exist_ok=True)
    setting = Setting(
        directory, params.target, machine, prompts, params.benchmark.max_tokens, [8], work, work / "agreement.log"
    )
    os.environ.update(process_environment(machine))
    with EngineProcess(method, setting) as engine:
        engine.wait()
        traces = engine.serve(range(len(prompts)), 8, lambda: None).traces
    return list(zip(prompts, traces, strict=True))


def counted(traces: list[Trace], drafts: int) -> tuple[list[float], int]:
    """Acceptance by position and steps as served, drafts behind an answer's last token counted as not accepted."""
    alive, hits, steps = [0] * drafts, [0] * drafts, 0
    for trace in traces:
        place = 1
        for accepted in trace.accepted:
            steps += 1
            useful = min(accepted, len(trace.token_ids) - 1 - place)
            for position in range(drafts):
                if position <= useful:
                    alive[position] += 1
                hits[position] += position < useful
            place += accepted + 1
    shares = [hit / max(1, total) for hit, total in zip(hits, alive, strict=True)]
    return np.cumprod(shares).tolist(), steps


def simulated(params: Profile, data: Path, pairs: list[tuple[Prompt, Trace]], drafts: int) -> tuple[list[float], int]:
    """Acceptance by position and steps of the simulation on the same answers."""
    directory, _ = open_target(params.target, data / "target.json")
    inputs = load_inputs(data, Machine(), params.target, params.draft, params.train, params.responses.temperature, 1)
    spec, model = inputs.data.reader.spec, inputs.model.eval()
    unset = model.load_state_dict(load_file(data / "draft_head" / "model.safetensors"), strict=False)
    assert all(name.startswith("verifier_") for name in unset.missing_keys) and not unset.unexpected_keys
    target, counter = load_head(directory), AcceptanceCounter(drafts)
    texts = [prompt.token_ids + trace.token_ids for prompt, trace in pairs]
    states = reference_states(directory, texts, spec.layers, trust_remote_code=params.target.trust_remote_code)
    for (prompt, _), text, hidden_TLH in zip(pairs, texts, states, strict=True):
        ids = np.asarray(text, dtype=np.int32)
        row = TokenRow(prompt.prompt_id, prompt.prompt_id, ids, np.arange(len(ids)) >= len(prompt.token_ids))
        bits_TLH = hidden_TLH.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
        fed = FedBatch(PlannedBatch(0, (row.key,), len(ids)), bits_TLH, ids, [len(ids)])
        batch = to_batch(fed, by_key([row]), torch.device("cpu"))
        plan = make_plan(batch, drafts)
        with torch.no_grad():
            states_KNH = draft_states(model, batch, plan, drafts)
            drafted_KN = head_loss(model, states_KNH, batch, plan, "kl_div", 1.0, False).draft_ids_KN.numpy()
        if model.d2t is not None:
            drafted_KN = np.where(drafted_KN >= 0, drafted_KN + model.d2t.numpy()[drafted_KN], -1)
        counter.add(batch, plan, drafted_KN, target_choice(batch, target, 0.0))
    result = counter.result()
    return result.by_position, result.steps


def agreement(profile: str, head: Path | None = None) -> dict[str, Any]:
    """Serve, simulate, compare; in the root of a checkout. Another head than the profile's is only served."""
    params, data = load_profile(profile), Path("data") / profile
    drafts = min(max(params.benchmark.num_speculative_tokens), params.train.ttt_steps)
    pairs = serve(params, data, head or data / "draft_head", Path(".work") / profile / "agreement", drafts)
    by_position, steps = counted([trace for _, trace in pairs], drafts)
    length = 1 + sum(by_position)
    found = {
        "set": HELDOUT,
        "prompts": len(pairs),
        "tokens": sum(len(trace.token_ids) for _, trace in pairs),
        "served": {"by_position": by_position, "length": length, "steps": steps},
    }
    if head is not None:
        return found
    own, own_steps = simulated(params, data, pairs, drafts)
    own_length = 1 + sum(own)
    simulation = {"by_position": own, "length": own_length, "steps": own_steps}
    return found | {"simulated": simulation, "relative_difference": own_length / length - 1}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("profile")
    parser.add_argument("--head", type=Path, help="a folder such as `long_run.py assemble` makes")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    found = agreement(arguments.profile, arguments.head)
    write_report(arguments.out, Path(), {"profile": arguments.profile} | found)
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
