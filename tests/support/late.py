"""A GPU on the CPU that is as late as can be: it works only when somebody waits for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from torch import Tensor

GARBAGE = 77
"""The content of memory that nothing has been copied to."""


class Late:
    """A stand-in for `transport.staged.PinnedCopies` that copies as late as it can."""

    def __init__(self) -> None:
        self._work: list[Callable[[], object]] = []

    def later(self, work: Callable[[], object]) -> None:
        """Give the GPU something to do."""
        self._work.append(work)

    def synchronize(self) -> None:
        """Do all the work: `Late` is the only event that there is."""
        while self._work:
            self._work.pop(0)()

    def now(self) -> Late:
        return self

    def host(self, like: Tensor) -> Tensor:
        return like.new_full(like.shape, GARBAGE)

    def to_host(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], Late]:
        hosts = [self.host(t) for t in tensors]
        for host, tensor in zip(hosts, tensors, strict=True):
            self.later(lambda host=host, tensor=tensor: host.copy_(tensor))
        return hosts, self

    def to_device(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        for host, tensor in pairs:
            tensor.copy_(host)
