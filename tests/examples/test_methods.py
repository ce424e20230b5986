"""The mesh example learns by every method: on 4 ranks that train, and servers where needed."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from mpi4py import MPI

import distconv as dc
from distconv.data.checkpoint import checkpoints_in
from distconv.training import server_state
from examples.mesh_tangling import compare_methods
from examples.mesh_tangling.train import main
from examples.trainer.apart import Share, speaking_of_divergence
from examples.trainer.building import Diverged
from tests.support.everywhere import on_rank_zero
from tests.support.jobs import end_of, start
from tests.support.mesh_runs import REPOSITORY, arguments, write_file

WORLD = MPI.COMM_WORLD
GRID = {"sample": 2, "height": 2}


@pytest.fixture
def file(folder: Path) -> Path:
    path = folder / "data.h5"
    on_rank_zero(lambda: write_file(path, samples=8))
    return path


def learned(output: Path) -> list[dict[str, Any]]:
    metrics = json.loads((output / "metrics.json").read_text())
    history: list[dict[str, Any]] = metrics["history"]
    for record in history:
        assert math.isfinite(record["loss"]) and len(record["step_losses"]) == 2
    assert (output / "prediction.png").stat().st_size
    return history


@pytest.mark.parallel(4)
def test_workers_on_all_ranks_learn(file: Path, folder: Path) -> None:
    options = "--optimizer lars --learning-rate 2 --recipe polynomial --warmup-epochs 1"
    main(arguments(file, folder / "run", GRID, 3, *options.split(), "--wire", "bfloat16"))
    WORLD.barrier()  # the first worker writes the results
    history = learned(folder / "run")
    first, *_, last = (sum(record["step_losses"]) for record in history)
    assert last < first


@pytest.mark.parallel(2)
@pytest.mark.parametrize(
    ("method", "saved"),
    [("--lag 1", ["."]), ("--method easgd --period 3", ["worker-0", "worker-1"])],
)
def test_a_run_with_a_method_continues_with_the_same_numbers(
    file: Path, folder: Path, method: str, saved: list[str]
) -> None:
    options = f"{method} --recipe constant --warmup-epochs 2 --reference-batch-size 2"
    for name, ends in {"straight": (2,), "continued": (1, 2)}.items():
        for number, end in enumerate(ends):
            more = ["--resume", str(folder / name)] if number else []
            main(arguments(file, folder / name, {"sample": 2}, end, *options.split(), *more))
            WORLD.barrier()
    for place in saved:
        straight, continued = (
            torch.load(checkpoints_in(folder / name / place)[0], weights_only=True)
            for name in ("straight", "continued")
        )
        for part in ("model", "optimizer"):
            torch.testing.assert_close(straight[part], continued[part], rtol=1e-9, atol=1e-12)
        assert straight["step"] == continued["step"] == 2


def test_a_worker_of_several_ranks_learns_under_a_server(tmp_path: Path, file: Path) -> None:
    output = tmp_path / "run"
    options = "--method hybrid --groups 1 --learning-rate 0.02 --recipe cosine"
    train_in_a_job(tmp_path, 3, arguments(file, output, {"sample": 2}, 3, *options.split()))
    first, *_, last = (sum(record["step_losses"]) for record in learned(output))
    assert last < first
    report = json.loads((output / "server-0.json").read_text())
    workers = json.loads((output / "metrics.json").read_text())["workers"]
    assert workers == 1 and report["samples"] == 24
    assert sum(report["staleness"].values()) == report["updates"]
    assert all(value.isfinite().all() for value in server_state(output).values())


def test_workers_under_a_server_continue(tmp_path: Path, file: Path) -> None:
    straight, continued = tmp_path / "straight", tmp_path / "continued"
    options = "--method downpour --period 3 --optimizer sgd --recipe constant --warmup-epochs 2"
    words = options.split()
    train_in_a_job(tmp_path, 2, arguments(file, straight, {}, 3, *words))
    train_in_a_job(tmp_path, 2, arguments(file, continued, {}, 1, *words))
    more = ["--resume", str(continued)]
    train_in_a_job(tmp_path, 2, arguments(file, continued, {}, 3, *words, *more))
    report = json.loads((continued / "server-0.json").read_text())
    assert report["samples"] == 24
    assert learned(continued)[2]["loss"] == pytest.approx(learned(straight)[2]["loss"], 1e-9)
    torch.testing.assert_close(
        server_state(continued), server_state(straight), rtol=1e-9, atol=1e-12
    )


def train_in_a_job(folder: Path, ranks: int, line: list[str]) -> None:
    """Run the example on so many ranks of a job of its own."""
    script = folder / "program.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {str(REPOSITORY)!r})\n"
        "from examples.mesh_tangling.train import main\nmain(sys.argv[1:])\n"
    )
    end = end_of(start(script, ranks, *line, fresh=False))
    assert end.returncode == 0, end.stderr


@pytest.mark.parallel([2])
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("--lag 1 --wire float16", "--lag and --wire do not go together"),
        ("--recipe cosine --warmup-epochs 1", "leave none of --epochs 1"),
        ("--method easgd --lag 1", "--lag is for --method sync"),
        ("--method downpour", "there are 2, and the grid is sample=2"),
        ("--method hybrid --groups 3 --grid sample=1", "--groups 3 does not divide sample=1"),
        (
            "--method easgd --resume absent",
            "absent holds no state that all ranks of --method easgd",
        ),
        ("--method easgd --data absent.h5", "absent.h5: no such file"),
    ],
)
def test_wrong_options_are_one_line_on_one_rank(
    file: Path, folder: Path, wrong: str, message: str, capsys: Any
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments(file, folder / "run", {"sample": 2}, 1, *wrong.split()))
    assert caught.value.code == 2
    said = WORLD.allgather(capsys.readouterr().err)
    assert [message in text for text in said if text] == [True], said


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_workers_share_out_each_mini_batch(workers: int) -> None:
    shares = [Share(w, workers, 20, 6, seed=4) for w in range(workers)]
    whole = Share(0, 1, 20, 6, seed=4)
    for epoch in range(2):
        parts = [share.batches(epoch) for share in shares]
        for batch, *others in zip(whole.batches(epoch), *parts, strict=True):
            assert sorted(batch) == sorted(n for other in others for n in other)
    assert whole.batches(0) != whole.batches(1)


@pytest.mark.usefixtures("drawn")
def test_the_comparison_draws_what_has_been_run(tmp_path: Path) -> None:
    history = [
        {"step_losses": [0.5] * 3, "samples_per_second": 12.0, "loss": 0.25, "iou": 0.5},
        {"step_losses": [0.4] * 3, "samples_per_second": 6.0, "loss": 0.125, "iou": 0.75},
    ]
    metrics = {"batch_size": 8, "history": history}
    (tmp_path / "metrics.json").write_text(json.dumps(metrics))
    server = {"updates": 4, "samples": 48, "staleness": {"0": 1, "1": 3}}
    (tmp_path / "server-0.json").write_text(json.dumps(server))
    course = compare_methods.read(tmp_path)
    assert course["samples"] == [24, 48] and course["seconds"] == [2, 6]
    compare_methods.draw(tmp_path / "picture.png", {"Downpour": course, "in step": course})
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    line = "| Downpour | 48 | 6 | 0.1250 | 0.750 | 0.75 |"
    assert line in compare_methods.table({"Downpour": course})


@pytest.mark.parallel([2])
def test_the_first_rank_of_a_worker_says_why_it_has_diverged(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(Diverged), speaking_of_divergence(dc.ProcessGrid(height=2), 1):
        raise Diverged("the loss is nan")
    said = "" if WORLD.rank else "error: worker 1: the loss is nan\n"
    assert capsys.readouterr().err == said
