"""A model of which every replica of ranks has other samples."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from distconv.comm.collectives import broadcast
from distconv.grid.process_grid import ProcessGrid
from distconv.lbann.strategy import ParallelStrategy
from distconv.model.gradient_reduction import required_reduction
from distconv.model.parallelize import no_sync, parallelize

_OPTIONS = frozenset(
    (
        *("dim", "broadcast_buffers", "init_sync"),
        *("bucket_cap_mb", "find_unused_parameters", "check_reduction", "static_graph"),
        *("gradient_as_bucket_view", "skip_all_reduce_unused_params"),
    )
)
"""Options of DistributedDataParallel that change no numbers, and nothing here."""


class DistConvDDP(nn.Module):
    """A module on DCTensors whose gradients are averaged over the replicas.

    When `backward()` returns, each parameter has the sum of its gradients on all ranks, divided by
    `grad_reduction_factor`. Before each forward pass buffers become those of rank 0. All ranks make
    and call it together.

    Parameters
    ----------
    module: any module; it becomes `.module`, so keys of the state_dict begin with "module.".
    grad_reduction_factor: the number of replicas when not given.
    parallel_strategy: how the ranks are arranged.
    device_ids, output_device, options: options of DistributedDataParallel without effect on
        numbers; they are not used.

    Raises
    ------
    ValueError
        Where both factor and strategy are missing, or the factor is not positive.
    TypeError
        For another option, and for a module that is parallelized or wrapped already.
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: object = None,
        output_device: object = None,
        *,
        grad_reduction_factor: float | None = None,
        parallel_strategy: ParallelStrategy | None = None,
        **options: Any,
    ):
        super().__init__()
        unknown = sorted(options.keys() - _OPTIONS)
        if unknown:
            raise TypeError(f"DistConvDDP: {', '.join(unknown)} is not supported; leave it out")
        factor = grad_reduction_factor
        if factor is None and parallel_strategy is not None:
            factor = parallel_strategy.ddp_ranks
        if factor is None or factor <= 0:
            raise ValueError(
                f"DistConvDDP: grad_reduction_factor={factor}; give a number above 0, or "
                "parallel_strategy"
            )
        self._job = ProcessGrid(sample=-1) if parallel_strategy is None else parallel_strategy.job
        self.module = parallelize(module, self._job)
        self.grad_reduction_factor = factor
        required_reduction("DistConvDDP", module).average(factor)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the result of the module for DCTensors."""
        for buffer in self.module.buffers():
            broadcast(buffer, self._job)
        return self.module(*args, **kwargs)

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which gradients stay on their ranks, to be added up later."""
        return no_sync(self.module)
