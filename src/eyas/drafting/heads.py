"""Make an EAGLE-3 head for a target, and write it as the checkpoint that vLLM serves.

Takes `DraftParams`, the target's directory, the draft vocabulary and the recorded layers; gives speculators'
`Eagle3DraftModel` with the target's embeddings, output head and final norm in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import LlamaConfig

from eyas.drafting.rope import attention_shape, head_rope
from eyas.errors import EyasError
from eyas.params import DraftParams
from eyas.targets.head import load_head, load_tensor
from eyas.targets.resolve import read_config
from eyas.vocabulary import DraftVocabulary

_FIRST_NORM_SCALE = 0.3
_TEACHER = ("verifier_lm_head.", "verifier_norm.")


def _decoder_config(text: dict[str, Any], params: DraftParams, where: Path) -> LlamaConfig:
    """A Llama decoder with the target's width and attention heads; vLLM serves this family."""
    heads, kv_heads, head_dim = attention_shape(text, where)
    config = LlamaConfig(
        vocab_size=text["vocab_size"],
        hidden_size=text["hidden_size"],
        intermediate_size=params.intermediate_size or text["intermediate_size"],
        num_hidden_layers=params.num_layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        hidden_act="silu",
        max_position_embeddings=text["max_position_embeddings"],
        rms_norm_eps=text.get("rms_norm_eps", 1e-6),
        rope_parameters=head_rope(params.rope, text, params.sliding_window is not None, where),
        tie_word_embeddings=False,
        sliding_window=params.sliding_window,
        layer_types=["sliding_attention" if params.sliding_window else "full_attention"] * params.num_layers,
    )
    # speculators takes flex attention where nothing is set, and that needs a GPU
    config._attn_implementation = "eager"
    return config


def make_head(
    params: DraftParams,
    directory: Path,
    source: str,
    vocabulary: DraftVocabulary,
    layers: Sequence[int],
    *,
    ttt_steps: int,
    seed: int,
) -> Eagle3DraftModel:
    """A head in float32 on the CPU, ready to be trained.

    Args:
        params: the head's shape.
        directory: the target's local directory.
        source: the target's name as the checkpoint is to say it; never a path of this machine's.
        vocabulary: the draft vocabulary.
        layers: recorded layer ids; the last is the final layer, the others feed the head.
        ttt_steps: depth that the head is trained for, written as the number of tokens to draft.
        seed: of the random weights.

    Raises:
        EyasError: the target lacks a tensor, its sizes do not fit the vocabulary, or the head cannot take its rope.
    """
    full = read_config(directory)
    text = full.get("text_config") or full
    if len(vocabulary.t2d_V) != text["vocab_size"]:
        raise EyasError(
            f"{directory}: the target has {text['vocab_size']} tokens, the draft vocabulary was made for "
            f"{len(vocabulary.t2d_V)}; run the `vocab` stage again"
        )
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=_decoder_config(text, params, directory / "config.json"),
        draft_vocab_size=len(vocabulary.d2t_D),
        norm_before_residual=params.norm_before_residual,
        norm_before_fc=params.norm_before_fc,
        fc_norm=params.fc_norm,
        embed_requires_grad=params.train_embeddings,
        norm_output=params.norm_output,
        eagle_aux_hidden_state_layer_ids=list(layers[:-1]),
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=ttt_steps)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=source, architectures=full.get("architectures") or []),
        ),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Eagle3DraftModel(config).float()
    t2d_V = torch.from_numpy(vocabulary.t2d_V)
    model.load_vocab_mappings(t2d_V, torch.from_numpy(vocabulary.d2t_D))
    _load_target(model, directory, t2d_V)
    _start(model)
    return model


@torch.no_grad()
def _load_target(model: Eagle3DraftModel, directory: Path, t2d_V: torch.Tensor) -> None:
    """Copy embeddings, output head and final norm out of the target.

    speculators' own loader asks the hub by the name in the config; that name need not be a place.
    """
    embeddings_VH = load_tensor(directory, "model.embed_tokens.weight")
    if embeddings_VH is None:
        raise EyasError(f"{directory}: no tensor model.embed_tokens.weight; the head needs the target's embeddings")
    target = load_head(directory)
    norm_H = target.norm_weight_H + 1.0 if target.unit_offset else target.norm_weight_H
    head_DH = target.head_VH[t2d_V]
    model.embed_tokens.weight.copy_(embeddings_VH)
    model.lm_head.weight.copy_(head_DH)
    model.verifier_lm_head.weight.copy_(head_DH)
    model.verifier_norm.weight.copy_(norm_H)
    model.teacher_softcap = target.softcap
    unset = [name for name, tensor in model.named_parameters() if not tensor.isfinite().all()]
    if unset:
        raise EyasError(f"{directory}: not finite after loading: {', '.join(unset)}")


@torch.no_grad()
def _start(model: Eagle3DraftModel) -> None:
    """Start where the target is understood already: states in its last recorded basis, read by its own norm, but softly.

    The projection hands the last auxiliary layer through. At its full scale the norm makes a head that knows nothing yet
    very sure of it: the first loss is many times a uniform guess's, and unlearning that costs an epoch.
    """
    model.fc.weight.zero_()
    model.fc.weight[:, -model.hidden_size :].fill_diagonal_(1.0)
    model.norm.weight.copy_(_FIRST_NORM_SCALE * model.verifier_norm.weight)


def export(model: Eagle3DraftModel, directory: Path) -> None:
    """Write ``config.json`` and ``model.safetensors`` into an existing directory; the same head gives the same bytes.

    Weights that came from the target are written in bfloat16 where that loses nothing, trained ones in float32.
    """
    model.config.dtype = "float32"
    # `save_pretrained` would put speculators' source code beside it
    model.config.to_json_file(directory / "config.json")
    tensors = {}
    for name, tensor in model.state_dict().items():
        if name.startswith(_TEACHER):
            continue
        tensor = tensor.detach().cpu().contiguous()
        narrow = tensor.bfloat16() if tensor.is_floating_point() else tensor
        tensors[name] = narrow if narrow.dtype == torch.bfloat16 and torch.equal(narrow.float(), tensor) else tensor
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
