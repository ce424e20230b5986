"""Reports for a browser are well-formed, load nothing, and hold the numbers of their tables."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from mpi4py import MPI
from torch import nn

import distconv as dc
from distconv.__main__ import main
from distconv.geometry.topology import Topology
from distconv.planning import Machine, plan, predict
from distconv.planning.scaling import STRONG, Case, Study
from distconv.planning.table import byte_size
from distconv.tools.reports.figures import COLOURS, Bar, lanes
from distconv.tools.reports.pages import (
    MOST_NODES,
    Section,
    explain_page,
    grid_section,
    page,
    plan_page,
    prediction_page,
    scale_page,
    verify_page,
)
from distconv.tools.timeline import read_trace, times_of_ranks
from tests.planning.machines import described
from tests.support.pages import ROOT
from tests.support.report_picture import PICTURE, drawn

SVG = "{http://www.w3.org/2000/svg}"

SHAPE, GRID = (2, 1, 16, 8), {"sample": 2, "height": 2}


NAME = "a<b & 'c'"


class Named(nn.ModuleDict):
    """A convolution with a name that markup has to escape."""

    def __init__(self) -> None:
        super().__init__({NAME: nn.Conv2d(4, 2, 3, padding=1)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self[NAME](x)
        return y


def net() -> nn.Module:
    """Return a small network."""
    layers = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2)
    return nn.Sequential(*layers, Named())


def parsed(page: str) -> ElementTree.Element:
    """Return a page as a tree; raise where it is not well-formed, or would load anything."""
    root = ElementTree.fromstring(page.removeprefix("<!DOCTYPE html>\n"))
    assert not re.search(r"\b(?:src|href)=(?!\"#)|@import|url\((?!#)", page)
    return root


def bars(root: ElementTree.Element) -> list[tuple[str, float, float]]:
    """Return the title of every bar of a page's figures, with its left and right end."""
    found = []
    for group in root.iter(SVG + "g"):
        title = group.find(SVG + "title")
        if title is not None:
            (path,) = group.findall(SVG + "path")
            places = [float(x) for x in re.findall(r"[ML] ([-\d.e]+)", path.get("d", ""))]
            found.append((title.text or "", min(places), max(places)))
    return found


@pytest.mark.parallel([2])
def test_the_picture_in_the_documentation_is_what_reports_draw() -> None:
    """On two ranks convolutions overlap as they do for users, not the smallest as well."""
    shown, now = (bars(ElementTree.fromstring(svg)) for svg in (PICTURE.read_text(), drawn()))
    assert [title for title, _, _ in shown] == [title for title, _, _ in now]
    for name in ("docs/howto/reports.md", "docs/examples/gallery.md"):
        assert PICTURE.name in (ROOT / name).read_text()


def texts(root: ElementTree.Element) -> list[str]:
    """Return the texts in the figures of a page."""
    return ["".join(text.itertext()) for text in root.iter(SVG + "text")]


def tables(root: ElementTree.Element) -> list[list[list[str]]]:
    """Return the texts of all rows of all tables."""
    return [
        [["".join(cell.itertext()) for cell in row] for row in table.iter("tr")]
        for table in root.iter("table")
    ]


def test_page_of_explain_holds_the_layers_and_their_bytes() -> None:
    found = dc.explain(net(), SHAPE, GRID, show=False)
    root = parsed(explain_page(found, GRID))
    heading, *rows = tables(root)[0]
    assert [row[0] for row in rows] == [layer.name for layer in found.layers]
    assert f"4.{NAME}" in [row[0] for row in rows]
    kept = heading.index("kept")
    assert [row[kept] for row in rows] == [
        byte_size(layer.kept_bytes) if layer.kept_bytes else "" for layer in found.layers
    ]
    sorted_by = [cell.get("data-value") for cell in root.iter("td") if cell.text == rows[0][kept]]
    assert str(found.layers[0].kept_bytes) in sorted_by
    assert byte_size(found.kept_bytes) in "".join(root.itertext())
    ranks = [cell.get("title") for cell in root.iter("span") if "rank " in cell.get("title", "")]
    assert ranks[1:3] == ["rank 1: sample 0, height 1", "rank 2: sample 1, height 0"]


@pytest.mark.parallel(2)
def test_page_of_verify_holds_every_difference() -> None:
    grid = dc.ProcessGrid(height=-1)
    found = dc.verify(net().double(), torch.randn(SHAPE).double(), grid, show=False)
    root = parsed(verify_page(found, grid.shape))
    rows = tables(root)[0][1:]
    assert [(r[0], r[2]) for r in rows] == [(x.layer, f"{x.difference:.1e}") for x in found.rows]
    assert found.ok and not any("deviates" in row for row in rows)
    dots = [use.get("style", "") for use in root.iter(SVG + "use")]
    for colour in (COLOURS[0], COLOURS[-1]):
        of_legend = 1
        assert sum(f"fill: {colour}" in style for style in dots) == len(found.rows) + of_legend


def machine() -> Machine:
    """Return the machine that describes itself."""
    return described()


def test_page_of_predict_holds_the_step_in_time() -> None:
    found = predict(net(), SHAPE, GRID, machine())
    root = parsed(prediction_page(found, machine()))
    assert f"{found.seconds * 1e3:.4g} ms" in "".join(root.itertext())
    rows = tables(root)[1][1:]
    assert [row[0] for row in rows] == [layer.name for layer in found.layers]
    assert {"forward", "backward", "ms"} <= set(texts(root))
    drawn = bars(root)
    forward = [end for title, _, end in drawn if ", forward, " in title]
    backward = [begin for title, begin, _ in drawn if ", backward, " in title]
    assert ", forward, " in min(drawn, key=lambda bar: bar[1])[0]
    assert min(backward) == pytest.approx(max(forward), abs=5)


@pytest.mark.parametrize("memory", [None, 100])
def test_page_of_plan_holds_the_grids_and_what_would_fit(memory: int | None) -> None:
    found = plan(net(), SHAPE, 4, machine(), memory=memory)
    root = parsed(plan_page(found, None, machine()))
    grids = next(rows for rows in tables(root) if rows[0][0] == "grid")[1:]
    assert len(grids) == len(found.candidates)
    text = "".join(root.itertext())
    if memory is None:
        assert f"{found.best.seconds * 1e3:.4g}" in grids[0] and found.reason in text
    else:
        assert not found.fitting and "no grid of 4 ranks fits" in text


def test_page_of_scale_holds_measured_and_predicted_cases() -> None:
    cases = [
        Case({}, [SHAPE], seconds=[4.0, 4.2, 4.1], predicted=4.0),
        Case({"height": 2}, [SHAPE], seconds=[2.2, 2.4, 2.3], predicted=2.1),
        Case({"height": 4}, [SHAPE], measured=False, predicted=1.2),
    ]
    study = Study(STRONG, "net:Net", cases, {"threads": "1", "layouts": ""})
    root = parsed(scale_page(study))
    rows = tables(root)[0][1:]
    assert [(r[0], r[3], r[5]) for r in rows] == [
        ("1", "4100 ms", "100.0%"), ("2", "2300 ms", "89.1%"), ("4", "", "")
    ]  # fmt: skip
    assert rows[2][-2] == "1200 ms"
    assert parsed(scale_page(Study(STRONG, "net:Net", [Case({}, [SHAPE])]))) is not None


@pytest.mark.parallel(2)
def test_page_of_timeline_holds_what_ranks_do(folder: Path) -> None:
    grid = dc.ProcessGrid(height=-1)
    model = dc.parallelize(nn.Conv2d(1, 1, 3, padding=1), grid)
    x = dc.distribute_tensor(torch.randn(SHAPE), grid)
    trace, report = folder / "trace.json", folder / "report.html"
    with dc.timeline(trace):
        model(x).sum().backward()
    assert main(["timeline", str(trace), "--html", str(report)]) == 0
    if MPI.COMM_WORLD.rank == 0:
        root = parsed(report.read_text())
        sums = times_of_ranks(read_trace(trace))
        halos = [row for row in tables(root)[1][1:] if row[1] == "halo"]
        assert [row[2] for row in halos] == [byte_size(row.bytes["halo"]) for row in sums]
        assert texts(root).count("halo") == texts(root).count("compute") == 2


def test_report_is_written_beside_the_table(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    report = tmp_path / "report.html"
    case = "explain", "torch.nn:Tanh", "--shape", "2,3,9,7", "--grid", "height=2"
    assert main([*case, "--html", str(report)]) == 0
    said = capsys.readouterr()
    assert "kept for backward" in said.out and said.err.count(f"wrote {report}") == 1
    assert tables(parsed(report.read_text()))[0][1][1] == "Tanh"
    for wrong in (tmp_path, tmp_path / "nowhere" / "report.html"):
        with pytest.raises(SystemExit):
            main([*case, "--html", str(wrong)])
        assert "cannot be written" in capsys.readouterr().err


def test_bars_are_as_long_as_their_numbers() -> None:
    sizes = [("a", "b", "c"), *(((str(n), n), ("", "x")[n % 2], (f"{n}", 2 * n)) for n in range(5))]
    root = parsed(page("", "", [], [Section(rows=sizes)]))
    drawn = [cell.get("style") for cell in root.iter("td") if cell.get("class") == "number"]
    bars = [None, *(f"background-size:{25 * n}% 100%" for n in range(1, 5))]
    assert drawn[::2] == [None] * 5 and drawn[1::2] == bars
    endless = Section(rows=[("a", "b"), ("x", ("inf", float("inf"))), ("y", ("1", 1.0))])
    assert not any(cell.get("style") for cell in parsed(page("", "", [], [endless])).iter("td"))


def test_lanes_join_what_no_eye_tells_apart() -> None:
    crowd = [Bar(i * 1e-6, i * 1e-6 + 5e-7, "#000000", "many") for i in range(1000)]
    late = Bar(0.5, 1.0, "#000000", "late & <last>")
    drawn = bars(parsed(str(lanes({"x": [*crowd, late]}, 0.0, 1.0, {"black": "#000000"}))))
    assert [title for title, *_ in drawn] == ["many", "late & <last>"]
    (_, left, end), (_, begin, right) = drawn
    assert begin - left == pytest.approx(right - begin, rel=1e-3) and end - left < 1


def test_without_matplotlib_reports_say_what_to_install(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distconv.tools.command_line.has_matplotlib", lambda: False)
    case = "explain", "torch.nn:Tanh", "--shape", "2,3,9,7", "--grid", "height=2"
    with pytest.raises(SystemExit):
        main([*case, "--html", str(tmp_path / "report.html")])
    assert "pip install 'distconv[reports]'" in capsys.readouterr().err
    assert main([*case]) == 0


def test_large_grids_show_their_first_nodes() -> None:
    root = parsed(page("", "", [], grid_section({"sample": 8, "height": 64}, 4)))
    captions = ["".join(c.itertext()) for c in root.iter("figcaption")]
    assert captions == [f"node {i}" for i in range(MOST_NODES)]
    nodes = Topology((8, 1, 1, 1, 64, 1)).size // 4
    assert f"{nodes - MOST_NODES} more nodes are not drawn" in "".join(root.itertext())
