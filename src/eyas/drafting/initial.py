"""Start a head from an existing drafter: its weights by name, and a report of what was taken and what was not.

Takes a fresh head and a drafter in speculators', SpecForge's (EAGLE-3) or vLLM's layout; gives the head with the drafter's weights
where they fit, and an `InitialHead`. The drafter's code is never run, and pickled files are never opened.
The layouts are those of SpecForge's `LlamaForCausalLMEagle3`, EAGLE's `traineagle3/cnets.py` and vLLM's `llama_eagle3.py`.
Shape legend: D draft vocabulary, E the drafter's own, H hidden size.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from speculators.models.eagle3 import Eagle3DraftModel

from eyas.console import Progress
from eyas.drafting.rope import head_rope
from eyas.errors import EyasError
from eyas.params import DraftParams
from eyas.targets.head import weight_files
from eyas.targets.resolve import resolve_drafter

_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
_VOCABULARY = ("d2t", "t2d")
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# one of them at least is taken from any EAGLE-3 drafter: they read the target's states, which earlier drafters read otherwise
_READERS = ("fc.weight", "layers.0.self_attn.q_proj.weight")
# of the layer's config, and no parameter here
_FIXED = ("num_attention_heads", "num_key_value_heads", "rms_norm_eps", "hidden_act", "attention_bias", "mlp_bias")
_SAME = 1e-2  # of the norm: what float16 and bfloat16 roundings of one matrix differ by at most
_ROWS = 8192
# vLLM's fused matrices, and the parts whose rows they stack
_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}

Read = Callable[[], torch.Tensor]


@dataclass
class InitialHead:
    """What a head took from a drafter."""

    source: str
    revision: str
    taken: list[str] = field(default_factory=list)  # the head's names
    left: dict[str, str] = field(default_factory=dict)  # name → why not
    warnings: list[str] = field(default_factory=list)

    def record(self) -> dict[str, Any]:
        """For the provenance."""
        return asdict(self)

    def lines(self) -> list[str]:
        """For the console."""
        return [
            f"initial head {self.source} at {self.revision[:12]}: {len(self.taken)} tensors taken, {len(self.left)} not",
            *(f"  taken      {name}" for name in self.taken),
            *(f"  not taken  {name}: {reason}" for name, reason in self.left.items()),
            *(f"  warning    {warning}" for warning in self.warnings),
        ]


def start_from(model: Eagle3DraftModel, params: DraftParams) -> InitialHead | None:
    """Put the weights of `draft.init_from` into a fresh head, in place; None where it is not set.

    Trained weights are taken where name and shape are the head's. Output head and vocabulary stay the target's and the profile's.

    Args:
        model: from `make_head`, on the CPU.
        params: where the drafter is.

    Raises:
        EyasError: as `resolve_drafter` says; weights that are not finite; or nothing that reads the target's states fits, so
            that this is no EAGLE-3 head for this target.
    """
    if params.init_from is None:
        return None
    directory = resolve_drafter(params.init_from, params.init_revision)
    report = InitialHead(params.init_from, str(params.init_revision))
    report.warnings += _warnings(json.loads((directory / "config.json").read_text()), model, params, directory)
    found = _tensors(directory, model)
    wanted = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    with Progress("reading the initial head", len(found), "tensors") as progress, torch.no_grad():
        for name, read in sorted(found.items()):
            if name in wanted:
                reason = _take(wanted[name], read(), f"{directory}: {name}")
            elif name == "lm_head.weight":
                reason = _output(model, found)
            elif name in _VOCABULARY:
                reason = "the profile's draft vocabulary is kept"
            elif name == "embed_tokens.weight":
                reason = "frozen: the target's are kept (draft.train_embeddings)"
            else:
                reason = "the head has no such weight"
            if reason is None:
                report.taken.append(name)
            else:
                report.left[name] = reason
            progress.advance()
    if not set(_READERS) & set(report.taken):
        told = {name: report.left[name] for name in _READERS if name in report.left} or report.left
        raise EyasError(
            f"draft.init_from: nothing in {params.init_from} that reads the target's states fits the head, so it is no "
            "EAGLE-3 drafter for this target: "
            + "; ".join(f"{name}: {reason}" for name, reason in list(told.items())[:4])
        )
    report.left |= {name: "not in the drafter; starts afresh" for name in sorted(wanted) if name not in found}
    return report


def _plain(name: str) -> str:
    """The head's name for a drafter's tensor: vLLM puts `model.` before, SpecForge calls the layer `midlayer`."""
    name = name.removeprefix("model.")
    name = "layers.0." + name.removeprefix("midlayer.") if name.startswith("midlayer.") else name
    return "d2t" if name == "draft_id_to_target_id" else name


def _tensors(directory: Path, model: Eagle3DraftModel) -> dict[str, Read]:
    """How to read each of the drafter's tensors, by the head's names; fused ones in their parts."""
    rows = {name: len(weight) for name, weight in model.named_parameters()}
    found: dict[str, Read] = {}
    for stored, file in weight_files(directory).items():
        for name, read in _parts(_plain(stored), _reader(file, stored), rows):
            if name in found:
                raise EyasError(f"{directory}: several tensors may be {name}; keep one of them")
            found[name] = read
    return found


def _reader(file: Path, name: str) -> Read:
    def read() -> torch.Tensor:
        with safe_open(file, "pt") as tensors:
            tensor: torch.Tensor = tensors.get_tensor(name)
        return tensor

    return read


def _parts(name: str, read: Read, rows: dict[str, int]) -> list[tuple[str, Read]]:
    """A tensor, or the parts of a fused one where the head's rows add up to it."""
    for fused, parts in _FUSED.items():
        names = [name.replace(f".{fused}.", f".{part}.") for part in parts]
        if f".{fused}." in name and all(part in rows for part in names):
            sizes = [rows[part] for part in names]
            if len(tensor := read()) == sum(sizes):
                return [(part, _given(piece)) for part, piece in zip(names, tensor.split(sizes), strict=True)]
    return [(name, read)]


def _given(tensor: torch.Tensor) -> Read:
    return lambda: tensor


def _take(weight: torch.Tensor, tensor: torch.Tensor, where: str) -> str | None:
    """Copy a tensor into a weight, or say why not."""
    if tensor.dtype not in _FLOATS:
        return f"stored as {str(tensor.dtype).removeprefix('torch.')}; take the drafter before its quantisation"
    if tensor.shape != weight.shape:
        return f"shape {list(tensor.shape)}, the head's is {list(weight.shape)}"
    if not tensor.isfinite().all():
        raise EyasError(f"{where}: not finite; the drafter is damaged")
    weight.copy_(tensor)
    return None


def _targets(offsets: torch.Tensor | None, count: int) -> torch.Tensor:
    """The target's token of each row; stored are offsets, and none where the vocabulary is the target's."""
    rows = torch.arange(count)
    return rows if offsets is None else rows + offsets.cpu().long()


def _output(model: Eagle3DraftModel, found: dict[str, Read]) -> str:
    """Why the drafter's output head is not taken, and how far it is from the target's rows for the tokens that both draft."""
    theirs_EH, ours_DH = found["lm_head.weight"](), model.lm_head.weight
    kept = "the target's rows are kept, for the head's output is frozen to them"
    offsets = found["d2t"]() if "d2t" in found else None
    fits = offsets is None or len(offsets) == len(theirs_EH)
    if theirs_EH.dtype not in _FLOATS or theirs_EH.shape[1:] != ours_DH.shape[1:] or not fits:
        return f"shape {list(theirs_EH.shape)} or type do not fit; {kept}"
    their_tokens, our_tokens = _targets(offsets, len(theirs_EH)), _targets(model.d2t, len(ours_DH))
    row_of = torch.full((int(max(their_tokens.max(), our_tokens.max())) + 1,), -1)
    row_of[their_tokens] = torch.arange(len(their_tokens))
    ours = (row_of[our_tokens] >= 0).nonzero()[:, 0]
    theirs = row_of[our_tokens[ours]]
    difference = norm = 0.0
    for first in range(0, len(ours), _ROWS):
        mine_RH = ours_DH[ours[first : first + _ROWS]].float()
        its_RH = theirs_EH[theirs[first : first + _ROWS]].float()
        difference += float((its_RH - mine_RH).double().pow(2).sum())
        norm += float(mine_RH.double().pow(2).sum())
    relative = (difference / norm) ** 0.5 if norm else 1.0
    shared = f"{len(ours)} of {len(our_tokens)} tokens are in both vocabularies"
    if relative <= _SAME:
        return f"equals the target's rows ({shared})"
    return f"trained apart from the target: differs by {relative:.2f} of the norm ({shared}); {kept}"


def _warnings(config: dict[str, Any], model: Eagle3DraftModel, params: DraftParams, directory: Path) -> list[str]:
    """Where the drafter's config means another function than the head's, with the parameter to set."""
    layer = config.get("transformer_layer_config") or config
    flags = config | (config.get("eagle_config") or {})
    # as vLLM reads what is not written
    absent = {"norm_before_residual": config.get("speculators_model_type") == "eagle3"}
    ours = model.config.transformer_layer_config
    kinds = layer.get("layer_types") or []
    window = layer.get("sliding_window") if "sliding_attention" in kinds else None
    pairs: list[tuple[str, Any, Any]] = [
        *((f"draft.{name}", bool(flags.get(name, absent.get(name, False))), getattr(params, name)) for name in _FLAGS),
        ("draft.num_layers", layer.get("num_hidden_layers", 1), params.num_layers),
        ("draft.intermediate_size", layer.get("intermediate_size"), ours.intermediate_size),
        ("draft.sliding_window", window, params.sliding_window),
        ("draft.rope", _rope(layer, window is not None, directory), ours.rope_parameters),
    ]
    told = [
        f"{name}: the drafter has {json.dumps(theirs)}, the head {json.dumps(mine)}; set {name} to the drafter's"
        for name, theirs, mine in pairs
        if theirs != mine and (theirs is not None or name == "draft.sliding_window")
    ]
    told += _feeding(flags, "speculators_model_type" in config, list(model.config.eagle_aux_hidden_state_layer_ids))
    for name in _FIXED:
        if layer.get(name) not in (None, getattr(ours, name)):
            told.append(f"{name}: {layer[name]} in the drafter, {getattr(ours, name)} as the target here; no parameter")
    return told


def _feeding(flags: dict[str, Any], exact: bool, mine: list[int]) -> list[str]:
    """Where the drafter is fed by other layers than the head, or does not say by which.

    Two counts are about: layer k's input (EAGLE's authors, speculators, vLLM), and layer k's output (SpecForge's default, ModelOpt), one
    less. SGLang takes ids that begin with 1 for outputs (https://github.com/sgl-project/sglang/pull/25454); so does this.

    Args:
        flags: of the drafter's config.
        exact: the config is speculators', which counts as vLLM does.
        mine: layers that feed the head.
    """
    if flags.get("use_aux_hidden_state") is False:
        return ["the drafter reads the target's last state alone; the head reads extract.layers"]
    theirs: list[int] | None = flags.get("eagle_aux_hidden_state_layer_ids")
    if not theirs:
        return ["the drafter's config does not say which layers feed it; see that extract.layers has the same"]
    outputs = not exact and theirs[0] == 1
    read = [number + 1 for number in theirs] if outputs else theirs
    if read == mine:
        return []
    how = f" (written {json.dumps(theirs)}: ids that begin with 1 count layers' outputs)" if outputs else ""
    return [
        f"extract.layers: the drafter has {json.dumps(read)}{how}, the head {json.dumps(mine)}; set extract.layers to the drafter's"
    ]


def _rope(layer: dict[str, Any], window: bool, directory: Path) -> dict[str, Any] | None:
    """The drafter's rotary parameters in the head's form; None where the head cannot have them."""
    try:
        return head_rope(None, layer, window, directory / "config.json")
    except EyasError:
        return None
