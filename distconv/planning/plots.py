"""Pictures of machines."""

from __future__ import annotations

from pathlib import Path

from distconv.planning.machine import Machine


def plot_machine(machine: Machine, path: Path) -> None:
    """Draw a machine's seconds against bytes: messages, reductions, copies."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4.5), layout="constrained")
    messages, reductions, copies = figure.subplots(1, 3, sharey=True)
    for where, link in machine.links.items():
        _draw(messages, link.total.sizes, link.total.seconds, where)
        _draw(messages, link.after.sizes, link.after.seconds, f"{where}, after computing", "--")
    for kind, links in machine.reductions.items():
        for ranks, link in links.items():
            _draw(reductions, link.total.sizes, link.total.seconds, f"{kind}, {ranks} ranks")
    _draw(copies, machine.copy.sizes, machine.copy.seconds, "contiguous")
    _draw(copies, machine.packing.sizes, machine.packing.seconds, "rows of 64 bytes")
    for ax, title in ((messages, "messages"), (reductions, "collectives"), (copies, "copies")):
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        ax.set_title(f"{machine.name}: {title}")
        ax.set_xlabel("bytes of a rank")
        ax.grid(alpha=0.3)
        if ax.lines:
            ax.legend(fontsize=7)
    messages.set_ylabel("seconds")
    figure.savefig(path, dpi=120)


def _draw(
    ax: object, sizes: tuple[float, ...], seconds: tuple[float, ...], label: str, style: str = "-"
) -> None:
    places = [max(size, 1.0) for size in sizes]
    ax.plot(places, seconds, style, marker="o", markersize=3, label=label)  # type: ignore[attr-defined]
