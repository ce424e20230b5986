"""Gradients outside of the backward pass: sent at once, with a lag, or by several models."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import TracebackType
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from distconv.grid.process_grid import ProcessGrid
from distconv.model.gradient_reduction import axes_of_sum, required_reduction
from distconv.model.parallelize import no_sync
from distconv.ops.support.operands import constant
from distconv.tensor.base import shards_of
from distconv.training.checks import check_count

# Messages that hold all gradients of a model, sent after a backward pass and not within it.


class GradientMessage(NamedTuple):
    """Gradients of one type to be summed over the same grid axes, in one vector `flat`.

    Behind the elements, `flat` has a number for each gradient: 1 if this rank has it, else 0; after
    the sum, the number of ranks that have it. `places` has the numbers and shapes of the
    parameters.
    """

    axes: tuple[str, ...]
    flat: Tensor
    places: list[tuple[int, torch.Size]]


class GradientPacking:
    """Packs this rank's gradients of a parallelized module into messages, and unpacks their sums.

    All ranks of the grid make it together. `purpose` names the communicators for the sums, so that
    sums of different purposes do not share a communicator.
    """

    def __init__(self, module: nn.Module, grid: ProcessGrid, purpose: str):
        self._parameters = list(module.parameters())
        self._axes = [axes_of_sum(p, grid) for p in self._parameters]
        self._grid = grid
        for axes in dict.fromkeys(self._axes):
            # All ranks make it together, whichever parameters each of them trains first.
            grid.communicator(axes, purpose)

    @property
    def leaves(self) -> list[Tensor]:
        """Return the leaves of autograd: each parameter, or this rank's block of a sharded one."""
        return shards_of(self._parameters)

    def pack(self) -> list[GradientMessage]:
        """Return the gradients, copied into as few messages as possible; zeros in place of None."""
        kinds: dict[tuple[tuple[str, ...], torch.dtype], list[int]] = defaultdict(list)
        leaves = self.leaves
        for i, p in enumerate(leaves):
            if p.requires_grad:
                kinds[self._axes[i], p.dtype].append(i)
        messages = []
        for (axes, dtype), numbers in kinds.items():
            here = [leaves[i].grad is not None for i in numbers]
            flags = constant(self._grid.device, tuple(here), dtype)
            flat = torch.cat([*(_part(leaves[i]).reshape(-1) for i in numbers), flags])
            places = [(i, leaves[i].shape) for i in numbers]
            messages.append(GradientMessage(axes, flat, places))
        return messages

    def unpack(self, messages: Iterable[GradientMessage]) -> list[Tensor | None]:
        """Return the summed gradient of each leaf; None if no rank has a gradient."""
        sums: list[Tensor | None] = [None] * len(self._parameters)
        for _, flat, places in messages:
            sizes = [shape.numel() for _, shape in places]
            *pieces, flags = flat.split([*sizes, len(places)])
            for (i, shape), piece, ranks in zip(places, pieces, flags.tolist(), strict=True):
                sums[i] = piece.view(shape) if ranks else None
        return sums


def _part(p: Tensor) -> Tensor:
    return torch.zeros_like(p, requires_grad=False) if p.grad is None else p.grad


# Reductions of the gradients of several models at once, in any order of backward passes.


class ConcurrentReductions:
    """A context in which the gradients of several models are reduced at the same time.

    The reductions of each model have communicators of their own, like the thread teams of the Cray
    PE ML plug-in, so each rank may call the backward passes in an order of its own:

        both = ConcurrentReductions(generator, critic)
        with both:
            loss_of_generator.backward()
            loss_of_critic.backward()
        # here the gradients are the sums

    Within the context backward passes return before the sums are complete: do not use gradients
    before its end, which waits for all of them. Between GPUs all reductions start at the end, in
    the order of the models. Each model takes part in one backward pass. Forward passes, and
    backward passes of models with partitioned samples, must come in one order on all ranks, as
    always.

    Raises ValueError if a model is not parallelized, or two are parts of one.

    Parameters
    ----------
    models: parallelized modules. All ranks make the context together, with the models in one order.
    """

    def __init__(self, *models: nn.Module):
        self._reductions = [required_reduction("ConcurrentReductions", model) for model in models]
        if len({id(reduction) for reduction in self._reductions}) < len(models):
            raise ValueError(
                "ConcurrentReductions: two of the models are parts of one parallelized module, "
                "whose gradients travel together; call parallelize for each of them"
            )
        for number, reduction in enumerate(self._reductions):
            reduction.travel_apart(number)

    def __enter__(self) -> None:
        for reduction in self._reductions:
            reduction.hold()
        for reduction in self._reductions:
            reduction.grid.journal.any_order += 1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for reduction in self._reductions:
            reduction.grid.journal.any_order -= 1
        # After an error, too: other ranks may have started reductions that this one has not.
        for reduction in self._reductions:
            reduction.start_held()
        for reduction in self._reductions:
            reduction.settle()


# Gradient lag: a step uses the gradient of an earlier step, so its reduction has time to finish.
#
# Kurth et al., "Exascale Deep Learning for Climate Analytics", SC 2018. With a lag of 1 the weights
# follow w(t+1) = w(t) - lr * g(w(t-1)).


_PURPOSE = "lagged gradients"

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
        left over when they begin are dropped.
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
                "GradientLag: the cool-down is at the end; say when that is by total_steps="
            )
        self.lag, self.warmup_steps = lag, warmup_steps
        self._cooldown = None if total_steps is None else total_steps - cooldown_steps
        """The first step of the cool-down."""
        self._model, self._reduction, self._grid = model, reduction, reduction.grid
        self._packing = GradientPacking(model, self._grid, _PURPOSE)
        self._steps = 0
        self._late: deque[_Sums] = deque()
        """Functions that return the gradients of the last steps, the oldest first."""

    def backward(self, loss: Tensor) -> None:
        """Compute gradients, in place of `loss.backward()`, and put late ones into `grad`.

        All ranks of the grid call it together, once before each step of the optimizer. Earlier
        values of `grad` are dropped, as by `zero_grad()`. In the first steps with a lag there is no
        late gradient yet: gradients are None, and optimizers leave the parameters as they are.
        """
        self._model.zero_grad()
        step, self._steps = self._steps, self._steps + 1
        if step < self.warmup_steps or (self._cooldown is not None and step >= self._cooldown):
            self._late.clear()
            loss.backward()  # type: ignore[no-untyped-call]
            return
        with no_sync(self._model):
            loss.backward()  # type: ignore[no-untyped-call]
        leaves = self._packing.leaves
        self._late.append(_reduced(self._packing, self._grid))
        late = self._late.popleft()() if len(self._late) > self.lag else [None] * len(leaves)
        self._reduction.give(late)

    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps taken, and the late gradients; waits for their sums.

        For a sharded parameter the state holds this rank's block.
        """
        return {"steps": self._steps, "late": [sums() for sums in self._late]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state that `state_dict` returned on this rank.

        Raises ValueError if it belongs to other parameters, or another grid.
        """
        leaves = self._packing.leaves
        saved: list[_Sums] = []
        for late in state["late"]:
            if len(late) != len(leaves) or any(
                g is not None and g.shape != p.shape for g, p in zip(late, leaves, strict=True)
            ):
                raise ValueError(
                    "GradientLag: the saved gradients belong to other parameters; load the state "
                    "of the same model on the same grid"
                )
            here = [None if g is None else g.to(self._grid.device, copy=True) for g in late]
            saved.append(partial(list, here))
        self._steps, self._late = int(state["steps"]), deque(saved)


def _reduced(packing: GradientPacking, grid: ProcessGrid) -> _Sums:
    """Start to reduce gradients; return a function that waits for the sums and returns them."""
    messages = packing.pack()
    requests = [
        grid.transport.all_reduce(message.flat, grid.communicator(message.axes, _PURPOSE))
        for message in messages
    ]

    def wait() -> list[Tensor | None]:
        while requests:
            requests.pop(0).wait()
        return packing.unpack(messages)

    return wait
