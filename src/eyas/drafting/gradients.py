"""How the ranks' gradients become one: computed alone, summed over replicas, or summed into shards.

Takes a head on its device; gives a `Together` that runs it. Sums are float32 like the weights, and nothing is averaged: the loss
is scaled by the label counts of the whole step. Only a step's last pack communicates, while its backward pass runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from speculators.models.eagle3 import Eagle3DraftModel
from torch import nn

from eyas.drafting.data import Batch
from eyas.drafting.float8 import check_float8
from eyas.drafting.forward import draft_states, trainable
from eyas.drafting.planning import Plan
from eyas.drafting.ranks import Ranks
from eyas.errors import EyasError
from eyas.params import TrainParams


class Together:
    """A head alone on its process."""

    sharded = False  # whether a rank has but a part of each weight

    def __init__(self, model: Eagle3DraftModel, float8: bool = False) -> None:
        self.model, self._float8 = model, float8

    def states(self, batch: Batch, plan: Plan, depths: int) -> torch.Tensor:
        """`draft_states` for training, [K, N, H]."""
        return draft_states(self.model, batch, plan, depths, self._float8)

    def before_backward(self, last: bool) -> None:
        """Say whether the backward pass that comes is the step's last."""

    def wait(self) -> None:
        """Until the gradients of the step are whole."""

    @contextmanager
    def whole(self) -> Iterator[None]:
        """While open, every rank has all weights; for evaluation."""
        yield


class Replicas(Together):
    """Every rank has all weights; a weight's gradient is summed as soon as the last backward pass has finished it."""

    def __init__(self, model: Eagle3DraftModel, float8: bool) -> None:
        super().__init__(model, float8)
        self._last, self._pending = False, list[Any]()
        for weight in trainable(model):
            weight.register_post_accumulate_grad_hook(self._sum)

    def _sum(self, weight: torch.Tensor) -> None:
        if self._last:
            self._pending.append(dist.all_reduce(weight.grad, async_op=True))

    def before_backward(self, last: bool) -> None:
        """Say whether the backward pass that comes is the step's last."""
        self._last = last

    def wait(self) -> None:
        """Until the gradients of the step are whole."""
        for work in self._pending:
            work.wait()
        self._pending.clear()


class _Unit(nn.Module):
    """The whole head as one unit of FSDP, which gathers weights where a module is called."""

    def __init__(self, model: Eagle3DraftModel, float8: bool) -> None:
        super().__init__()
        self.model, self._float8 = model, float8

    def forward(self, batch: Batch, plan: Plan, depths: int) -> torch.Tensor:
        return draft_states(self.model, batch, plan, depths, self._float8)


class Shards(Together):
    """Ranks share weights, gradients and moments out (FSDP2); the frozen tensors of the target stay whole on each."""

    sharded = True

    def __init__(self, model: Eagle3DraftModel, float8: bool, device: torch.device, world: int) -> None:
        super().__init__(model, float8)
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        frozen = {weight for weight in model.parameters() if not weight.requires_grad}
        mesh = init_device_mesh(device.type, (world,))
        self._unit: Any = fully_shard(
            _Unit(model, float8), mesh=mesh, reshard_after_forward=False, ignored_params=frozen
        )
        self._unit.set_gradient_divide_factor(1.0)
        self._unit.set_force_sum_reduction_for_comms(True)

    def states(self, batch: Batch, plan: Plan, depths: int) -> torch.Tensor:
        """`draft_states` for training, [K, N, H]."""
        states_KNH: torch.Tensor = self._unit(batch, plan, depths)
        return states_KNH

    def before_backward(self, last: bool) -> None:
        """Say whether the backward pass that comes is the step's last; until then whole weights are kept."""
        self._unit.set_requires_gradient_sync(last)
        self._unit.set_reshard_after_backward(last)

    @contextmanager
    def whole(self) -> Iterator[None]:
        """While open, every rank has all weights; for evaluation."""
        self._unit.unshard()
        try:
            yield
        finally:
            self._unit.reshard()


def together(
    model: Eagle3DraftModel, ranks: Ranks, sharding: str, params: TrainParams, device: torch.device
) -> Together:
    """What fits the number of ranks.

    Raises:
        EyasError: Muon with shards, for it needs whole matrices; float8 where it cannot be.
    """
    float8 = params.autocast == "float8"
    if float8:
        check_float8(model, device)
    if ranks.world == 1:
        return Together(model, float8)
    if sharding == "ddp":
        return Replicas(model, float8)
    if params.optimizer == "muon":
        raise EyasError("train.optimizer muon needs whole matrices: set `train_sharding: ddp` in machine.yaml")
    return Shards(model, float8, device, ranks.world)


def full(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor, or all of one that is shared out, on the CPU then; every rank must ask."""
    if isinstance(tensor, dist.tensor.DTensor):
        gathered: torch.Tensor = tensor.full_tensor().cpu()
        return gathered
    return tensor


def like(whole: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A copy of a whole tensor on a weight's device, shared out as the weight is where it has its shape."""
    moved = whole.to(weight.device, copy=True)
    if isinstance(weight, dist.tensor.DTensor) and whole.shape == weight.shape:
        return dist.tensor.distribute_tensor(moved, weight.device_mesh, weight.placements, src_data_rank=None)
    return moved
