"""The kernels that a program launches, counted by torch's dispatcher."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from distconv.planning.dry_run import DryTransport


class _Kernels(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if not func.is_view and name not in _NO_KERNELS:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


_NO_KERNELS = {
    *("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"),
    *("detach", "as_strided_", "_unsafe_view", "resize_", "set_"),
}
"""Operators that allocate memory or change how it is read."""


def kernels_of(run: Callable[[], object]) -> Counter[str]:
    """Return how often `run` launches each kernel, after two calls that fill caches.

    Views and allocations do not count, nor does the memory of messages of a dry run, which is
    zeroed on CPUs only.
    """
    before = DryTransport.empty
    DryTransport.empty = lambda transport, shape, like: like.new_empty(shape)  # type: ignore[method-assign]
    try:
        run()
        run()
        with _Kernels() as seen:
            run()
    finally:
        DryTransport.empty = before  # type: ignore[method-assign]
    return seen.counts
