"""Graphs of a device: work that its streams got once, and that one call starts again."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from typing import Any

import torch

from distconv.device.kinds import is_accelerator
from distconv.device.streams import using


def why_no_graphs(device: torch.device) -> str | None:
    """Return why work on a device cannot be captured in a graph; None if it can."""
    if not is_accelerator(device):
        return f"graphs are for GPUs, and the grid computes on {device.type}"
    if device.type == "cuda" or hasattr(torch.accelerator, "Graph"):
        return None
    return f"torch {torch.__version__} has no graphs of {device.type}"


class DeviceGraph:
    """The work that a function queues on a device, captured once, and done by each replay.

    `made` is the function's result, whose memory every replay fills again. Other threads may query
    events during the capture.

    Parameters
    ----------
    work: the function; it uses the current stream only, and memory that stays in its place.
    """

    def __init__(self, device: torch.device, work: Callable[[], Any]):
        self._graph, capturing = _new(device)
        stream = torch.Stream(device=device)
        stream.wait_stream(torch.accelerator.current_stream(device))
        with using(stream), capturing:
            self.made = work()
        torch.accelerator.current_stream(device).wait_stream(stream)

    def replay(self) -> None:
        """Queue the captured work on the current stream."""
        self._graph.replay()


def release_graphs() -> None:
    """Empty all graphs of this process, also those that a program has captured itself.

    NCCL closes a connection only when no graph has captured messages over it.
    """
    kinds = torch.cuda.CUDAGraph, getattr(torch.accelerator, "Graph", torch.cuda.CUDAGraph)
    gc.unfreeze()  # or graphs that were there when the program called gc.freeze would stay unseen
    for thing in gc.get_objects():
        if issubclass(type(thing), kinds):
            with suppress(RuntimeError):
                thing.reset()


def _new(device: torch.device) -> tuple[Any, AbstractContextManager[Any]]:
    """Return an empty graph, and a context that captures work on the current stream into it."""
    if hasattr(torch.accelerator, "Graph"):
        graph: Any = torch.accelerator.Graph(capture_error_mode="thread_local")
        return graph, graph
    graph = torch.cuda.CUDAGraph()
    return graph, torch.cuda.graph(graph, capture_error_mode="thread_local")
