"""One conversation learnt by heart: what `eyas train --overfit-one` trains, and how it judges what serving made of it.

Takes the profile's token rows and store; gives a `Lesson`, a head that knows it, and a verdict on the served steps. A head
that drafts every token of an answer here and is not accepted whole there is served other than it is trained.
Shape legend: T slots, N positions, V target vocabulary, K depths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from speculators.models.eagle3 import Eagle3DraftModel

from eyas.console import Progress
from eyas.drafting.data import Batch, TokenRow, TrainingData, by_key, to_batch
from eyas.drafting.forward import draft_states
from eyas.drafting.loss import head_loss
from eyas.drafting.optimizing import make_optimizers
from eyas.drafting.planning import make_plan
from eyas.drafting.stepping import autocast
from eyas.errors import EyasError
from eyas.params import TrainParams
from eyas.store.batches import Batch as PlannedBatch
from eyas.store.feed import FedBatch
from eyas.store.reader import StoreReader
from eyas.targets.head import TargetHead

_CANDIDATES = 256
_ENOUGH_TOKENS = 64
_LEAST_STEPS = 3
_CHUNK = 16
# of the greatest logit: what bfloat16 can round two logits together by, and then greedy decoding may take either
_CLEAR = 2.0**-6
_SHARPNESS = 30.0
_MOST_STEPS = 600
_LOSS = 0.01


@dataclass(frozen=True)
class Lesson:
    """The beginning of a conversation that the target would say greedily, with its stored states."""

    conversation_id: str
    prompt_ids: list[int]
    answer_ids: list[int]
    batch: Batch  # of the one row, cut behind the answer; supervises the answer's tokens but its first


@dataclass(frozen=True)
class Learnt:
    """How the learning went."""

    steps: int
    loss_by_depth: list[float]


@dataclass(frozen=True)
class Verdict:
    """What serving accepted; no causes if all of it."""

    steps: int  # of the target, without the prefill
    fewest: int  # steps that accepting everything takes
    by_position: list[float]  # share of the steps that accepted up to each drafted position inside the answer
    causes: list[str]


def greedy_length(row: TokenRow, reader: StoreReader, target: TargetHead, drafted_V: np.ndarray) -> tuple[int, int]:
    """Where a row's first answer begins, and how many of its tokens a greedy target surely says and a head can draft.

    Args:
        row: of the token table.
        reader: of its states.
        target: final norm and output head, on the CPU.
        drafted_V: bool, tokens in the draft vocabulary. The answer's first token is the target's own and need not be in it.
    """
    first = int(np.argmax(row.loss_mask))
    rest = np.flatnonzero(~row.loss_mask[first:])
    end = first + int(rest[0]) if len(rest) else len(row.input_ids)
    if not first:
        return 0, 0
    final_TH = torch.from_numpy(reader.read(row.key).hidden_TLH[:, -1].view(np.int16)).view(torch.bfloat16)
    end = min(end, first + _ENOUGH_TOKENS)
    for begin in range(first, end, _CHUNK):
        part = slice(begin, min(begin + _CHUNK, end))
        logits_NV = target.logits(target.normed(final_TH[part.start - 1 : part.stop - 1]))
        top_N2 = logits_NV.topk(2, -1)
        said_N = row.input_ids[part]
        clear_N = (top_N2.values[:, 0] - top_N2.values[:, 1] > _CLEAR * logits_NV.abs().amax(-1)).numpy()
        good_N = (top_N2.indices[:, 0].numpy() == said_N) & clear_N
        good_N &= drafted_V[said_N] | (np.arange(part.start, part.stop) == first)
        if not good_N.all():
            return first, begin - first + int(np.argmin(good_N))
    return first, end - first


def choose_lesson(
    data: TrainingData, target: TargetHead, drafted_V: np.ndarray, drafts: int, device: torch.device
) -> Lesson:
    """The stored answer that stays greedy longest from its first token on, of 256 rows at most; the first that is long enough.

    Args:
        data: rows of both splits and the store.
        target: final norm and output head, on the CPU.
        drafted_V: bool, tokens in the draft vocabulary.
        drafts: tokens that a step drafts.
        device: where the batch goes.

    Raises:
        EyasError: no answer stays greedy for three steps.
    """
    rows = [*data.heldout, *data.train]
    rows = rows[:: max(1, len(rows) // _CANDIDATES)][:_CANDIDATES]
    best, begins, length = rows[0], 0, 0
    with Progress("looking for a greedy answer", len(rows), "rows") as progress, torch.no_grad():
        for row in rows:
            first, found = greedy_length(row, data.reader, target, drafted_V)
            if found > length:
                best, begins, length = row, first, found
            progress.advance()
            if length >= _ENOUGH_TOKENS:
                break
    needed = 1 + _LEAST_STEPS * (drafts + 1)
    if length < needed:
        raise EyasError(
            f"overfit-one: of {len(rows)} stored answers the longest beginning that is greedy and inside the draft vocabulary "
            f"has {length} tokens, {needed} are needed for {_LEAST_STEPS} steps; lower responses.temperature, raise "
            "vocab.draft_vocab_size, or take target-generated answers"
        )
    ids = best.input_ids[: begins + length]
    mask = np.zeros(len(ids), dtype=bool)
    mask[begins:-1] = True
    row = TokenRow(best.conversation_id, best.key, ids, mask)
    states_TLH = np.ascontiguousarray(data.reader.read(best.key).hidden_TLH[: len(ids)])
    fed = FedBatch(PlannedBatch(0, (best.key,), len(ids)), states_TLH, ids, [len(ids)])
    return Lesson(
        best.conversation_id, ids[:begins].tolist(), ids[begins:].tolist(), to_batch(fed, by_key([row]), device)
    )


def learn(model: Eagle3DraftModel, lesson: Lesson, params: TrainParams, drafts: int) -> Learnt:
    """Train a head in place until it drafts the lesson's answer whole, at every depth, and surely.

    The teacher is made sharp, for greedy is what is to be learnt: its loss then goes to zero. Its tensors are not exported.

    Args:
        model: from `make_head`; goes to the lesson's device. Embeddings stay as they are.
        lesson: what is learnt.
        params: rate, optimiser and compute type.
        drafts: depths to learn.

    Raises:
        EyasError: not learnt in 600 steps.
    """
    device, batch = lesson.batch.input_ids_T.device, lesson.batch
    model.to(device).train()
    model.embed_tokens.requires_grad_(False)
    weights = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    optimizers = make_optimizers(weights, params)
    with torch.no_grad():
        model.verifier_norm.weight.mul_(_SHARPNESS)
    model.teacher_softcap = None  # it would hold the sharpened logits together, and changes no greedy choice
    plan = make_plan(batch, drafts)
    labels_K = torch.tensor([len(rows) for rows in plan.rows])
    with Progress("learning one conversation", _MOST_STEPS, "steps at most") as progress:
        for step in range(_MOST_STEPS):
            model.zero_grad(set_to_none=True)
            with autocast(params, device):
                states_KNH = draft_states(model, batch, plan, drafts)
                out = head_loss(model, states_KNH, batch, plan, "kl_div", 1.0, True)
            if torch.equal(out.hits_K.cpu(), labels_K.float()) and out.by_depth_K.max() < _LOSS:
                return Learnt(step, out.by_depth_K.tolist())
            out.loss.backward()
            torch.nn.utils.clip_grad_norm_(weights.values(), params.clip_norm)
            for optimizer in optimizers:
                optimizer.step()
            progress.advance()
    shares = ", ".join(f"{share:.3f}" for share in (out.hits_K.cpu() / labels_K).tolist())
    raise EyasError(
        f"overfit-one: after {_MOST_STEPS} steps the head drafts only {shares} of the answer by depth; lower train.lr, or "
        "look at draft.* and at the stored states of the auxiliary layers (`eyas store verify`)"
    )


def judge(answer: Sequence[int], served: Sequence[int], accepted: Sequence[int], drafts: int) -> Verdict:
    """Whether serving accepted every draft.

    Args:
        answer: the lesson's.
        served: tokens that came out.
        accepted: drafts that each target step accepted, in order.
        drafts: tokens that a step drafts.
    """
    reached, passed = [0] * drafts, [0] * drafts
    place = 1  # the first token comes with the prefill
    for count in accepted:
        for position in range(min(drafts, len(answer) - place)):
            reached[position] += 1
            passed[position] += count > position
        place += count + 1
    by_position = [hit / total if total else 1.0 for hit, total in zip(passed, reached, strict=True)]
    fewest = -(-(len(answer) - 1) // (drafts + 1))
    causes = []
    if list(served) != list(answer):
        pairs = zip(served, answer, strict=False)
        place = next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), min(len(served), len(answer)))
        causes.append(
            f"the target's own greedy answer leaves the stored one at token {place + 1} of {len(answer)}: the engine serves "
            "other weights or computes otherwise than when the states were recorded (target.*, engine version)"
        )
    elif min(by_position) < 1.0:
        causes = _causes(by_position)
    return Verdict(len(accepted), fewest, by_position, causes)


def _causes(by_position: Sequence[float]) -> list[str]:
    """What usually makes drafts fail from a position on."""
    if by_position[0] < 1.0:
        return [
            "layer ids: serving feeds other layers' states than were stored (extract.layers, eagle_aux_hidden_state_layer_ids)",
            "norm flags at the head's entrance: norm_before_fc, fc_norm, norm_before_residual",
            "d2t: drafted ids stand for other tokens than in training (another vocabulary was exported)",
            "alignment: a slot's token, states and position are shifted against each other",
            "rope: the head's rotary parameters are read otherwise by the engine",
        ]
    return [
        "norm_output: the state that one depth hands to the next is normed in one place and not in the other",
        "positions or sliding_window: later depths see other keys, or stand at other positions, than in training",
    ]
