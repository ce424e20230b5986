"""What predictions assume of a machine: each number from its least to its most, as bands."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from distconv.planning.machine import LinkTimes, Machine, Table


class Assumption(NamedTuple):
    """A number of a machine that nobody has measured, with the range in which it should lie."""

    name: str
    changed: Callable[[Machine, float], Machine]
    """Returns the machine with another value of the number."""
    low: float
    high: float
    unit: str


def _with_link(where: str, latency: bool, machine: Machine, value: float) -> Machine:
    """Return the machine with another latency or bandwidth `within` or `between` nodes."""
    link = machine.links[where]
    start, size = link.total.at(0), 2.0**30
    bandwidth = size / (link.total.at(size) - start)
    made = LinkTimes.described(
        value if latency else start, bandwidth if latency else value, link.posted.at(0)
    )
    return replace(machine, links=machine.links | {where: made})


def _with_efficiency(kernel: str, machine: Machine, value: float) -> Machine:
    """Return the machine with another efficiency of a kind of kernels."""
    device = machine.roofline
    assert device is not None
    return replace(
        machine, roofline=replace(device, efficiency={**device.efficiency, kernel: value})
    )


def _with_smallest(machine: Machine, value: float) -> Machine:
    """Return the machine with another time of the smallest kernel."""
    device = machine.roofline
    assert device is not None
    return replace(machine, roofline=replace(device, smallest=value))


def _with_host(machine: Machine, factor: float) -> Machine:
    """Return the machine with a host whose work takes `factor` times as long."""
    host = {
        name: Table(table.sizes, tuple(factor * s for s in table.seconds))
        for name, table in machine.host.items()
    }
    return replace(machine, host=host)


def efficiency(kernels: str, operator: str, low: float, high: float) -> Assumption:
    """Return the assumed efficiency of a kind of kernels: of an operator, or "" for all others."""
    return Assumption(
        f"efficiency of {kernels}", partial(_with_efficiency, operator), low, high, ""
    )


def assumptions(
    *efficiencies: Assumption, within: tuple[float, float], between: tuple[float, float]
) -> tuple[Assumption, ...]:
    """Return the assumptions about a machine: `efficiencies`, its smallest kernel, links and host.

    Parameters
    ----------
    within, between: least and most bandwidth in a node and between nodes, in bytes per second;
        the latencies are the same for all machines.
    """
    links = []
    for where, name, most, bandwidth in (
        ("within", "in a node", 40e-6, within),
        ("between", "between nodes", 60e-6, between),
    ):
        links += [
            Assumption(f"latency {name}", partial(_with_link, where, True), 5e-6, most, "s"),
            Assumption(f"bandwidth {name}", partial(_with_link, where, False), *bandwidth, "B/s"),
        ]
    return (
        *efficiencies,
        Assumption("smallest kernel", _with_smallest, 2e-6, 20e-6, "s"),
        *links,
        Assumption("time of the host, as a factor", _with_host, 0.5, 4.0, ""),
    )
