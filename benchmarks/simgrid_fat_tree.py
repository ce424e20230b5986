"""Messages on a fat tree, simulated by SimGrid with all their contention.

Run by the system's Python, for which Debian has the package python3-simgrid; knows nothing of
distconv, and is started by `benchmarks.contention`. Reads JSON on its standard input and writes on
its standard output the list of the seconds that each phase takes:

    {"nodes": 64, "ranks_per_node": 4, "leaf": 18, "within": [latency, bandwidth],
     "between": [latency, bandwidth of a node], "phases": [[[[from, to, bytes], ...], ...], ...]}

A phase is a list of steps, and a step messages that start at the same time; the next step begins
when all have arrived. Ranks stand on nodes in order; a node has one link into the network, both
ways, which its ranks share. The network is a fat tree of two levels with as many links up as down.
"""

from __future__ import annotations

import json
import sys
import tempfile
from typing import Any

import simgrid

PLATFORM = """<?xml version="1.0"?>
<!DOCTYPE platform SYSTEM "https://simgrid.org/simgrid.dtd">
<platform version="4.1">
  <cluster id="cluster" prefix="node" suffix="" radical="0-{last}" speed="1Gf"
           bw="{bandwidth}Bps" lat="{latency}s" topology="FAT_TREE"
           topo_parameters="2;{leaf},{leaves};1,{leaf};1,1"
           loopback_bw="{loopback_bandwidth}Bps" loopback_lat="{loopback_latency}s"/>
</platform>
"""


def platform(given: dict[str, Any]) -> str:
    """Return the description of the cluster as SimGrid reads it."""
    leaf = given["leaf"]
    leaves = max(-(-given["nodes"] // leaf), 2)
    latency, bandwidth = given["between"]
    inside, across = given["within"]
    return PLATFORM.format(
        last=leaf * leaves - 1,
        leaf=leaf,
        leaves=leaves,
        bandwidth=bandwidth,
        # From node to leaf, to spine, to leaf, to node.
        latency=latency / 4,
        loopback_bandwidth=across,
        loopback_latency=inside,
    )


def main() -> None:
    """Simulate the phases on standard input, and write their seconds on standard output."""
    given = json.load(sys.stdin)
    options = ["network/model:CM02", "network/TCP-gamma:0", "network/crosstraffic:0"]
    arguments = [f"--cfg={option}" for option in options]
    engine = simgrid.Engine([sys.argv[0], *arguments, "--log=root.threshold:error"])
    with tempfile.NamedTemporaryFile("w", suffix=".xml") as file:
        file.write(platform(given))
        file.flush()
        engine.load_platform(file.name)
    per_node = given["ranks_per_node"]
    hosts = [engine.host_by_name(f"node{i}") for i in range(given["nodes"])]
    took = []

    def send_all() -> None:
        for steps in given["phases"]:
            begun = simgrid.Engine.clock
            for step in steps:
                under_way = [
                    # A message without any byte takes SimGrid longer than one with a byte.
                    simgrid.Comm.sendto_async(
                        hosts[a // per_node], hosts[b // per_node], max(round(size), 1)
                    )
                    for a, b, size in step
                ]
                simgrid.Comm.wait_all(under_way)
            took.append(simgrid.Engine.clock - begun)

    simgrid.Actor.create("all ranks", hosts[0], send_all)
    engine.run()
    json.dump(took, sys.stdout)


if __name__ == "__main__":
    main()
