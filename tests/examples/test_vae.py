"""The demo of autoencoders, with a small one in place of those of diffusers."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from mpi4py import MPI
from torch import Tensor, nn


class Small(nn.Module):
    """An autoencoder that decodes in tiles of half the sides, where that is enabled."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(3, 4, 3, 2, 1)
        self.up = nn.Sequential(
            nn.Conv2d(4, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.Upsample(scale_factor=2),
            nn.Conv2d(8, 3, 3, padding=1),
        )  # fmt: skip
        self.tiled = False

    def enable_tiling(self) -> None:
        """Decode in tiles from now on."""
        self.tiled = True

    def decode(self, latents: Tensor) -> SimpleNamespace:
        """Return images."""
        if not self.tiled:
            return SimpleNamespace(sample=self.up(latents))
        rows = (torch.cat([self.up(x) for x in r.chunk(2, 3)], 3) for r in latents.chunk(2, 2))
        return SimpleNamespace(sample=torch.cat([*rows], 2))

    def encode(self, images: Tensor) -> SimpleNamespace:
        """Return latents."""
        return SimpleNamespace(latent=self.down(images))


@pytest.mark.parallel([2, 4])
def test_the_demo_tells_that_ranks_are_exact_and_tiles_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = ModuleType("diffusers")
    package.Small = Small  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "diffusers", package)
    for name in ("demo", "measure", "networks"):
        monkeypatch.delitem(sys.modules, f"examples.vae.{name}", raising=False)
    from examples.vae import demo, networks

    monkeypatch.setattr(demo, "AUTOENCODERS", (networks.Autoencoder("Small", 4, 2),))
    monkeypatch.setattr(demo, "SIZES", {"images": 32, "videos": 32})
    comm = MPI.COMM_WORLD
    output = Path(comm.bcast(str(tmp_path))) / "new" / "folder"
    demo.run(output)
    monkeypatch.setattr(demo, "compare", None)
    if comm.rank == 0:
        (output / "vae.md").unlink()
    demo.run(output)  # of the rows that are there
    if comm.rank:
        return
    assert (output / "Small.png").exists()
    rows = [line.strip("| \n").split(" | ") for line in (output / "vae.md").open()][2:]
    ways = ["one rank", "2 ranks", "4 ranks"][: 2 if comm.size == 2 else 3]
    assert [row[3] for row in rows] == [*ways, "tiles", *ways]
    errors = {(row[1], row[3]): float(row[6]) for row in rows if row[3] != "one rank"}
    tiles = errors.pop(("decode", "tiles"))
    assert max(errors.values()) < 1e-5 < 1e-2 < tiles
