"""What takes part in which depth, by the definition: depth d at slot p predicts the teacher of slot p + d of its document."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from eyas.drafting.data import Batch
from eyas.drafting.planning import make_plan


@st.composite
def masks(draw: st.DrawFn) -> list[list[bool]]:
    """Supervised slots of each document."""
    return draw(st.lists(st.lists(st.booleans(), min_size=1, max_size=12), min_size=1, max_size=5))


def _batch(documents: list[list[bool]]) -> Batch:
    mask_T = torch.tensor([marked for document in documents for marked in document])
    nothing, slots = torch.empty(0), torch.arange(len(mask_T))
    return Batch(slots, nothing, nothing, mask_T, slots, [len(document) for document in documents], [])


@given(masks(), st.integers(1, 8))
def test_a_plan_is_what_its_definition_says(documents: list[list[bool]], depths: int) -> None:
    batch = _batch(documents)
    plan = make_plan(batch, depths)
    starts = [sum(map(len, documents[:number])) for number in range(len(documents) + 1)]
    pairs: list[list[tuple[int, int]]] = [[] for _ in range(depths)]  # slot and label by depth
    for start, document in zip(starts, documents, strict=False):
        for depth in range(depths):
            slots = range(len(document) - depth)
            pairs[depth] += [(start + p, start + p + depth) for p in slots if document[p + depth]]
    active = sorted({slot for found in pairs for slot, _ in found})
    assert plan.active_N.tolist() == active
    assert plan.label_slots.tolist() == batch.mask_T.nonzero()[:, 0].tolist()
    for depth, found in enumerate(pairs):
        predicting = plan.active_N[plan.rows[depth]].tolist()
        labels = plan.label_slots[plan.labels[depth]].tolist()
        assert list(zip(predicting, labels, strict=True)) == found
        assert torch.equal(plan.planned_labels[depth], plan.labels[depth])
        assert plan.fed_U[plan.fed_rows[depth]].tolist() == [slot + depth for slot in active]
    assert plan.fed_U.tolist() == sorted({slot + depth for slot in active for depth in range(depths)})
    assert plan.bounds.tolist() == starts
    places = [start + place for start, own in zip(starts, plan.places, strict=False) for place in own.tolist()]
    assert places == active
    assert plan.active_lengths == [len(own) for own in plan.places]
    assert plan.all_active == (len(active) == starts[-1])


def test_a_plan_s_indices_are_one_tensor_so_that_one_copy_brings_them() -> None:
    plan = make_plan(_batch([[True, False, True], [False]]), 3)
    views = [plan.active_N, plan.label_slots, plan.fed_U, plan.bounds, *plan.rows, *plan.labels, *plan.fed_rows]
    assert all(view.untyped_storage().data_ptr() == plan.indices.untyped_storage().data_ptr() for view in views)
