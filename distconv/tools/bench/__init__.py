"""Benchmarks: each pairs its subject with its bound in one run, and reports medians of ratios."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from distconv.tools.bench.channels import channels
from distconv.tools.bench.halo import halos
from distconv.tools.bench.layer import layers
from distconv.tools.bench.loss import losses
from distconv.tools.bench.memory import memory
from distconv.tools.bench.memory_format import memory_formats
from distconv.tools.bench.model import models
from distconv.tools.bench.named_network import named_network
from distconv.tools.bench.networks import Network
from distconv.tools.bench.overhead import overheads
from distconv.tools.bench.report import Row, as_table, plot
from distconv.tools.bench.settings import Settings

BENCHMARKS: dict[str, Callable[[Settings], Iterator[Row]]] = {
    "layer": layers,
    "channels": channels,
    "halo": halos,
    "model": models,
    "memory": memory,
    "loss": losses,
    "memory_format": memory_formats,
    "overhead": overheads,
}
"""The benchmarks of `python -m distconv bench` by name; all ranks call one."""

OF_NETWORKS: dict[str, Callable[[Settings, Sequence[Network]], Iterator[Row]]] = {
    "model": models,
    "memory": memory,
    "loss": losses,
    "memory_format": partial(memory_formats, halos=()),
}
"""Those that measure whole networks, a user's own as well; all ranks call one."""

__all__ = ["BENCHMARKS", "OF_NETWORKS", "Row", "Settings", "as_table", "named_network", "plot"]
