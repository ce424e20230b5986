"""Reductions of gradients outside the backward pass: of several models at once, or with a lag."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from distconv.model.buckets import Bucket, PackedGradients
from distconv.model.gradient_reduction import GradientReduction, required_reduction
from distconv.model.parallelize import no_sync
from distconv.training.checks import check_count
from distconv.transport.interface import Request

# Reductions of the gradients of several models at once, in any order of backward passes.


class ConcurrentReductions:
    """A context in which the gradients of several models are reduced at the same time.

    Each model has its own communicators for reductions, like the thread teams of the Cray PE ML
    plug-in, so ranks may call the backward passes in different orders:

        both = ConcurrentReductions(generator, critic)
        with both:
            loss_of_generator.backward()
            loss_of_critic.backward()
        # here the gradients are the sums

    Within the context backward passes return before the sums are complete: do not use gradients
    before the end of the context, which waits for all sums. Between GPUs all reductions start at
    the end, in the order of the models. Each model takes part in one backward pass. Forward passes,
    and backward passes of models with partitioned samples, must come in one order on all ranks, as
    always.

    Raises ValueError if a model is not parallelized, or two models are submodules of one
    parallelized module.

    Parameters
    ----------
    models: parallelized modules. All ranks make the context together, with the models in one order.

    Examples
    --------
    >>> grid = dc.ProcessGrid(sample=2)
    >>> generator, critic = (dc.parallelize(nn.Linear(4, 4), grid) for _ in range(2))
    >>> both = dc.training.ConcurrentReductions(generator, critic)
    >>> x = dc.distribute_tensor(torch.ones(2, 4), grid)
    >>> losses = generator(x).mean(), critic(x).mean()
    >>> with both:
    ...     for loss in losses:
    ...         loss.backward()
    >>> critic.bias.grad  # the sum over the ranks
    tensor([0.2500, 0.2500, 0.2500, 0.2500])
    """

    def __init__(self, *models: nn.Module):
        self._reductions = [required_reduction("ConcurrentReductions", model) for model in models]
        if len({id(reduction) for reduction in self._reductions}) < len(models):
            raise ValueError(
                "ConcurrentReductions: two of the models are submodules of one parallelized "
                "module, whose gradients are reduced together; call parallelize for each of the "
                "two models"
            )
        self._purposes = [f"gradients {number}" for number in range(len(models))]
        """For each model the purpose of its communicators, the same on all ranks."""
        self._packed: list[list[tuple[Bucket, Request | None]]] = [[] for _ in models]
        """For each model the buckets whose gradients are packed, each with the request of its sum,
        if started."""
        for purpose, reduction in zip(self._purposes, self._reductions, strict=True):
            grid = reduction.grid
            for comm in reduction.make_communicators(purpose):
                # A transport may connect a communicator's ranks at its first use, where the ranks
                # wait for each other. First uses in different orders would deadlock.
                grid.transport.all_reduce(torch.zeros(1, device=grid.device), comm).wait()

    def __enter__(self) -> None:
        for number, reduction in enumerate(self._reductions):
            reduction.wait()
            reduction.buckets.begin()
            reduction.reduce_hook = partial(self._leave_packed, number)
            reduction.grid.journal.any_order += 1

    def _leave_packed(self, number: int, bucket: Bucket) -> None:
        """Start to sum a bucket of model `number`, unless sums start at the end of the context.

        This is the `ReduceHook` of the model.
        """
        reduction, request = self._reductions[number], None
        if not reduction.starts_at_the_end:
            request = reduction.start_sum(bucket, self._purposes[number])
        self._packed[number].append((bucket, request))

    def __exit__(self, *_: object) -> None:
        # After an error as well: other ranks may have started reductions that this rank has not.
        for number, reduction in enumerate(self._reductions):
            reduction.grid.journal.any_order -= 1
            reduction.start_rest()
            reduction.reduce_hook = None
            for bucket, request in self._packed[number]:
                if request is None:
                    request = reduction.start_sum(bucket, self._purposes[number])
                bucket.request = request
            self._packed[number].clear()
        for reduction in self._reductions:
            reduction.wait()


# Gradient lag: a step uses the gradient of an earlier step, so its reduction has time to finish.
#
# Kurth et al., "Exascale Deep Learning for Climate Analytics", SC 2018. With a lag of 1 the weights
# follow w(t+1) = w(t) - lr * g(w(t-1)).


_LAGGED = "lagged gradients"
"""The purpose of the communicators for late gradients, whose sums overlap other sums."""

_Sums: TypeAlias = Callable[[], list[Tensor | None]]


class GradientLag:
    """Give the optimizer gradients of earlier steps, so that later steps overlap their reduction.

    On a quadratic the largest stable learning rate is 1/2 of the one without lag for a lag of 1,
    0.309 for 2 and 0.223 for 3; so a lag pays if the reduction takes long compared with a step.
    Each step of lag takes the memory of one more gradient.

    Raises ValueError if the model is not parallelized, or a number is out of its range.

    Parameters
    ----------
    model: a parallelized module.
    lag: the number of steps by which gradients are late.
    warmup_steps: the number of first steps without lag, in which gradients change most.
    cooldown_steps: the number of last steps without lag, of `total_steps`. Late gradients that are
        left over when the cool-down begins are dropped.

    Examples
    --------
    >>> grid = dc.ProcessGrid(sample=2)
    >>> model = dc.parallelize(nn.Linear(4, 1), grid)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    >>> late = dc.training.GradientLag(model, lag=1)
    >>> x = dc.distribute_tensor(torch.ones(2, 4), grid)
    >>> for _ in range(3):
    ...     late.backward(model(x).square().mean())
    ...     optimizer.step()
    >>> state = late.state_dict()  # for a checkpoint
    >>> late.load_state_dict(state)
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        lag: int = 1,
        warmup_steps: int = 0,
        cooldown_steps: int = 0,
        total_steps: int | None = None,
    ):
        reduction = required_reduction("GradientLag", model)
        check_count("GradientLag", "lag", lag, 1)
        check_count("GradientLag", "warmup_steps", warmup_steps, 0)
        check_count("GradientLag", "cooldown_steps", cooldown_steps, 0)
        if total_steps is not None:
            check_count("GradientLag", "total_steps", total_steps, warmup_steps + cooldown_steps)
        elif cooldown_steps:
            raise ValueError(
                "GradientLag: the cool-down is at the end of training; pass total_steps="
            )
        self.lag, self.warmup_steps = lag, warmup_steps
        self._cooldown = None if total_steps is None else total_steps - cooldown_steps
        """The first step of the cool-down."""
        self._model, self._reduction = model, reduction
        reduction.make_communicators(_LAGGED)
        self._steps = 0
        self._late: deque[_Sums] = deque()
        """Functions that wait for the sums of the last steps and return them, the oldest first."""

    def backward(self, loss: Tensor) -> None:
        """Compute gradients, in place of `loss.backward()`, and set `grad` to late gradients.

        All ranks of the grid call it together, once before each step of the optimizer. Earlier
        values of `grad` are dropped, as by `zero_grad()`. In the first steps with a lag there is no
        late gradient yet: gradients are None, and optimizers do not change the parameters.
        """
        self._model.zero_grad()
        step, self._steps = self._steps, self._steps + 1
        if step < self.warmup_steps or (self._cooldown is not None and step >= self._cooldown):
            self._late.clear()
            loss.backward()  # type: ignore[no-untyped-call]
            return
        with no_sync(self._model):
            loss.backward()  # type: ignore[no-untyped-call]
        self._late.append(_start_sums(self._reduction))
        late: list[Tensor | None] = [None] * len(self._reduction.parameters)
        if len(self._late) > self.lag:
            late = self._late.popleft()()
        for p, gradient in zip(self._reduction.parameters, late, strict=True):
            p.set_sum(gradient)

    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps taken, and the late gradients; waits for their sums.

        For a sharded parameter the state holds this rank's block.
        """
        return {"steps": self._steps, "late": [sums() for sums in self._late]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state that `state_dict` returned on this rank.

        Raises ValueError if the state belongs to other parameters, or to another grid.
        """
        leaves = [p.leaf for p in self._reduction.parameters]
        saved: list[_Sums] = []
        for late in state["late"]:
            if len(late) != len(leaves) or any(
                g is not None and g.shape != p.shape for g, p in zip(late, leaves, strict=True)
            ):
                raise ValueError(
                    "GradientLag: the saved gradients belong to other parameters; load the state "
                    "of the same model on the same grid"
                )
            here = [
                None if g is None else g.to(self._reduction.grid.device, copy=True) for g in late
            ]
            saved.append(partial(list, here))
        self._steps, self._late = int(state["steps"]), deque(saved)


def _start_sums(reduction: GradientReduction) -> _Sums:
    """Start to sum the gradients of a backward pass within `no_sync`.

    Returns a function that waits for the sums, and returns a list with the sum of each parameter's
    gradients, or None if no rank has a gradient. Collective.
    """
    grid = reduction.grid
    under_way: list[tuple[Bucket, PackedGradients, Request]] = []
    for bucket in reduction.buckets:
        packed = bucket.pack()
        comm = grid.communicator(bucket.axes, _LAGGED)
        under_way.append((bucket, packed, grid.transport.all_reduce(packed.flat, comm)))
    sums: list[Tensor | None] = [None] * len(reduction.parameters)

    def wait() -> list[Tensor | None]:
        while under_way:
            bucket, packed, request = under_way.pop(0)
            request.wait()
            counts = bucket.counts(packed)
            for p, view, count in zip(bucket.members, packed.views, counts, strict=True):
                sums[p.number] = view if count else None
        return sums

    return wait
