"""Sums of gradients in a dry run, in the buckets that a parallelized module fills."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from distconv.model.buckets import fill_buckets
from distconv.model.gradient_reduction import axes_of_sum
from distconv.planning.counted_messages import Request
from distconv.planning.dry_run import DryRunGrid
from distconv.planning.recorder import Recorder
from distconv.planning.recording import Place


class DryGradients:
    """Buckets of gradients as a parallelized module fills and adds them up (`model.buckets`)."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        grid: DryRunGrid,
        bucket_bytes: int,
        recorder: Recorder,
    ):
        self._grid, self._recorder = grid, recorder
        trained = [(p, axes_of_sum(p, grid)) for p in parameters if p.requires_grad]
        self._buckets = fill_buckets(trained, bucket_bytes)
        self._missing = [len(chosen) for _, chosen in self._buckets]
        self._place_of = {
            p: (b, i) for b, (_, chosen) in enumerate(self._buckets) for i, p in enumerate(chosen)
        }
        self._memory: dict[int, Tensor] = {}
        self._started = 0
        self._requests: list[Request] = []
        self._hooks = [p.register_post_accumulate_grad_hook(self._accumulated) for p, _ in trained]

    def _accumulated(self, p: Tensor) -> None:
        assert p.grad is not None
        across = " across ranks" if self._grid.size > 1 else ""
        self._recorder.work(f"parameter{across}", Place("gradients", "backward"))
        if self._grid.size == 1:
            self._recorder.memory.turn_into(p.grad, "gradients")
            return
        b, i = self._place_of[p]
        _, chosen = self._buckets[b]
        if b not in self._memory:
            elements = sum(q.numel() for q in chosen) + len(chosen)
            self._memory[b] = torch.empty(elements, dtype=p.dtype, device=p.device)
            self._recorder.memory.turn_into(self._memory[b], "gradients")
        start = sum(q.numel() for q in chosen[:i])
        place = self._memory[b][start : start + p.numel()].view(p.shape)
        p.grad = place.copy_(p.grad)
        self._missing[b] -= 1
        while self._started < len(self._buckets) and not self._missing[self._started]:
            self._start_next()

    def _start_next(self) -> None:
        axes, _ = self._buckets[self._started]
        flat = self._memory.get(self._started)
        self._started += 1
        if flat is not None:
            group = self._grid.communicator(axes, "gradients")
            self._requests.append(self._grid.transport.all_reduce(flat, group))  # type: ignore[arg-type]

    def finish(self) -> None:
        """Start what is left, and wait for all, as at the end of `backward()`."""
        while self._grid.size > 1 and self._started < len(self._buckets):
            self._start_next()
        for request in self._requests:
            request.wait()
        self._memory.clear()

    def remove(self) -> None:
        """Take the hooks off the parameters."""
        for hook in self._hooks:
            hook.remove()
