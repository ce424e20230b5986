"""Write docs/reference/networks.md from the results of a run."""

from __future__ import annotations

from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.networks.cases import Case
from tests.networks.losses import LOSSES
from tests.networks.networks import NETWORKS

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "networks.md"

INTRODUCTION = """\
# Networks, losses and metrics of other packages

This page lists the networks, losses and metrics of other packages that were tried with distconv.
`make networks` measures it: it runs each case forward and backward in float64 on several ranks,
partitioned in space, and compares outputs, input gradients and parameter gradients with the serial
run.

- **right**: outputs and gradients equal those of the serial run to rounding.
- **unsupported**: `UnsupportedOperation` on every rank, before any message. The reasons are below.
- **wrong**, **error**, **hang**: a fault.

*Redistributed* is the number of bytes, summed over all ranks, that a forward pass on the largest
number of ranks sends in addition to halos and reductions, as counted by `dc.redistributions()`. The
last column is the operator that sends most of these bytes. *Input* is the size of the inputs.
*Otherwise* excludes operators whose results depend on all positions of a sample, and which
therefore must communicate: the keys and values of attention, fully connected layers and recurrences
along positions, Fourier transforms, sorting and running sums. `make networks` fails if a network
redistributes more bytes otherwise than its input has. AutoencoderKLWan and AutoencoderKLQwenImage
are exempt: they loop over a few frames at a time along the dimension that is partitioned here, and
carry the last frames of each layer over to the next pass. Partition such networks in height and
width.

Some losses redistribute more on four ranks. Lovász losses sort the errors of all positions: every
rank receives the sorted errors, and looks up all labels in their order. Losses that write one-hot
classes into a plain tensor of zeros, which is whole on every rank, gather all labels in each call.
Labels that are already one-hot are not redistributed.
"""

Results = dict[int, dict[str, dict[str, Any]]]
"""The result of each case, by the number of ranks and the case's key."""


def write(results: Results) -> None:
    """Write the page."""
    packages = sorted({case.package for case in (*NETWORKS, *LOSSES)})
    versions = ", ".join(f"{name} {version(name)}" for name in packages)
    parts = [INTRODUCTION, f"With torch {version('torch').partition('+')[0]}, {versions}."]
    for title, cases in (("Networks", NETWORKS), ("Losses and metrics", LOSSES)):
        parts += [f"\n## {title}\n", _counted(cases, results), "", *_table(cases, results)]
    parts += ["\n## Unsupported and failing cases\n", *_reasons(results)]
    PAGE.write_text("\n".join(parts) + "\n")


def _counted(cases: tuple[Case, ...], results: Results) -> str:
    """Return the number of cases of each result, the worst of each case, and of replayed ones."""
    worst = Counter(max(_words(case, results), key=_SEVERITY.index) for case in cases)
    numbers = (f"{worst[word]} {word}" for word in _SEVERITY if worst[word])
    replayed = sum(
        all(each[case.key].get("replays") for each in results.values()) for case in cases
    )
    return (
        f"{len(cases)} of {len({c.package for c in cases})} packages: {', '.join(numbers)}. "
        f"`dc.compile` replays {replayed} of them, with equal bits; the others run eagerly."
    )


_SEVERITY = ("right", "unsupported", "error", "hang", "wrong")


def _words(case: Case, results: Results) -> list[str]:
    return [found[case.key]["result"] for found in results.values()]


def _table(cases: tuple[Case, ...], results: Results) -> list[str]:
    ranks = sorted(results)
    heads = " | ".join(f"{n} ranks" for n in ranks)
    lines = [
        f"| package | | inputs | {heads} | input | redistributed | otherwise | mostly for |",
        f"|---|---|---|{'---|' * len(ranks)}---:|---:|---:|---|",
    ]
    for case in sorted(cases, key=lambda case: case.package.lower()):
        last = results[ranks[-1]][case.key]
        moved = last.get("redistributed")
        shapes = ", ".join("x".join(map(str, shape)) for shape in last.get("shapes", ()))
        cells = (
            *(case.package, case.name, shapes),
            *(results[n][case.key]["result"] for n in ranks),
            *(_size(last.get(what)) for what in ("input", "redistributed", "otherwise")),
            (last.get("most") or "") if moved else "",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _size(number: int | None) -> str:
    return "" if number is None else f"{number / 1024:.1f} KiB" if number else "0"


def _reasons(results: Results) -> list[str]:
    """Return a line for each case that is not right, with the first sentence of the reason."""
    lines = []
    for case in (*NETWORKS, *LOSSES):
        whys = {
            (each["result"], _first(each["why"]))
            for found in results.values()
            if (each := found[case.key])["result"] != "right"
        }
        lines += [f"- {case.package}, {case.name}: {word}. {why}" for word, why in sorted(whys)]
    return lines or ["Nothing."]


def _first(why: str) -> str:
    """Return the first sentence of a refusal, without the operands, which depend on the ranks."""
    return " ".join(why.partition(" [")[0].split())[:200]
