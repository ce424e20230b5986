"""A graph of a device on a CPU: what torch's dispatcher and carriers do is recorded, and repeated.

A recording does not happen, as far as it writes: what it has written to is as before when it ends.
A replay makes the same calls on the same memory. What this cannot tell of real graphs: memory that
is used again for another tensor, kernels that may not be captured, streams that run at will.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar
from weakref import WeakSet

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from distconv.transport.interface import Request
from distconv.transport.torch import TorchStreamTransport


class RecordedGraph(TorchDispatchMode):
    """Stands for torch.accelerator.Graph."""

    active: RecordedGraph | None = None
    """The one that records now."""
    alive: ClassVar[WeakSet[RecordedGraph]] = WeakSet()

    def __init__(self, capture_error_mode: str = "default") -> None:
        super().__init__()
        RecordedGraph.alive.add(self)
        self.calls: list[Callable[[], object]] = []
        self._before: dict[int, tuple[Tensor, Tensor]] = {}
        self.paused = False

    def __enter__(self) -> RecordedGraph:
        RecordedGraph.active = self
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        RecordedGraph.active = None
        for storage, values in self._before.values():
            storage.copy_(values)

    def replay(self) -> None:
        for call in self.calls:
            call()

    def reset(self) -> None:
        self.calls.clear()

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Record nothing of torch's in the context."""
        self.paused = True
        yield
        self.paused = False

    def keep(self, x: Tensor) -> None:
        """Remember the memory of a tensor that is about to be written to."""
        storage = x.untyped_storage()
        if storage._cdata not in self._before:
            whole = torch.empty(0, dtype=torch.uint8).set_(storage)
            self._before[storage._cdata] = whole, whole.clone()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.paused:
            return func(*args, **kwargs)
        names = [(a, args[i]) for i, a in enumerate(func._schema.arguments) if i < len(args)]
        names += [(a, kwargs[a.name]) for a in func._schema.arguments if a.name in kwargs]
        for argument, value in names:
            written = argument.alias_info is not None and argument.alias_info.is_write
            if written or argument.name.startswith("running_"):  # of which norms do not tell
                for x in filter(lambda x: isinstance(x, Tensor), tree_leaves(value)):
                    self.keep(x)
        # Shapes and strides as they are now: some functions change those of a tensor itself.
        aliases, options = tree_map_only(Tensor, Tensor.detach, (args, kwargs))
        made = func(*args, **kwargs)
        given = set(map(id, tree_leaves((args, kwargs))))
        apart = not any(r.alias_info for r in func._schema.returns)
        fresh = [
            x.detach() if isinstance(x, Tensor) and apart and id(x) not in given else None
            for x in tree_leaves(made)
        ]

        def again() -> None:
            for x, y in zip(fresh, tree_leaves(func(*aliases, **options)), strict=True):
                if x is not None:
                    x.copy_(y)

        self.calls.append(again)
        return made


class RecordedCarrier(TorchStreamTransport):
    """A carrier whose messages a graph records, and starts anew when it is replayed."""

    def exchange(self, arriving: Any, leaving: Any, tag: int) -> Request:
        return self._noted(super().exchange, [t for _, t in arriving], arriving, leaving, tag)

    def all_reduce(self, tensor: Tensor, group: Any) -> Request:
        return self._noted(super().all_reduce, [tensor], tensor, group)

    def all_gather(self, tensor: Tensor, group: Any) -> Tensor:
        gather, graph = super().all_gather, RecordedGraph.active
        if graph is None:
            return gather(tensor, group)
        with graph.pause():
            gathered = gather(tensor, group)
        graph.calls.append(lambda: gathered.copy_(gather(tensor, group)))
        return gathered

    def broadcast(self, tensor: Tensor, group: Any) -> None:
        broadcast, graph = super().broadcast, RecordedGraph.active
        if graph is not None:
            graph.keep(tensor)
            graph.calls.append(lambda: broadcast(tensor, group))
        with graph.pause() if graph else nullcontext():
            broadcast(tensor, group)

    def _noted(self, start: Callable[..., Request], filled: list[Tensor], *given: Any) -> Request:
        graph = RecordedGraph.active
        if graph is None:
            return start(*given)
        for x in filled:
            graph.keep(x)
        with graph.pause():
            request = start(*given)
        started: list[Request] = []
        graph.calls.append(lambda: started.append(start(*given)))
        return _Recorded(graph, request, started)


class _Recorded:
    """A request that is waited for in a recording, and in each replay."""

    def __init__(self, graph: RecordedGraph, request: Request, started: list[Request]) -> None:
        self._graph, self._request, self._started = graph, request, started

    def wait(self) -> None:
        with self._graph.pause():
            self._request.wait()
        self._graph.calls.append(lambda: self._started.pop(0).wait())
