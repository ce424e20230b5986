"""Scripts from Horovod's documentation, with the import changed, train as the serial program."""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from mpi4py import MPI
from torch.utils.data.distributed import DistributedSampler

import distconv.horovod as hvd
from tests.support.everywhere import on_rank_zero
from tests.support.jobs import end_of, forked, start, started, torchrun

WORLD = MPI.COMM_WORLD
SCRIPTS = Path(__file__).with_name("scripts")


@pytest.fixture(autouse=True)
def shut_down(in_double: None) -> Iterator[None]:
    yield
    hvd.shutdown()


def run(name: str, *arguments: str) -> dict[str, Any]:
    """Run a script on the ranks of the tests; return its variables."""
    with mock.patch("sys.argv", [name, *arguments]):
        return runpy.run_path(str(SCRIPTS / f"{name}.py"))


def serial_steps(variables: dict[str, Any], epoch: int, size: int) -> Iterator[tuple[Any, ...]]:
    """Yield for each step the batch of every rank."""
    dataset = variables["dataset"]
    per_rank = []
    for rank in range(WORLD.size):
        sampler = DistributedSampler(dataset, WORLD.size, rank)
        sampler.set_epoch(epoch)
        per_rank.append(list(sampler))
    for first in range(0, len(per_rank[0]), size):
        yield tuple(dataset[part[first : first + size]] for part in per_rank)


@pytest.mark.parallel([1, 2, 4])
@pytest.mark.parametrize("options", [(), ("--gradient-predivide-factor", "2.0")])
def test_the_mnist_script_trains_as_the_serial_program(options: tuple[str, ...]) -> None:
    found = run("mnist", *options)
    torch.manual_seed(42)
    model = found["Net"]()
    lr = 0.05 * WORLD.size
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.5)
    losses = []
    for epoch in range(2):
        for batches in serial_steps(found, epoch, 4):
            optimizer.zero_grad()
            data, target = (torch.cat(parts) for parts in zip(*batches, strict=True))
            loss = torch.nn.functional.nll_loss(model(data), target)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    torch.testing.assert_close(found["losses"], losses, rtol=1e-10, atol=0)
    compare(found["model"], model)
    assert found["model"].unused.weight.grad is None
    assert isinstance(found["optimizer"], torch.optim.SGD)


@pytest.mark.parallel([2])
def test_gradients_in_half_precision_are_close() -> None:
    with_halves, plain = run("mnist", "--fp16-allreduce"), run("mnist")
    compare(with_halves["model"], plain["model"], 1e-2)
    everyone = WORLD.allgather([p.tolist() for p in with_halves["model"].parameters()])
    assert everyone == everyone[:1] * WORLD.size


@pytest.mark.parallel([1, 2, 4])
def test_the_imagenet_script_trains_as_the_serial_program_and_resumes(folder: Path) -> None:
    form = ("--checkpoint-format", str(folder / "{epoch}.pth"))
    found = run("imagenet", *form)
    torch.manual_seed(42)
    layers = torch.nn
    model = layers.Sequential(
        layers.Conv2d(3, 4, 3, stride=2),
        layers.ReLU(),
        layers.AdaptiveAvgPool2d(1),
        layers.Flatten(),
        layers.Linear(4, 5),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9, weight_decay=0.01)
    for epoch in range(2):
        steps = list(serial_steps(found, epoch, 6))
        for number, batches in enumerate(steps):
            rate = 1.0
            if epoch < 1:
                passed = epoch + (number + 1) / len(steps)
                rate = (passed * (WORLD.size - 1) + 1) / WORLD.size
            optimizer.param_groups[0]["lr"] = 0.05 * WORLD.size * 3 * rate
            optimizer.zero_grad()
            for data, target in batches:
                subs = list(zip(data.split(2), target.split(2), strict=True))
                for x, y in subs:
                    loss = torch.nn.functional.cross_entropy(model(x), y)
                    (loss / len(subs) / WORLD.size).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
    compare(found["model"], model)
    WORLD.barrier()
    on_rank_zero((folder / "2.pth").unlink)
    again = run("imagenet", *form)
    assert again["resume_from_epoch"] == 1
    compare(again["model"], model)


def compare(actual: torch.nn.Module, expected: torch.nn.Module, tolerance: float = 1e-10) -> None:
    for p, q in zip(actual.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=tolerance, atol=tolerance)


def test_the_script_runs_under_torchrun_without_mpi(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    text = (SCRIPTS / "mnist.py").read_text()
    script.write_text(text.replace("\nimport argparse\n", _WITHOUT_MPI, 1))
    end = end_of(started([*torchrun(2), *forked(script), "--epochs=1"]))
    assert end.returncode == 0, end.stderr
    assert end.stdout.count("on 2 ranks") == 1


_WITHOUT_MPI = """
import argparse, sys
sys.modules["mpi4py"] = None
"""


JOINING = """
import torch
import distconv.horovod as hvd

hvd.init()
model = torch.nn.Linear(2, 1)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0))
for _ in range(2 * hvd.rank()):
    optimizer.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
assert hvd.join() == 1
"""


def test_a_rank_without_any_samples_joins_at_once(tmp_path: Path) -> None:
    # In a job of its own: nothing has been reduced before.
    script = tmp_path / "program.py"
    script.write_text(JOINING)
    end = end_of(start(script, 2, fresh=False))
    assert end.returncode == 0, end.stderr
