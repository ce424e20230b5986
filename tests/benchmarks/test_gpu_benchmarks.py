"""The benchmarks for GPUs run, on the CPU and on tiny cases; nothing here looks at times."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from mpi4py import MPI
from torch import Tensor, nn
from torch.profiler import record_function

import benchmarks.gpu.__main__ as command
import distconv as dc
from benchmarks.gpu import cases, clock, graphs, needs
from benchmarks.gpu.alone import on_grid
from benchmarks.gpu.cases import Case, cut, module, plain, trained
from benchmarks.gpu.messages import messages
from benchmarks.gpu.needs import left_out, missing
from benchmarks.gpu.page import Page, Part
from benchmarks.gpu.shards import PLANE, VOLUME, listening, network_alone, shards
from benchmarks.gpu.waits import calls_of, waits, waits_in
from benchmarks.layer import step_of
from benchmarks.measuring.memory import Peak
from benchmarks.measuring.report import Row
from distconv.ops.conv.functions import METHODS
from distconv.planning.dry_run import DryRunGrid
from examples.cosmoflow.network import FORMS, CosmoFlowNet
from examples.mesh_tangling.network import mesh_tangling_1k
from examples.unet3d.network import UNet3d
from tests.gpu.__main__ import Session, Step, functions

CPU = torch.device("cpu")
SQUARES = trained(F.mse_loss)


class Launching(nn.Conv2d):
    """A layer that looks to a profiler as if it launched a kernel."""

    def forward(self, input: Tensor) -> Tensor:
        with record_function("cudaLaunchKernel"):
            return super().forward(input)


LAYER = Case("layer", (1, 4, 16, 16), lambda: Launching(4, 4, 3, padding=1), step_of)
PUBLISHED = LAYER._replace(published="much")
VOLUMES = Case("volumes", (1, 2, 8, 8, 8), lambda: nn.Conv3d(2, 2, 3, padding=1), step_of)
MESH = Case(
    *("mesh", (1, 18, 64, 64), partial(mesh_tangling_1k, 1 / 32, 64), SQUARES, torch.rand, 1.02)
)


def _features() -> nn.Module:
    return CosmoFlowNet(FORMS["average"], 64, 1 / 8).blocks


COSMOFLOW = Case(
    *("CosmoFlow", (1, 4, 16, 16, 16), lambda: CosmoFlowNet(FORMS["maximum"], 16, 0.25), SQUARES)
)
FEATURES = Case(*("features", (1, 4, 64, 64, 64), _features, SQUARES))
UNET = cases.UNET._replace(shape=(1, 1, 32, 32, 32), make=lambda: UNet3d(classes=3, width=1 / 16))
HALF = MESH._replace(name="half", step=trained(F.mse_loss, torch.bfloat16))


@pytest.fixture(autouse=True)
def few_rounds(monkeypatch) -> None:
    """Let a benchmark take two measurements of one call each."""
    monkeypatch.setattr(clock, "ROUNDS", (2, 2))
    monkeypatch.setattr(clock, "SHORTEST", 1e-9)
    monkeypatch.setattr("benchmarks.measuring.turns.ROUNDS", (2, 2))
    monkeypatch.setattr("benchmarks.measuring.turns.SHORTEST", 0.0)
    monkeypatch.setattr("benchmarks.measuring.turns.ceil", lambda x: 1)


@pytest.fixture
def grid() -> dc.ProcessGrid:
    return dc.ProcessGrid(MPI.COMM_SELF, device="cpu")


@pytest.mark.parametrize(("case", "loss"), [(MESH, F.mse_loss), (UNET, F.cross_entropy)])
def test_both_sides_compute_the_same(case: Case, loss, grid) -> None:
    losses: list[Tensor] = []

    def heard(made: Tensor, y: Tensor) -> Tensor:
        losses.append(loss(made, y))
        return losses[-1]

    case = case._replace(step=trained(heard))
    for step in (on_grid(case, grid), plain(case, grid, CPU)):
        step()
    assert abs(losses[0].item() - losses[1].item()) < 1e-5 * losses[1].item()


@pytest.mark.parametrize(
    ("case", "cuts"),
    [*((case, PLANE) for case in (cases.MESH_2K, cases.LAYERS[0])), (cases.UNET, VOLUME[3:])],
    ids=lambda x: getattr(x, "name", ""),
)
def test_plain_torch_makes_of_a_block_what_its_rank_makes(case: Case, cuts) -> None:
    meta = torch.device("meta")
    for extents in cuts:
        x, _ = cut(case, DryRunGrid(extents), meta)
        network = module(case, meta)
        made = network(x)
        assert network(x.shard).shape == made.shard.shape
        assert made.shape == network(torch.empty(case.shape, device=meta)).shape


@pytest.mark.parametrize(("case", "cuts"), [(PUBLISHED, PLANE), (FEATURES, VOLUME[3:4])])
def test_shards_are_told_with_what_follows_from_them(case: Case, cuts) -> None:
    found = list(shards(case, cuts, CPU, 0.0))
    rows = [row for row in found if isinstance(row, Row)]
    texts = [text for text in found if isinstance(text, str)]
    measures = Counter(row.measure for row in rows)
    assert {measures[f"{way}, over no halos"] for way in METHODS} == {len(cuts)}
    several = [extents for extents in cuts if max(extents.values()) > 1]
    assert measures["packing of the forward pass, over the step"] == len(several)
    compared = len(several) if len(several) < len(cuts) else 0
    assert measures["peak memory over the share"] == compared
    for text in texts:
        assert len(text.splitlines()) == 2 + len(cuts) + bool(case.published)


def test_a_compiled_step_that_is_not_replayed_is_an_error(grid, monkeypatch) -> None:
    graphs.compiled(MESH, grid)()
    alone = LAYER._replace(step=lambda module, x, y: lambda: None)
    with pytest.raises(RuntimeError, match="layer: the network is not replayed"):
        graphs.compiled(alone, grid)


def test_what_a_shard_sends_is_what_explain_tells() -> None:
    grid = DryRunGrid({"height": 2, "width": 2})
    x, y = cut(MESH, grid, CPU)
    network = network_alone(MESH, CPU)
    plan = dc.explain(network, MESH.shape, grid.shape, rank=grid.rank, show=False)
    with listening(grid) as traffic, dc.method("overlapped"), torch.no_grad():
        network(x)
    halos = [sum(n for _, n in t.arriving) for t in traffic if t.collective is None]
    assert sum(halos) == sum(layer.halo_bytes for layer in plan.layers) > 0
    assert {peer for t in traffic for peer, _ in t.arriving} == {0, 1, 2}
    with listening(grid) as both, dc.method("overlapped"):
        MESH.step(network, x, y)()
    back = sum(n for t in both if t.collective is None for _, n in t.arriving) - sum(halos)
    assert back == sum(halos[1:]), "the input has no gradient"


def test_calls_that_let_the_host_wait_are_known_by_name() -> None:
    waiting = "cudaStreamSynchronize cuCtxSynchronize cudaMemcpy2D cuMemcpyDtoH_v2 cudaFree"
    going_on = "cudaMemcpyAsync cudaFreeAsync cudaLaunchKernel cudaStreamWaitEvent cudaEventQuery"
    assert all(waits_in(Counter([call])) for call in waiting.split())
    assert not any(waits_in(Counter([call])) for call in going_on.split())


def test_calls_are_those_within_the_step() -> None:
    x = torch.ones(4, requires_grad=True)

    def step() -> None:
        with record_function("cudaLaunchKernel"):
            y = x * 2
        y.register_hook(waiting)
        y.sum().backward()

    def waiting(grad: Tensor) -> None:
        with record_function("cudaStreamSynchronize"):
            pass

    assert calls_of(step) == {"cudaLaunchKernel": 1, "cudaStreamSynchronize": 1}
    assert (
        waits("step", step)
        == "step: the host waits at 1 cudaStreamSynchronize; 1 launches and copies of 2 calls"
    )
    with pytest.raises(RuntimeError, match="hears of no calls of CUDA or HIP"):
        waits("nothing", lambda: x * 2)


def test_a_page_holds_what_is_known_and_what_has_failed(tmp_path: Path) -> None:
    path = tmp_path / "results" / "page.md"
    page, seen = Page(path, "# Head\n"), []
    row = Row("b", "case", "here", "measure", "", 1.0, 1.0, 1.0, 1, 0.001)

    def first() -> Iterator[Row | str]:
        yield row
        seen.append(path.read_text())
        yield "a line"
        raise RuntimeError("out of memory\nand much more")

    late = time.perf_counter() + 3600
    page.add("Works", [Part("first", first), Part("second", lambda: ["another"])], late)
    page.add("Too late", [Part("third", lambda: [row])], time.perf_counter() - 1)
    assert "1 ms" in seen[0] and "first: begun, and not finished" in seen[0]
    text = path.read_text()
    assert "begun" not in text and text.startswith("# Head\n\n## Works\n")
    assert text.index("a line") < text.index("FAILED first: RuntimeError") < text.index("another")
    assert page.failures == [
        *("first: RuntimeError: out of memory", "third: TimeoutError: the time is up")
    ]


def test_what_is_missing_is_named_by_its_wheel(monkeypatch, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("raise RuntimeError('no library')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("benchmarks.gpu.needs.shutil.which", lambda name: None)
    wheels = {"torch": "torch", "not_there": "not-there", "broken": "broken-wheel"}
    assert missing(wheels) == [
        "mpiexec is not on the PATH: bring the wheel mpich",
        "not_there (No module named 'not_there'): bring the wheel not-there",
        "broken (no library): bring the wheel broken-wheel",
    ]


@pytest.mark.parametrize(
    ("kind", "count", "version", "said"),
    [
        ("cuda", 1, "2.28.9", ["NCCL on more than one GPU", "transport nccl"]),
        ("cuda", 1, "2.30.7", ["transport nccl"]),
        ("cuda", 4, "2.28.9", ["transport nccl"]),
        ("xpu", 4, "", ["transport nccl", "streams that sleep", "where the host waits"]),
    ],
)
def test_the_first_lines_say_what_cannot_be_done(
    kind: str, count: int, version: str, said: list[str], monkeypatch
) -> None:
    monkeypatch.delenv("GPU_NCCL", raising=False)
    monkeypatch.setattr("distconv.device.kinds.version_of_library", lambda kind: version)
    monkeypatch.setattr("distconv.device.kinds.why_no_backend", lambda kind: None)
    lines = list(left_out(kind, count))
    assert len(lines) == len(said) and all(map(str.startswith, lines, said))


def test_without_an_accelerator_nothing_begins(capsys, monkeypatch) -> None:
    monkeypatch.setattr(needs, "missing", lambda: [])
    assert needs.main() == 1 and "torch sees no GPU" in capsys.readouterr().err
    monkeypatch.setattr(needs, "found", lambda: ("cuda", 2))
    monkeypatch.setattr(needs, "name_of", lambda device: "a GPU")
    monkeypatch.setattr("distconv.device.kinds.version_of_library", lambda kind: "2.30")
    assert needs.main() == 0
    first, *rest = capsys.readouterr().out.splitlines()
    assert first.startswith("make gpu: 2 x a GPU (cuda), torch ") and "NCCL 2.30" in first
    assert rest and all(line.startswith("make gpu: not done here: ") for line in rest)


def test_all_of_one_rank_is_recorded(tmp_path: Path, grid, monkeypatch) -> None:
    tiny = {"MESH_1K": LAYER, "MESH_2K": PUBLISHED, "UNET": VOLUMES, "COSMOFLOW_512": VOLUMES}
    tiny |= {
        "MESH_1K_HALF": HALF,
        "NETWORKS": (MESH, HALF),
        "LAYERS": (LAYER, LAYER),
        "CONVOLUTIONS": (LAYER, LAYER),
        "SECONDS": 0.0,
    }
    for name, value in tiny.items():
        monkeypatch.setattr(command, name, value)
    # Each profile takes its time.
    monkeypatch.setattr(clock, "peak_on_cpu", lambda make: Peak(2**20, 2**20))
    assert not command.record(tmp_path, CPU, command.on_one_rank(grid), "1 rank")
    steps = LAYER._replace(step=SQUARES), VOLUMES._replace(step=SQUARES), HALF
    for name, value in zip(("MESH_1K", "UNET", "MESH_1K_HALF"), steps, strict=True):
        monkeypatch.setattr(command, name, value)
    assert not command.record(tmp_path, CPU, command.as_graphs(grid), "graphs")
    text = (tmp_path / "gpu-cpu.md").read_text()
    assert text.count("\n## ") == 7 and "IEEE in convolutions" in text
    assert text.count("overlapped, over assembled") == 2
    assert text.count("compiled, over plain torch's graph") == 3
    assert "layer, plain torch: the host waits nowhere; 1 launches and copies of 1 calls" in text
    assert "published: much" in text
    assert text.count("channels last over first") == 2


@pytest.mark.parallel(2)
def test_messages_are_recorded_of_each_transport_there_is(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(command, "SIZES", (1024, 4096))
    monkeypatch.setattr(command, "MESH_1K", LAYER)
    folder = MPI.COMM_WORLD.bcast(tmp_path)
    assert not command.record(folder, CPU, command.on_two_ranks("cpu"), "2 ranks")
    MPI.COMM_WORLD.barrier()
    text = (folder / "gpu-cpu.md").read_text()
    assert "mpi, 1 KiB each way" in text and "a halo, packed, over a copy" in text
    assert "layer, 2 ranks, mpi: the host waits nowhere" in text
    assert "nccl: not here. " in text
    rows = list(messages(dc.ProcessGrid(height=2, device="cpu"), (1024,), 0.0))
    assert MPI.COMM_WORLD.bcast(rows) == rows


def test_steps_on_a_gpu_are_shown_by_their_ends_and_limited(tmp_path: Path, capsys) -> None:
    session = Session(tmp_path, 3600)
    one = Step(
        "1 rank", 30, [["sh", "-c", "echo first; echo $HERE"]], more={"HERE": "last"}, lines=1
    )
    assert session.run(one) and not session.failed
    several = Step("2 ranks", 30, [["echo", "a"], ["false"], ["echo", "b"]], at_a_time=2)
    assert not session.run(several) and session.failed
    endless = Step("endless", 6, [["sleep", "100"]])
    assert not session.run(endless)
    session = Session(tmp_path, 0)
    assert not session.run(Step("late", 30, [["echo", "never"]]))
    said = capsys.readouterr().out
    assert "##### 1 rank: status [0]," in said and "\nlast\n" in said and "first" not in said
    assert "##### 2 ranks: status [0, 1, 0]," in said and "\na\nb\n" in said
    assert "##### endless: status [124]," in said
    assert "the time is up; left out: echo never" in said
    assert (tmp_path / "1-rank-0.txt").read_text() == "first\nlast\n"


def test_every_file_of_functions_is_run_on_a_gpu() -> None:
    files = [command[-1] for command in functions(2)]
    assert "tests/ops/norm/test_properties.py" in files and len(files) > 8
    assert "tests/ops/test_coverage.py" not in files
