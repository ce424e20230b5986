"""Whole training steps launch few kernels more than plain torch's, counted on dry grids."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from benchmarks.gpu.cases import Case, cut, module, plain, trained
from distconv import method
from distconv.planning.dry_run import DryRunGrid
from distconv.tensor.ownership import own
from examples.mesh_tangling.network import mesh_tangling_1k
from examples.unet3d.network import UNet3d
from tests.support.kernels import kernels_of
from tests.support.synchronized_kernels import as_on_accelerators

# Networks of the published depth, on small samples.
MESH = Case(
    *("mesh-tangling 1K", (1, 18, 128, 128), partial(mesh_tangling_1k, 0.05, 128)),
    *(trained(F.mse_loss), torch.rand),
)
UNET = Case(
    *(
        "3-D U-Net",
        (1, 1, 32, 32, 32),
        partial(UNet3d, classes=3, width=0.1),
        trained(F.cross_entropy),
    ),
    lambda shape: torch.randint(0, 3, (shape[0], *shape[2:])),
)


def launches(case: Case, extents: dict[str, int], on_accelerators: bool) -> tuple[int, int]:
    """Return the kernels of a step of one rank, and of plain torch on its block."""
    grid, device = DryRunGrid(extents), torch.device("cpu")
    network = module(case, device)
    own(network.parameters(), ranks=1)
    # Tests on one rank overlap all blocks by default.
    with method("assembled"), as_on_accelerators() if on_accelerators else nullcontext():
        cut_step = case.step(network, *cut(case, grid, device))
        made, serial = kernels_of(cut_step), kernels_of(plain(case, grid, device))
    del made["promote_types"], serial["promote_types"]  # which launches nothing
    return made.total(), serial.total()


@pytest.mark.parametrize(
    ("case", "extents", "on_accelerators", "on_cpus"),
    [
        (MESH, {"height": 2}, 518, 796),
        (MESH, {"height": 4, "width": 4}, 610, 792),
        (UNET, {"depth": 2}, 280, 454),
        (UNET, {"height": 4, "width": 4}, 328, 428),
    ],
    ids=lambda p: p.name if isinstance(p, Case) else str(p),
)
def test_a_step_of_a_cut_network_launches_few_kernels(
    case: Case, extents: dict[str, int], on_accelerators: int, on_cpus: int
) -> None:
    assert launches(case, extents, True)[0] <= on_accelerators
    assert launches(case, extents, False)[0] <= on_cpus


@pytest.mark.parametrize("case", [MESH, UNET], ids=lambda case: case.name)
def test_a_step_on_one_rank_launches_what_plain_torch_does(case: Case) -> None:
    made, serial = launches(case, {}, True)
    # The cross entropy first checks labels on an empty batch.
    assert made - serial == (0 if case is MESH else 2)
