"""`DistConvDDP`: a module whose gradients are averaged over replicas of one or several ranks."""

from __future__ import annotations

from contextlib import AbstractContextManager
from math import inf
from typing import Any

from torch import nn

from distconv.comm.collectives import broadcast
from distconv.grid.process_grid import ProcessGrid
from distconv.lbann.dc_tensor import ParallelStrategy, check_strategy
from distconv.model.gradient_reduction import required_reduction
from distconv.model.parallelize import no_sync, parallelize

_OPTIONS = frozenset(
    (
        *("dim", "broadcast_buffers", "init_sync"),
        *("bucket_cap_mb", "find_unused_parameters", "check_reduction", "static_graph"),
        *("gradient_as_bucket_view", "skip_all_reduce_unused_params"),
    )
)
"""Options of DistributedDataParallel that do not change results, and have no effect here."""


class DistConvDDP(nn.Module):
    """A module on DCTensors whose gradients are averaged over the replicas.

    When `backward()` returns, each parameter has the sum of its gradients on all ranks, divided by
    `grad_reduction_factor`. Before each forward pass buffers become those of rank 0. All ranks
    create and call it together.

    Parameters
    ----------
    module: any module; it becomes `.module`, so keys of the state_dict begin with "module.".
    grad_reduction_factor: the divisor of the summed gradients; by default the number of replicas.
    parallel_strategy: how the ranks are arranged.
    device_ids, output_device, options: options of DistributedDataParallel without effect on
        numbers; they are not used.

    Raises
    ------
    ValueError
        On every rank, if both factor and strategy are missing, the factor is no positive number
        or differs between ranks, or the module is parallelized already.
    TypeError
        For another option, another strategy, and a module that is wrapped already.

    Examples
    --------
    >>> from distconv.lbann import DCTensor, DistConvDDP, ParallelStrategy
    >>> strategy = ParallelStrategy(2, 2, "cpu")
    >>> model = DistConvDDP(nn.Conv2d(3, 4, 3, padding=1), parallel_strategy=strategy)
    >>> y = model(DCTensor.distribute(torch.ones(2, 3, 8, 8), strategy))
    >>> y.square().mean().backward()
    >>> tuple(y.shape), tuple(model.module.weight.grad.shape)
    ((2, 4, 8, 8), (4, 3, 3, 3))
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
        if parallel_strategy is not None:
            check_strategy(parallel_strategy, "DistConvDDP")
        self._job = ProcessGrid(sample=-1) if parallel_strategy is None else parallel_strategy.job
        factor = grad_reduction_factor
        if factor is None and parallel_strategy is not None:
            factor = parallel_strategy.ddp_ranks
        factors = self._job.all_gather_object(factor)
        for each in factors:
            number = isinstance(each, int | float) and 0 < each < inf
            if not number or each != factors[0]:
                raise ValueError(
                    f"DistConvDDP: grad_reduction_factor is {factors} on the ranks; pass the same "
                    "number above 0 on every rank, or parallel_strategy"
                )
        assert factor is not None
        self.module = parallelize(module, self._job)
        self.grad_reduction_factor = factor
        required_reduction("DistConvDDP", module).divisor = factor

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Copy rank 0's buffers to all ranks, and return the result of the module. Collective."""
        for buffer in self.module.buffers():
            broadcast(buffer, self._job)
        return self.module(*args, **kwargs)

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which backward passes keep gradients on their ranks, without a sum.

        The next backward pass outside the context sums all gradients that were kept.
        """
        return no_sync(self.module)
