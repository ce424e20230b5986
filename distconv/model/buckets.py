"""Gradients that live side by side in memory, and are added up over ranks where they lie."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor

from distconv.grid.process_grid import ProcessGrid
from distconv.model.bucket_memory import BucketMemory, memory_of_tensor, tensor_on_memory
from distconv.ops.support.constants import constant
from distconv.transport.interface import Request


class _GradientSlot:
    """Where in the memory of a bucket the gradient of a parameter lives.

    Each gradient that lives there gets a storage of its own, made of a slice of the memory; so it
    is known whether anybody still uses it, or any view of it, when the parameter has dropped it.
    """

    def __init__(self, p: Tensor, start: int):
        self.shape, self.strides, self.dtype = p.shape, _strides(p), p.dtype
        self.elements = slice(start, start + p.numel())
        self.offset = start * p.element_size()
        """Where it begins, in bytes."""
        self.flat = self.strides == (1,)
        self.slice: ReferenceType[BucketMemory] | None = None
        self.here = False
        """Whether the slice belongs to the present memory, not to an earlier one."""

    @property
    def in_use(self) -> bool:
        """Return whether anybody uses the last gradient that has lived here."""
        return self.slice is not None and self.slice() is not None


class Bucket:
    """Parameters whose gradients share memory and travel together.

    A gradient moves in when autograd has made it, and has become the sum over the ranks when the
    reduction has finished, without being copied again. The memory lives as long as a gradient in
    it, as in serial torch: no longer than to `zero_grad()`.

    Serial torch gives a parameter whose gradient was set to None another tensor, and a program that
    has kept the old one keeps its values. So a place is not used again while anybody holds the
    gradient that was there: the bucket takes fresh memory then, and the gradient stays outside, to
    be copied in and out. So does a gradient that the program has set itself.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        comm: Any,
        start_sum: Callable[[Tensor], Request] | None = None,
    ):
        self.parameters = parameters
        self.comm = comm
        """The ranks over which the gradients are added up."""
        self._start_sum = start_sum
        """Starts to add up a vector over them, where that is not the carrier's all-reduce."""
        starts = accumulate((p.numel() for p in parameters), initial=0)
        self._places = [
            _GradientSlot(p, start) for p, start in zip(parameters, starts, strict=False)
        ]
        # A number for each parameter, behind all of them, says how many ranks have a gradient.
        self._elements = sum(p.numel() for p in parameters) + len(parameters)
        self._memory: BucketMemory | None = None
        self._last: ReferenceType[BucketMemory] | None = None
        self._address = 0
        self._pass = -1
        self._used: list[bool] = []
        """For each parameter, whether this rank has added a part of its gradient."""
        self.uneven: dict[int, int] = {}
        """To whose last sum some ranks have added nothing: the place of each parameter, and how
        many have added something. Of a GPU only where this rank had to read the counts."""
        self._request: Request | None = None

    @property
    def elements(self) -> int:
        """Return the number of elements that travel."""
        return self._elements

    @property
    def under_way(self) -> bool:
        """Return whether the gradients are being added up."""
        return self._request is not None

    def prepare(self, backward_pass: int) -> None:
        """Take memory in which only gradients are in use, before a backward pass writes to it."""
        if self._pass == backward_pass:
            return
        self._pass = backward_pass
        self._memory = None if self._last is None else self._last()
        if self._memory is None or any(
            place.here and place.in_use and not self._inside(p, place)
            for p, place in zip(self.parameters, self._places, strict=True)
        ):
            p = self.parameters[0]
            flat = torch.empty(self._elements, dtype=p.dtype, device=p.device)
            self._memory = memory_of_tensor(flat)
            self._last = ref(self._memory)
            self._address = flat.data_ptr()
            for place in self._places:
                place.here = False

    def adopt_gradient(self, i: int) -> None:
        """Let the gradient of a parameter live here, which autograd has just made for it."""
        p, place = self.parameters[i], self._places[i]
        gradient = p.grad
        if gradient is None or gradient.dtype != place.dtype or not p.numel() or place.in_use:
            return
        memory = self._slice(place)
        place.slice, place.here = ref(memory), True
        p.grad = _tensor(memory, place).copy_(gradient)

    def start(self, parts: Sequence[bool], grid: ProcessGrid) -> None:
        """Start adding up; `parts` tells of each parameter whether its gradient is a rank's part.

        A gradient that is no part is the same on all ranks, and counted on the first rank only.
        """
        self._used = used = []
        for p, place, part in zip(self.parameters, self._places, parts, strict=True):
            gradient = p.grad
            used.append(part and gradient is not None)
            if gradient is None or not (part or self.comm.rank == 0):
                self._view(place).zero_()
            elif not self._inside(p, place):
                self._view(place).copy_(gradient)
        flat = self._flat()
        flat[-len(used) :] = constant(flat.device, tuple(used), flat.dtype)
        if self._start_sum is None:
            self._request = grid.transport.all_reduce(flat, self.comm)
        else:
            self._request = self._start_sum(flat)

    def finish(self) -> bool:
        """Wait for the sum, and copy it to gradients outside; return whether one was under way."""
        if self._request is None:
            return False
        self._request.wait()
        ranks = [] if self._flat().device.type != "cpu" else self._ranks()
        for i, (p, place) in enumerate(zip(self.parameters, self._places, strict=True)):
            if self._inside(p, place):
                continue
            if not self._used[i]:
                ranks = ranks or self._ranks()
                if not ranks[i]:
                    continue
            if p.grad is None:
                p.grad = self._view(place).clone()
            else:
                p.grad.copy_(self._view(place))
        self.uneven = {i: n for i, n in enumerate(ranks) if 0 < n < self.comm.size}
        self._request = self._memory = None
        self._pass = -1
        return True

    def _ranks(self) -> list[int]:
        """Return how many ranks have added a part of each gradient; it waits for a GPU."""
        return [int(n.real) for n in self._flat()[-len(self.parameters) :].tolist()]

    def _inside(self, p: Tensor, place: _GradientSlot) -> bool:
        gradient = p.grad
        return (
            gradient is not None
            and gradient.data_ptr() == self._address + place.offset
            and gradient.stride() == place.strides
        )

    def _flat(self) -> Tensor:
        assert self._memory is not None
        return tensor_on_memory(self._memory, self._places[0].dtype)

    def _slice(self, place: _GradientSlot) -> BucketMemory:
        assert self._memory is not None
        return self._memory[place.elements]

    def _view(self, place: _GradientSlot) -> Tensor:
        return _tensor(self._slice(place), place)


def fill_buckets(
    parameters: Sequence[tuple[Tensor, tuple[str, ...]]], bucket_bytes: int
) -> list[tuple[tuple[str, ...], list[Tensor]]]:
    """Return which parameters share a bucket, in the order in which backward passes fill them.

    The last parameters come first. A bucket is full when it has `bucket_bytes`.

    Parameters
    ----------
    parameters: each with the grid axes over which its gradient is summed; those of one bucket have
        the same, and one type.
    """
    buckets = []
    filling: dict[tuple[tuple[str, ...], torch.dtype], list[Tensor]] = {}
    for p, axes in reversed(parameters):
        chosen = filling.setdefault((axes, p.dtype), [])
        chosen.append(p)
        if sum(q.numel() * q.element_size() for q in chosen) >= bucket_bytes:
            buckets.append((axes, filling.pop((axes, p.dtype))))
    return buckets + [(axes, chosen) for (axes, _), chosen in filling.items()]


def _strides(p: Tensor) -> tuple[int, ...]:
    """Return the strides of a gradient: the parameter's own if without gaps, else row by row."""
    own = p.stride()
    dense: Tensor = torch.empty_like(p, device="meta")
    return own if dense.stride() == own else torch.empty(p.shape, device="meta").stride()


def _tensor(memory: BucketMemory, place: _GradientSlot) -> Tensor:
    flat = tensor_on_memory(memory, place.dtype)
    return flat if place.flat else flat.as_strided(place.shape, place.strides)
