"""Gradient lag: a step uses the gradient of an earlier step, so its reduction has time to finish.

Kurth et al., "Exascale Deep Learning for Climate Analytics", SC 2018. With a lag of 1 the weights
follow w(t+1) = w(t) - lr * g(w(t-1)).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

from torch import Tensor, nn

from distconv.grid.process_grid import ProcessGrid
from distconv.model.gradient_reduction import required_reduction
from distconv.model.parallelize import no_sync
from distconv.training.checks import check_count
from distconv.training.gradient_messages import GradientPacking

_PURPOSE = "lagged gradients"

_Sums: TypeAlias = Callable[[], list[Tensor | None]]


class GradientLag:
    """Give the optimizer gradients of earlier steps, so that later steps hide their reduction.

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
