"""`python -m distconv scale`: scaling studies, measured, predicted, drawn and compared."""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from distconv.grid.ranks import world
from distconv.planning.machine import Machine, allocator_here
from distconv.planning.recorded_step import record_step
from distconv.planning.scaling import (
    STRONG,
    WEAK,
    Study,
    cases_of,
    measure,
    predict_all,
    sleep_until_all_are_here,
    usual_grid,
)
from distconv.planning.table import Cell, milliseconds, table
from distconv.planning.timeline import check_ranks
from distconv.tools import command_line as shared
from distconv.tools.command_line import BadArguments, Command, StatusLine, as_json, complaining
from distconv.tools.reports.figures import has_matplotlib
from distconv.tools.reports.pages import scale_page


def _options(parser: argparse.ArgumentParser) -> None:
    """Add the subcommands `strong`, `weak` and `compare`, each with its options."""
    kinds = parser.add_subparsers(required=True, metavar="KIND", dest="kind")
    for kind, purpose in (
        (STRONG, "the same step on more ranks"),
        (WEAK, "a step that grows with the ranks; --shape is the shape on one rank"),
        ("compare", "compare two studies or more"),
    ):
        of_kind = kinds.add_parser(kind, help=purpose, description=purpose)
        add = of_kind.add_argument
        if kind == "compare":
            add("studies", nargs="+", type=Path, metavar="STUDY.json")
        else:
            _study_options(of_kind)


def _study_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    shared.add_step_options(parser)
    shared.add_report_option(parser)
    parser.set_defaults(machine=None)  # without a machine nothing is predicted
    numbers: dict[str, Any] = {"type": _numbers_of_ranks, "default": [], "metavar": "N,N,..."}
    add("--ranks", help="the numbers of ranks to run", **numbers)
    add("--predict-ranks", help="the numbers of ranks to predict without running", **numbers)
    text = (
        "the grids to run, such as 'height=2;height=2,width=2', or auto (the default): strong "
        "scaling partitions each sample, weak scaling the mini-batch"
    )
    add("--grids", type=_grids, metavar="GRID;GRID;...", help=text)
    add("--rounds", type=int, default=10, help="rounds in which all cases take turns (%(default)s)")
    add("--threads", type=int, default=1, help="threads of every rank (%(default)s)")
    text = (
        "the file of the study, which is continued if it exists; without --html, its report lies "
        "beside it (default: scale-strong.json, scale-weak.json)"
    )
    add("--output", type=Path, metavar="FILE", help=text)


def _numbers_of_ranks(text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = [0]
    if min(numbers) < 1:
        raise argparse.ArgumentTypeError(
            f"{text!r} are not numbers of ranks; write 1,2,4, for example"
        )
    return numbers


def _grids(text: str) -> list[dict[str, int]] | None:
    return None if text == "auto" else [shared.grid_axes(part) for part in text.split(";")]


def _run(given: argparse.Namespace) -> int:
    return _compare(given) if given.kind == "compare" else _study(given)


def _study(given: argparse.Namespace) -> int:
    first, of_machine = shared.is_first(), given.machine
    path = given.output or Path(f"scale-{given.kind}.json")
    study, step = _asked(given), shared.step_options(given)
    make = partial(shared.module_from, given.factory, given.seed)
    with StatusLine(first, "recording all cases"):
        _check_module(given, study)
    if of_machine is not None:
        most = max(case.ranks for case in study.cases)
        _on_first(lambda: check_ranks(Machine.load(of_machine), most))
    if _on_first(path.exists):
        study = _on_first(lambda: study.resumed_from(Study.load(path)))
    with StatusLine(first) as progress:

        def finished(rounds: int) -> None:
            if first:
                study.save(path)
                progress(f"round {rounds} of {given.rounds}")

        def predict_on_first() -> None:
            machine = Machine.load(of_machine)
            progress("predicting; local operators are timed")
            say = lambda case: progress(f"predicted {case.name}")  # noqa: E731
            predict_all(study, make, machine, step=step, predicted=say)
            shared.keep_times(machine, of_machine)

        if study.measured:
            progress(f"warming up, with steps of {len(study.measured)} cases")
            run: dict[str, Any] = {"threads": given.threads, "step": step, "finished": finished}
            measure(study, make, world().for_program(), given.rounds, **run)
        if of_machine is not None:
            _on_first(predict_on_first)
    if first:
        study.save(path)
        print(as_json(study) if given.json else _listed(study), flush=True)
        beside = path.with_suffix(".report.html") if has_matplotlib() else None
        shared.write_report(given.html or beside, lambda: scale_page(study))
    return 0


def _on_first(work: Callable[[], Any]) -> Any:
    """Return `work()` of rank 0, while others sleep; raise its error on all ranks. Collective."""
    found = problem = None
    if world().rank == 0:
        try:
            found = work()
        except (ValueError, RuntimeError, OSError) as error:
            problem = str(error)
    if world().size > 1:
        sleep_until_all_are_here(world().for_program())
    found, problem = world().bcast((found, problem))
    if problem is not None:
        raise BadArguments(problem)
    return found


def _asked(given: argparse.Namespace) -> Study:
    """Return a study without times, with the cases that the command line names.

    Raises BadArguments for options that do not fit.
    """
    kind, shapes, grids = given.kind, given.shape, given.grids
    if grids is not None and given.ranks:
        raise BadArguments("--grids determines the numbers of ranks; leave --ranks out")
    with complaining(ValueError):
        if grids is None:
            grids = [usual_grid(kind, shapes[0], n) for n in given.ranks]
        cases = cases_of(kind, shapes, grids)
        more = [usual_grid(kind, shapes[0], n) for n in given.predict_ranks]
        known = {case.name for case in cases}
        cases += [c for c in cases_of(kind, shapes, more, measured=False) if c.name not in known]
    if not cases:
        raise BadArguments("there is nothing to study; pass --ranks, --grids or --predict-ranks")
    if given.predict_ranks and given.machine is None:
        raise BadArguments("--predict-ranks needs --machine FILE for the prediction")
    if given.rounds < 2 or given.threads < 1:
        raise BadArguments(
            "quartiles need at least two --rounds, and a rank at least one of --threads"
        )
    most = max((case.ranks for case in cases if case.measured), default=1)
    if most > world().size:
        raise BadArguments(
            f"the largest measured case has {most} ranks, but {world().size} have been started; "
            f"start it with mpiexec -n {most} python -m distconv scale {kind} ..., or by torchrun"
        )
    return Study(kind, given.factory, cases, _facts(given), given.machine and given.machine.stem)


def _facts(given: argparse.Namespace) -> dict[str, str]:
    """Return rank 0's conditions of measurement, equal in all rounds of a study. Collective."""
    facts = {
        "host": platform.node(),
        "cores": str(os.cpu_count()),
        "torch": torch.__version__,
        **{name: str(getattr(given, name)) for name in ("threads", "seed", "loss", "optimizer")},
        "dtype": given.dtype or "as the parameters",
        "layout": str(given.layout),
        "layouts": "; ".join(f"{pattern}: {cut}" for pattern, cut in given.layouts),
        "malloc": " ".join(f"{k}={v}" for k, v in sorted(allocator_here().items())),
    }
    options = ("autocast", "shard_parameters", "shard", "wire", "checkpoint", "offload")
    facts |= {name: str(getattr(given, name)) for name in options if getattr(given, name)}
    if given.accumulate > 1:
        facts["accumulate"] = str(given.accumulate)
    agreed: dict[str, str] = world().bcast(facts)
    return agreed


def _check_module(given: argparse.Namespace, study: Study) -> None:
    """Raise `BadArguments` on all ranks if a case is unsupported, or raises, in a dry run."""
    module = shared.made_everywhere(given.factory, given.seed)
    cut: dict[str, Any] = {"layout": given.layout, "layouts": dict(given.layouts)}
    try:
        for case in study.cases:
            refusal = record_step(module, case.shapes, case.grid, loss=None, **cut).refusal
            if refusal is not None:
                raise ValueError(f"{case.name}: {refusal}")
    except (ValueError, RuntimeError) as error:
        if "meta tensor" not in str(error):
            raise BadArguments(str(error)) from None


def _listed(study: Study) -> str:
    number = study.facts["threads"]
    threads = "1 thread" if number == "1" else f"{number} threads"
    lines = [
        f"{study.kind} scaling of {study.module}, {study.rounds} rounds, {threads} a rank",
        table(study.rows()),
    ]
    most = max((case.ranks for case in study.measured), default=0)
    cores = int(study.facts["cores"])
    if study.measured and most * int(study.facts["threads"]) > cores and world().size == most:
        lines.append(f"note: {most} ranks share the {cores} cores of {study.facts['host']}")
    return "\n".join(lines)


def _compare(given: argparse.Namespace) -> int:
    shared.check_alone("compare")
    if len(given.studies) < 2:
        raise BadArguments(f"{given.studies[0]} is one study; name two or more to compare")
    with complaining(ValueError):
        studies = [(str(path.with_suffix("")), Study.load(path)) for path in given.studies]
    if len({study.kind for _, study in studies}) > 1:
        raise BadArguments(
            "the studies are of strong and of weak scaling; choose studies of one kind"
        )
    print(*(line for other in studies[1:] for line in _compared(studies[0], other)), sep="\n")
    return 0


def _compared(base: tuple[str, Study], other: tuple[str, Study]) -> Iterator[str]:
    """Yield a table of the cases that two studies share, and notes on different conditions."""
    (name, mine), (other_name, theirs) = base, other
    rows: list[Sequence[Cell]] = [("ranks", "grid", name, other_name, "ratio", "")]
    for case in mine.measured:
        for twin in theirs.measured:
            a, b = case.time, twin.time
            if (case.name, case.shapes) == (twin.name, twin.shapes) and a and b:
                apart = "apart" if a.high < b.low or b.high < a.low else "overlap"
                times = [(milliseconds(t.median), t.median) for t in (a, b)]
                ratio = f"{b.median / a.median:.3f}", b.median / a.median
                ranks = str(case.ranks), case.ranks
                rows.append((ranks, case.name, *times, ratio, f"quartiles {apart}"))
    none = f"{name} and {other_name} have no measured case in common"
    yield table(rows) if len(rows) > 1 else none
    for fact, value in mine.facts.items():
        if value != theirs.facts.get(fact):
            yield f"note: {fact} is {value!r} and {theirs.facts[fact]!r}"


SCALE = Command(
    "measure, predict and draw the scaling of a module, or compare scaling studies",
    _options,
    _run,
)
