"""Exchanges of data between ranks, each with its adjoint, for rules that users write.

See docs/howto/extending.md. The gradient of a replicated value is the sum over its replicas. The
adjoint of a gather is therefore an accumulation, and the adjoint of a sum over ranks is the same
sum.
"""

from distconv.comm.collectives import all_gather_with_grad as parts_of
from distconv.comm.collectives import all_reduce_with_grad as sum_over
from distconv.comm.collectives import broadcast, replicate
from distconv.comm.collectives import unreplicate as share
from distconv.comm.transfer import accumulate, gather

__all__ = ["accumulate", "broadcast", "gather", "parts_of", "replicate", "share", "sum_over"]
