"""Benchmarks: each pairs its subject with its bound in one run, and reports medians of ratios."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from distconv.bench.channels import channels
from distconv.bench.halo import halos
from distconv.bench.layer import layers
from distconv.bench.memory import memory
from distconv.bench.model import models
from distconv.bench.overhead import overheads
from distconv.bench.report import Row, as_table, plot
from distconv.bench.settings import Settings

BENCHMARKS: dict[str, Callable[[Settings], Iterator[Row]]] = {
    "layer": layers,
    "channels": channels,
    "halo": halos,
    "model": models,
    "memory": memory,
    "overhead": overheads,
}
"""What `python -m distconv bench` can measure; all ranks call it."""

__all__ = ["BENCHMARKS", "Row", "Settings", "as_table", "plot"]
