"""`python -m distconv scale`: scaling studies, measured, predicted, drawn and compared."""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from distconv.planning.alternation import Spread, sleep_until_all_are_here
from distconv.planning.links import check_ranks
from distconv.planning.machine import Machine, allocator_here
from distconv.planning.pictures import draw_studies
from distconv.planning.scaling import (
    STRONG,
    WEAK,
    Case,
    Study,
    cases_of,
    measure,
    predict_all,
    usual_grid,
)
from distconv.planning.table import table
from distconv.tools.arguments import BadArguments, complaining, grid_axes
from distconv.tools.commands.options import (
    Command,
    add_report_option,
    add_step_options,
    check_alone,
    is_first,
    keep_times,
    step_options,
    write_report,
)
from distconv.tools.explain import explain
from distconv.tools.factories import made_everywhere, module_from
from distconv.tools.json_lines import as_json
from distconv.tools.progress import Progress, StatusLine
from distconv.tools.reports.studies import scale_page
from distconv.transport.world import world

PICTURES = ("png", "pdf", "svg")


def _options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command, whose kinds have options of their own."""
    kinds = parser.add_subparsers(required=True, metavar="KIND", dest="kind")
    for kind, purpose in (
        (STRONG, "the same step on more ranks"),
        (WEAK, "a step that grows with the ranks: --shape is that of one rank"),
    ):
        _study_options(kinds.add_parser(kind, help=purpose, description=purpose))
    purpose = "set two studies, or more, side by side"
    compare = kinds.add_parser("compare", help=purpose, description=purpose)
    compare.add_argument("studies", nargs="+", type=Path, metavar="STUDY.json")
    compare.add_argument("--output", type=Path, metavar="FILE", help="of the plots, without ending")
    compare.add_argument("--pictures", choices=PICTURES, default="png", help="(%(default)s)")


def _study_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_step_options(parser)
    add_report_option(parser)
    # Without a machine nothing is predicted.
    parser.set_defaults(machine=None)
    add("--ranks", type=_numbers, default=[], metavar="N,N,...", help="of the cases that are run")
    add(
        "--predict-ranks",
        type=_numbers,
        default=[],
        metavar="N,N,...",
        help="of cases that are predicted only",
    )
    add(
        "--grids",
        type=_grids,
        metavar="GRID;GRID;...",
        help="the cases that are run, such as 'height=2;height=2,width=2', or auto (the default): "
        "strong scaling cuts each sample, weak scaling the mini-batch",
    )
    add("--rounds", type=int, default=10, help="in which all cases take turns (%(default)s)")
    add("--threads", type=int, default=1, help="of every rank (%(default)s)")
    add(
        "--output",
        type=Path,
        metavar="FILE",
        help="of the study, which is continued where it is there; plots lie beside it (default: "
        "scale-strong.json, scale-weak.json)",
    )
    add("--pictures", choices=PICTURES, default="png", help="what plots are (%(default)s)")


def _numbers(text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = [0]
    if min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} are no numbers of ranks; write 1,2,4, say")
    return numbers


def _grids(text: str) -> list[dict[str, int]] | None:
    return None if text == "auto" else [grid_axes(part) for part in text.split(";")]


def _run(arguments: argparse.Namespace) -> int:
    return _compare(arguments) if arguments.kind == "compare" else _study(arguments)


def _study(arguments: argparse.Namespace) -> int:
    first = is_first()
    path = arguments.output or Path(f"scale-{arguments.kind}.json")
    study, step = _asked(arguments), step_options(arguments)
    make = partial(module_from, arguments.factory, arguments.seed)
    with StatusLine(first, "recording all cases"):
        _check_module(arguments, study)
    of_machine = arguments.machine
    if of_machine is not None:
        most = max(case.ranks for case in study.cases)
        _on_first(lambda: check_ranks(Machine.load(of_machine), most))
    if _on_first(path.exists):
        study = _on_first(lambda: study.resumed_from(Study.load(path)))
    with Progress[str](str, lambda rows: print(*rows, sep="\n"), first) as progress:

        def finished(rounds: int) -> None:
            if first:
                study.save(path)
                progress(f"round {rounds} of {arguments.rounds}")

        def predict_on_first() -> None:
            machine = Machine.load(of_machine)
            progress.say("predicting; local operators are timed")
            say = partial(_say_predicted, progress)
            predict_all(study, make, machine, step=step, predicted=say)
            keep_times(machine, of_machine)

        if study.measured:
            progress.say(f"warming up, with steps of {len(study.measured)} cases")
            run: dict[str, Any] = {"threads": arguments.threads, "step": step}
            ranks = world().for_program()
            measure(study, make, ranks, arguments.rounds, finished=finished, **run)
        if of_machine is not None:
            _on_first(predict_on_first)
        if first:
            study.save(path)
    if first:
        pictures = draw_studies([(path.stem, study)], path, arguments.pictures)
        print(as_json(study) if arguments.json else _listed(study), flush=True)
        if not arguments.json:
            print(*(f"wrote {file}" for file in (path, *pictures)), sep="\n", flush=True)
        write_report(arguments.html, lambda: scale_page(study))
    return 0


def _say_predicted(progress: Progress[str], case: Case) -> None:
    progress(f"predicted {case.name}")


def _on_first(work: Callable[[], Any]) -> Any:
    """Return what a function returns on rank 0, while the others sleep; all raise its complaint."""
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


def _asked(arguments: argparse.Namespace) -> Study:
    """Return the study that the arguments describe, without times."""
    kind, shapes = arguments.kind, arguments.shape
    with complaining(ValueError):
        if arguments.grids is None:
            grids = [usual_grid(kind, shapes[0], n) for n in arguments.ranks]
        else:
            grids = arguments.grids
            _check_ranks(grids, arguments.ranks)
        cases = cases_of(kind, shapes, grids)
        more = [usual_grid(kind, shapes[0], n) for n in arguments.predict_ranks]
        known = {case.name for case in cases}
        cases += [c for c in cases_of(kind, shapes, more, measured=False) if c.name not in known]
    if not cases:
        raise BadArguments("there is nothing to study; give --ranks, --grids or --predict-ranks")
    if arguments.predict_ranks and arguments.machine is None:
        raise BadArguments("--predict-ranks needs --machine FILE, by which it predicts")
    if arguments.rounds < 2 or arguments.threads < 1:
        raise BadArguments("quartiles take two --rounds at least, and a rank one of --threads")
    started = world().size
    most = max((case.ranks for case in cases if case.measured), default=1)
    if most > started:
        raise BadArguments(
            f"the largest case that is run has {most} ranks, but {started} have been started; "
            f"start it with mpiexec -n {most} python -m distconv scale {kind} ..., or by torchrun"
        )
    machine = arguments.machine and arguments.machine.stem
    return Study(kind, arguments.factory, cases, _facts(arguments), machine)


def _check_ranks(grids: Sequence[dict[str, int]], ranks: Sequence[int]) -> None:
    if ranks:
        raise ValueError("--grids says how many ranks there are; leave --ranks out")
    for grid in grids:
        if min(grid.values()) < 1:
            raise ValueError(f"grids of a study have numbers of ranks from 1, not {grid}")


def _facts(arguments: argparse.Namespace) -> dict[str, str]:
    """Return what has to be alike in all rounds of a study, as all ranks see it."""
    facts = {
        "host": platform.node(),
        "cores": str(os.cpu_count()),
        "torch": torch.__version__,
        "threads": str(arguments.threads),
        "seed": str(arguments.seed),
        "dtype": arguments.dtype or "as the parameters",
        "loss": arguments.loss,
        "optimizer": arguments.optimizer,
        "layout": str(arguments.layout),
        "layouts": "; ".join(f"{pattern}: {cut}" for pattern, cut in arguments.layouts),
        "malloc": " ".join(f"{k}={v}" for k, v in sorted(allocator_here().items())),
    }
    options = ("autocast", "shard_parameters", "wire")
    facts |= {name: str(getattr(arguments, name)) for name in options if getattr(arguments, name)}
    agreed: dict[str, str] = world().bcast(facts)
    return agreed


def _check_module(arguments: argparse.Namespace, study: Study) -> None:
    """Complain on all ranks where the module refuses the shape or the grid of a case, as far as
    that can be seen without elements."""
    module = made_everywhere(arguments.factory, arguments.seed)
    layouts = dict(arguments.layouts)
    of_module = {"layout": arguments.layout, "layouts": layouts, "show": False}
    try:
        for case in study.cases:
            plan = explain(module, case.shapes, case.grid, **of_module)
            if plan.refusal is not None:
                raise ValueError(f"{case.name}: {plan.refusal}")
    except (ValueError, RuntimeError) as error:
        if "meta tensor" not in str(error):
            raise BadArguments(str(error)) from None


_HEADING = ("ranks", "grid", "shape", "time", "quartiles", "efficiency", "quartiles", "predicted")


def _listed(study: Study) -> str:
    rows = [_HEADING]
    for case in study.cases:
        efficiency = study.efficiency(case)
        guess = "" if case.predicted is None else _ms(case.predicted)
        if case.predicted is not None and case.time is not None:
            guess += f" ({case.predicted / case.time.median - 1:+.0%})"
        rows.append(
            (
                str(case.ranks),
                case.name,
                " ".join("x".join(map(str, s)) for s in case.shapes),
                "" if case.time is None else _ms(case.time.median),
                _between(case.time, _ms),
                "" if efficiency is None else f"{efficiency.median:.1%}",
                _between(efficiency, lambda value: f"{value:.1%}"),
                guess,
            )
        )
    lines = [
        f"{study.kind} scaling of {study.module}, {study.rounds} rounds, {study.facts['threads']} "
        f"thread{'s' * (study.facts['threads'] != '1')} a rank",
        table(rows, right=(0, 3, 5)),
    ]
    most = max((case.ranks for case in study.measured), default=0)
    cores = int(study.facts["cores"])
    if study.measured and most * int(study.facts["threads"]) > cores and world().size == most:
        lines.append(f"note: {most} ranks share the {cores} cores of {study.facts['host']}")
    return "\n".join(lines)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.4g} ms"


def _between(spread: Spread | None, text: Any) -> str:
    return "" if spread is None else f"{text(spread.low)} to {text(spread.high)}"


def _compare(arguments: argparse.Namespace) -> int:
    check_alone("compare")
    if len(arguments.studies) < 2:
        raise BadArguments("it takes two studies to compare")
    with complaining(ValueError):
        studies = [(str(path.with_suffix("")), Study.load(path)) for path in arguments.studies]
    kinds = {study.kind for _, study in studies}
    if len(kinds) > 1:
        raise BadArguments("one study is of strong scaling and the other of weak; compare alike")
    print(_compared(studies))
    if arguments.output is not None:
        print(
            *(
                f"wrote {file}"
                for file in draw_studies(studies, arguments.output, arguments.pictures)
            )
        )
    return 0


def _compared(studies: Sequence[tuple[str, Study]]) -> str:
    """Return the cases that all studies have measured, with times over those of the first."""
    (name, base), *others = studies
    lines = []
    for other_name, other in others:
        theirs = {(case.name, tuple(case.shapes)): case for case in other.measured}
        rows = [("ranks", "grid", name, other_name, "ratio", "")]
        for case in base.measured:
            match = theirs.get((case.name, tuple(case.shapes)))
            if match is None or not (case.seconds and match.seconds):
                continue
            mine, other_time = case.time, match.time
            assert mine is not None and other_time is not None
            apart = mine.high < other_time.low or other_time.high < mine.low
            rows.append(
                (
                    str(case.ranks),
                    case.name,
                    _ms(mine.median),
                    _ms(other_time.median),
                    f"{median(match.seconds) / median(case.seconds):.3f}",
                    "quartiles apart" if apart else "quartiles overlap",
                )
            )
        lines.append(
            table(rows, right=(0, 2, 3, 4))
            if len(rows) > 1
            else f"{name} and {other_name} have measured no case in common"
        )
        lines += [
            f"note: {fact} is {base.facts[fact]!r} and {other.facts[fact]!r}"
            for fact in base.facts
            if base.facts[fact] != other.facts.get(fact)
        ]
    return "\n".join(lines)


SCALE = Command(
    "measure and predict how a module scales, and draw it; or compare two such studies",
    _options,
    _run,
)
