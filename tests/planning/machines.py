"""Machines of round numbers, for tests."""

from __future__ import annotations

from distconv.planning.machine import LinkTimes, Machine, Roofline, Table


def described(ranks_per_node: int = 4, *, asynchronous: bool = False) -> Machine:
    """Return a machine of 1 TFLOP/s a rank, with slower links between nodes than within."""
    nothing = Table((0.0,), (0.0,))
    return Machine(
        name="round",
        assumed=True,
        ranks_per_node=ranks_per_node,
        threads=1,
        links={
            "within": LinkTimes.described(1e-6, 1e10, posted=1e-7),
            "between": LinkTimes.described(1e-5, 1e9, posted=1e-7),
        },
        reductions={},
        packing=nothing,
        host={"*": Table((0.0,), (1e-6,))},
        asynchronous=asynchronous,
        roofline=Roofline({"float32": 1e12}, 1e11, {"": 1.0}, 1e-7),
        memory=2**30,
        sources={"": "round numbers"},
    )
