"""Programs for LBANN's package, with the import changed, compute what serial torch does."""

from __future__ import annotations

import copy
import runpy
from math import prod
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from mpi4py import MPI
from torch import nn

from tests.support.jobs import end_of, forked, started, torchrun

WORLD = MPI.COMM_WORLD
SCRIPTS = Path(__file__).with_name("scripts")
close = torch.testing.assert_close
pytestmark = pytest.mark.usefixtures("in_double")

STRATEGIES = {
    1: [((1,), (2,))],
    2: [((2,), (2,)), ((2,), (3,)), ((1,), (2,))],
    4: [((4,), (2,)), ((2, 2), (2, 3)), ((2, 1), (3, 2)), ((1,), (2,))],
}[max(1, min(WORLD.size, 4))]


def run(name: str, *arguments: object) -> dict[str, Any]:
    """Run a script on the ranks of the tests; return its variables."""
    with mock.patch("sys.argv", [name, *map(str, arguments)]):
        return runpy.run_path(str(SCRIPTS / f"{name}.py"))


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parallel([1, 2, 4])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("way", ["to_ddp", "to_replicate", "none"])
def test_a_convolution_has_the_gradients_of_serial_replicas(
    strategy: tuple[tuple[int, ...], tuple[int, ...]], way: str
) -> None:
    shards, dims = strategy
    found = run("convolution", "--num-shards", *shards, "--shard-dim", *dims, "--way", way)
    ps, replicas = found["ps"], WORLD.size // prod(shards)
    assert (ps.ddp_ranks, ps.ddp_ind) == (replicas, WORLD.rank // prod(shards))
    plain = _convolution_on_all_replicas(found, prod(shards))
    close(gradients(found["model"]), [g / replicas for g in gradients(plain)])


def plain_copy(found: dict[str, Any]) -> nn.Module:
    """Return the script's model as serial torch would have it, without gradients."""
    plain: nn.Module = copy.deepcopy(found["layers"]())
    plain.load_state_dict(found["model"].state_dict())
    return plain


def _convolution_on_all_replicas(found: dict[str, Any], ranks: int) -> nn.Module:
    """Compare this replica's results; return the plain module with the sum of all gradients."""
    plain = plain_copy(found)
    for replica, x in enumerate(WORLD.allgather(found["x"].detach())[::ranks]):
        x.requires_grad_()
        y = plain(x)
        y.square().mean().backward()
        if replica == found["ps"].ddp_ind:
            close(found["dcy"].to_replicate(), y)
            close(found["x_grad"], x.grad)
    return plain


@pytest.mark.parallel([2, 4])
def test_losses_of_samples_on_their_ranks_are_added_up_or_averaged_by_the_factor() -> None:
    n = WORLD.size
    given = ("--num-shards", n, "--batch-size", n, "--way", "to_ddp")
    added = run("convolution", *given)
    averaged = run("convolution", *given, "--grad-reduction-factor", n)
    assert len(averaged["y"]) == 1
    plain = plain_copy(averaged)
    plain(WORLD.bcast(averaged["x"].detach())).square().mean().backward()
    close(gradients(averaged["model"]), gradients(plain))
    close(gradients(added["model"]), [n * g for g in gradients(plain)])


GRIDS = {1: [(1, 1, 1)], 2: [(2, 1, 1), (1, 1, 1)], 4: [(2, 2, 1), (1, 1, 2), (4, 1, 1)]}


@pytest.mark.parallel([1, 2, 4])
@pytest.mark.parametrize("shards", GRIDS[max(1, min(WORLD.size, 4))])
def test_segmentation_trains_as_the_mean_of_serial_replicas(shards: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    found = run("segmentation", "--num-shards", *shards)
    torch.manual_seed(0)
    plain = found["UNet"]()
    optimizer, scheduler = found["parts_of"](plain)
    replicas, losses = WORLD.size // prod(shards), []
    for step in range(3):
        total = 0.0
        for replica in range(replicas):
            images, masks = found["batch_of"](step, replica)
            loss, _ = found["loss_of"](plain(images), masks, found["weights"], None)
            (loss / replicas).backward()
            total += loss.item() / replicas
        torch.nn.utils.clip_grad_norm_(plain.parameters(), max_norm=0.5)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(total)
    close(found["losses"], losses, rtol=1e-9, atol=0)
    for (name, p), q in zip(found["model"].named_parameters(), plain.parameters(), strict=True):
        assert name.startswith("module.")
        close(p, q, rtol=1e-8, atol=1e-10)
    with torch.no_grad():
        images, masks = found["batch_of"](2, found["ps"].ddp_ind)
        logits = plain(images)
        close(found["logits"].full_tensor(), logits, rtol=1e-8, atol=1e-10)
        planes = [
            nn.functional.one_hot(x, 3).permute(0, 4, 1, 2, 3).double()
            for x in (logits.argmax(1), masks)
        ]
        close(found["hard"].full_tensor(), found["dice"](*planes, None))


@pytest.mark.parallel([2])
def test_segmentation_under_autocast_is_close() -> None:
    torch.set_default_dtype(torch.float32)
    exact, half = (run("segmentation", *options) for options in ((), ("--half",)))
    assert half["logits"].dtype == torch.bfloat16
    close(half["losses"], exact["losses"], rtol=0.05, atol=0)


@pytest.mark.parametrize("script", ["convolution", "segmentation"])
def test_the_scripts_run_under_torchrun_without_mpi(script: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    text = (SCRIPTS / f"{script}.py").read_text()
    program.write_text(text.replace("import argparse\n", _WITHOUT_MPI, 1))
    shards = ["2"] if script == "convolution" else ["2", "1", "1"]
    end = end_of(started([*torchrun(2), *forked(program), "--num-shards", *shards]))
    assert end.returncode == 0, end.stderr
    assert end.stdout.count("of 2") == 2


_WITHOUT_MPI = """
import argparse, sys
sys.modules["mpi4py"] = None
"""
