"""Movements of data between ranks, each with its adjoint, for rules of one's own.

See docs/extending.md. The gradient of a replicated value is the sum over its replicas. So a gather
is undone by accumulation, and a sum over ranks by the same sum.
"""

from distconv.comm.collectives import broadcast, parts_of, sum_over
from distconv.comm.replication import replicate, share
from distconv.comm.transfer import accumulate, gather

__all__ = ["accumulate", "broadcast", "gather", "parts_of", "replicate", "share", "sum_over"]
