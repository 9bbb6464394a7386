"""The training-time test over the modules of speculators' `Eagle3DraftModel`, only where something is learned.

Takes a `Batch`; gives the head's states at every depth, which `eyas.drafting.loss` compares with the target's choices. Both are the
same function as `Eagle3DraftModel.forward`, without its waste: attention stays inside a document, and later depths are
computed at supervised slots only.
Serving agrees with it: depth 0 reads the target's states and fills the cache; depth d sees depth 0's keys up to its
slot and its own earlier ones, and is fed the token and the state that the depth before gave.
Shape legend: T slots, N active slots, K depths, F = T + K - 1, U slots whose token a query is fed, H hidden size, h attention heads, k key-value heads, g heads a key-value head, d head size,
E a projection's width, A auxiliary layers times hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from speculators.models.eagle3 import Eagle3DraftModel
from torch import nn
from torch.nn import functional
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from eyas.drafting.data import Batch
from eyas.drafting.flash import chain_attention, flash_serves
from eyas.drafting.float8 import linear
from eyas.drafting.fused import on_device, take
from eyas.drafting.planning import Plan


def _heads(x_TE: torch.Tensor, size: int) -> torch.Tensor:
    """[T, heads * d] → [heads, T, d]."""
    x_Thd: torch.Tensor = x_TE.unflatten(-1, (-1, size))
    return x_Thd.transpose(0, 1)


def _attend(
    q_hNd: torch.Tensor,
    keys_kTd: torch.Tensor,
    values_kTd: torch.Tensor,
    own: list[tuple[torch.Tensor, torch.Tensor]],
    plan: Plan,
    everywhere: bool,
    scaling: float,
    window: int | None,
) -> torch.Tensor:
    """Attention document by document: to depth 0's keys up to the query's slot, and to the query's own later keys.

    A window counts positions back from the query's own, as vLLM serves it: at depth d a query is d positions past its slot,
    so that each depth leaves one more of depth 0's keys behind, and at last the chain's first ones. speculators' forward
    leaves the window where depth 0 had it, and its heads see up to d keys that serving does not show them.

    Args:
        q_hNd: queries at active slots, or at all slots.
        keys_kTd: depth 0's keys at all slots.
        values_kTd: depth 0's values at all slots.
        own: keys and values [k, N, d] of the later depths so far, each seen by its own slot alone.
        plan: of the batch.
        everywhere: whether queries are of all slots.
        scaling: of the scores.
        window: positions that a query sees, its own included; None for all.

    Returns:
        [N, h * d].
    """
    left = None if window is None else window - 1 - len(own)
    if flash_serves(q_hNd, values_kTd) and (left is None or left >= 0):
        return chain_attention(
            q_hNd.transpose(0, 1),
            keys_kTd.transpose(0, 1),
            values_kTd.transpose(0, 1),
            None if everywhere else plan.active_N,
            [(key.transpose(0, 1), value.transpose(0, 1)) for key, value in own],
            plan.bounds,
            max(plan.lengths),
            scaling,
            left,
        )
    kv_heads, size = keys_kTd.shape[0], keys_kTd.shape[-1]
    queries = plan.lengths if everywhere else plan.active_lengths
    q_kgNd = (q_hNd * scaling).unflatten(0, (kv_heads, -1))
    outputs = []
    splits = zip(
        q_kgNd.split(queries, 2),
        keys_kTd.split(plan.lengths, 1),
        values_kTd.split(plan.lengths, 1),
        *[pair.split(queries, 1) for step in own for pair in step],
        strict=True,
    )
    for document, (q, keys, values, *later) in enumerate(splits):
        groups, count = q.shape[1], q.shape[2]
        if not count:
            continue
        places = torch.arange(count, device=q.device) if everywhere else plan.places[document]
        slots = torch.arange(keys.shape[1], device=q.device)
        blocked = slots > places[:, None]
        if window is not None:
            blocked = blocked | (slots <= (places + len(own) - window)[:, None])
        scores = torch.bmm(q.reshape(kv_heads, groups * count, size), keys.transpose(1, 2))
        scores = scores.unflatten(1, (groups, count)).masked_fill(blocked, -torch.inf)
        gone = 0 if window is None else max(0, len(own) - window)
        later = later[2 * gone :]
        extra = [(q * key[:, None]).sum(-1, keepdim=True) for key in later[::2]]
        weights = torch.softmax(torch.cat([scores, *extra], -1), -1).to(values.dtype)
        past = weights[..., : keys.shape[1]]
        mixed = torch.bmm(past.flatten(1, 2), values).unflatten(1, (groups, count))
        for step, value in enumerate(later[1::2]):
            mixed = mixed + weights[..., keys.shape[1] + step, None] * value[:, None]
        outputs.append(mixed.flatten(0, 1).transpose(0, 1).flatten(1))
    return torch.cat(outputs)


_Fed = tuple[torch.Tensor, torch.Tensor]
_Linear = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class _TokenShare:
    """What the tokens add to the first layer's queries, keys and values.

    That layer projects the normed token beside the normed state, so half of each product is the token's alone: it is the
    same at every depth, and is computed once.
    """

    queries_UE: torch.Tensor
    keys_FE: torch.Tensor
    values_FE: torch.Tensor
    state_weights: list[torch.Tensor]  # the other halves [E, H], of queries, keys and values

    def at(self, rows: torch.Tensor, slots: torch.Tensor) -> list[_Fed]:
        """For queries, keys and values: the share of some rows of `queries_UE` or of slots, and the states' weight."""
        taken = (take(self.queries_UE, rows), take(self.keys_FE, slots), take(self.values_FE, slots))
        return list(zip(taken, self.state_weights, strict=True))


def compute_type(x: torch.Tensor) -> torch.dtype:
    """What products on its device are computed in: autocast's type, or its own."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def _token_share(layer: Any, embeds_FH: torch.Tensor, asked_U: torch.Tensor | None) -> _TokenShare:
    """Project the tokens; queries at ``asked_U`` alone, or everywhere."""
    attention, device = layer.self_attn, embeds_FH.device
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    dtype = compute_type(embeds_FH)
    halves = [projection.weight.to(dtype).split(embeds_FH.shape[1], 1) for projection in projections]
    normed_FH = on_device(normed_as, device)(layer.input_layernorm, embeds_FH, dtype)
    inputs = [normed_FH if asked_U is None else take(normed_FH, asked_U), normed_FH, normed_FH]
    queries, keys, values = (
        functional.linear(fed, own, projection.bias)
        for fed, (own, _), projection in zip(inputs, halves, projections, strict=True)
    )
    return _TokenShare(queries, keys, values, [state for _, state in halves])


@dataclass
class _LayerCache:
    """Depth 0's rotated keys and values at all slots, later depths' at active slots."""

    keys_kTd: torch.Tensor
    values_kTd: torch.Tensor
    own: list[tuple[torch.Tensor, torch.Tensor]]


def _layer(
    layer: Any,
    linears: Sequence[_Linear],
    cache: _LayerCache | None,
    hidden: torch.Tensor,
    fed: list[_Fed] | None,
    rotary: tuple[torch.Tensor, torch.Tensor],
    plan: Plan,
    queries: torch.Tensor | None,
    window: int | None,
) -> tuple[torch.Tensor, _LayerCache]:
    """One decoder layer.

    Args:
        layer: of speculators' model; the first takes tokens beside the states.
        linears: gate, up and down of its feed-forward part.
        cache: depth 0's, or None at depth 0 itself.
        hidden: [T, H] at depth 0, else [N, H].
        fed: for the first layer, by `_TokenShare.at`.
        rotary: cosine and sine of the rows of `hidden`.
        plan: of the batch.
        queries: at depth 0, the slots that go on; None for all. Keys are made at all slots.
        window: of the layer's attention.
    """
    attention = layer.self_attn
    device = hidden.device
    residual, asked, keys, values = on_device(_keys, device)(layer, hidden, fed and fed[1:], *rotary)
    if queries is not None:
        residual, asked = take(residual, queries), take(asked, queries)
        rotary = (rotary[0][queries], rotary[1][queries])
    q = on_device(_queries, device)(attention, asked, fed and fed[0], *rotary)
    everywhere = plan.all_active or (cache is None and queries is None)
    if cache is None:
        cache = _LayerCache(keys, values, [])
    else:
        cache.own.append((keys, values))
    mixed = _attend(q, cache.keys_kTd, cache.values_kTd, cache.own, plan, everywhere, attention.scaling, window)
    # products stay outside of what is compiled, so that autocast converts a weight once for all depths
    attended = attention.o_proj(mixed)
    hidden, normed = on_device(_added, device)(layer.post_attention_layernorm, residual, attended)
    gate, up, down = linears
    gated = on_device(_gated, device)(layer.mlp.act_fn, gate(normed), up(normed))
    return hidden + down(gated), cache


def _product(projection: Any, asked: torch.Tensor, fed: _Fed | None) -> torch.Tensor:
    """A projection of states, on top of the tokens' share where there is one."""
    if fed is None:
        projected: torch.Tensor = projection(asked)
        return projected
    share, weight = fed
    return torch.addmm(share, asked, weight.T)


def _keys(
    layer: Any, hidden: torch.Tensor, fed: list[_Fed] | None, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Residual, what queries are made of, rotated keys [k, T, d], and values."""
    attention = layer.self_attn
    if fed is None:
        residual, asked = hidden, layer.input_layernorm(hidden)
    else:
        asked = layer.hidden_norm(hidden)
        residual = asked if layer.norm_before_residual else hidden
    projections = (attention.k_proj, attention.v_proj)
    keys, values = (
        _heads(_product(projection, asked, own), attention.head_dim)
        for projection, own in zip(projections, fed or (None, None), strict=True)
    )
    return residual, asked, _rotated(keys, cos, sin), values


def _queries(
    attention: Any, asked: torch.Tensor, fed: _Fed | None, cos: torch.Tensor, sin: torch.Tensor
) -> torch.Tensor:
    """Rotated queries [h, N, d]."""
    return _rotated(_heads(_product(attention.q_proj, asked, fed), attention.head_dim), cos, sin)


def _rotated(x_hTd: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    rotated: torch.Tensor = apply_rotary_pos_emb(x_hTd[None], x_hTd[None, :1], cos[None], sin[None])[0][0]
    return rotated.to(x_hTd.dtype)


def _added(norm: Any, residual: torch.Tensor, attended: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum, and its norm as products take it."""
    hidden = residual + attended
    return hidden, normed_as(norm, hidden, attended.dtype)


def _gated(activation: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    gated: torch.Tensor = activation(gate) * up
    return gated


def _projected(model: Any, aux_TA: torch.Tensor) -> torch.Tensor:
    """The target's auxiliary states as the first layer takes them."""
    aux_TA = aux_TA.to(model.fc.weight.dtype)
    if model.input_norm is not None:
        aux_TA = model.input_norm(aux_TA)
    if model.fc_norm is not None:
        parts = aux_TA.chunk(len(model.fc_norm), -1)
        aux_TA = torch.cat([norm(part) for norm, part in zip(model.fc_norm, parts, strict=True)], -1)
    projected: torch.Tensor = model.fc(aux_TA)
    return projected


def _feed_forward(mlp: Any, float8: bool) -> list[_Linear]:
    linears = [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
    return [linear(projection) for projection in linears] if float8 else linears


def draft_states(model: Eagle3DraftModel, batch: Batch, plan: Plan, depths: int, float8: bool = False) -> torch.Tensor:
    """States that the output head reads, at active slots and every depth: [K, N, H], in the type of its product.

    Each depth is fed the text's own tokens and the state that the depth before gave: after the final norm where the head
    has `norm_output`, before it otherwise, as vLLM does. With ``float8`` the feed-forward part's products are in float8.
    """
    device = batch.aux_TA.device
    hidden = on_device(_projected, device)(model, batch.aux_TA)
    caches: list[_LayerCache | None] = [None] * len(model.layers)
    # past a document's end the token is another one's; nothing there is supervised
    ids_F = functional.pad(batch.input_ids_T, (0, depths - 1))
    # a second layer wants queries of all slots from the first
    fed_U = plan.fed_U if len(model.layers) == 1 and not plan.all_active else None
    share = _token_share(model.layers[0], model.embed_tokens(ids_F), fed_U)
    linears = [_feed_forward(layer.mlp, float8) for layer in model.layers]
    outputs = []
    for depth in range(depths):
        if depth == 0:
            positions, slots = batch.positions_T, torch.arange(len(batch.input_ids_T), device=device)
        else:
            positions, slots = batch.positions_T[plan.active_N] + depth, plan.active_N + depth
        fed = share.at(slots if fed_U is None else plan.fed_rows[depth], slots)
        cos, sin = (t[0] for t in model.rotary_emb(hidden[None], positions[None]))
        for index, layer in enumerate(model.layers):
            last = index == len(model.layers) - 1
            queries = plan.active_N if depth == 0 and last and not plan.all_active else None
            window = model.sliding_window if index in model.sliding_window_indices else None
            own = fed if index == 0 else None
            hidden, caches[index] = _layer(
                layer, linears[index], caches[index], hidden, own, (cos, sin), plan, queries, window
            )
        normed, asked = on_device(_asked, device)(model.norm, hidden, compute_type(hidden))
        outputs.append(asked)
        hidden = normed if model.config.norm_output else hidden
    return torch.stack(outputs)


def normed_as(norm: Any, hidden: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The norm of states, in the type of a product."""
    normed: torch.Tensor = norm(hidden).to(dtype)
    return normed


def _asked(norm: Any, hidden: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm of states, which the next depth may take, and the same in the type of a product."""
    normed = norm(hidden)
    return normed, normed.to(dtype)


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """The head's own parameters; embeddings, output head and the target's tensors are frozen."""
    return [p for p in model.parameters() if p.requires_grad]
