"""Graphs of a device: work that its streams were given once, started again by one call."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from distconv.device.kinds import is_accelerator
from distconv.device.streams import using


def why_no_graphs(device: torch.device) -> str | None:
    """Return why work on a device cannot be captured; None where it can."""
    if not is_accelerator(device):
        return f"graphs are for GPUs, and the grid computes on {device.type}"
    if device.type == "cuda" or hasattr(torch.accelerator, "Graph"):
        return None
    return f"torch {torch.__version__} has no graphs of {device.type}"


class DeviceGraph:
    """The work of a function on a device, recorded without being done, and done by each replay.

    Every replay fills `made`, the function's result, again. Threads that watch messages may query
    their events while it is recorded.

    Parameters
    ----------
    work: queues work on the current stream only, on memory that stays where it is.
    """

    def __init__(self, device: torch.device, work: Callable[[], Any]):
        self._graph, capturing = _new(device)
        stream = torch.Stream(device=device)
        stream.wait_stream(torch.accelerator.current_stream(device))
        with using(stream), capturing:
            self.made = work()
        torch.accelerator.current_stream(device).wait_stream(stream)

    def replay(self) -> None:
        """Give the work to the current stream."""
        self._graph.replay()


def _new(device: torch.device) -> tuple[Any, AbstractContextManager[Any]]:
    """Return a graph, and a context in which the current stream's work becomes part of it."""
    if hasattr(torch.accelerator, "Graph"):
        graph: Any = torch.accelerator.Graph(capture_error_mode="thread_local")
        return graph, graph
    graph = torch.cuda.CUDAGraph()
    return graph, torch.cuda.graph(graph, capture_error_mode="thread_local")
