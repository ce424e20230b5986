r"""Segment one volume that is cut over all ranks, larger than those of the training set.

    mpiexec -n 4 python -m examples.unet3d.segment \
        --checkpoint run --size 129,131,127 --grid depth=2,height=2 --output segmentation.zarr

Each rank makes its box of a synthetic volume (or reads it from the file of `--volume`), computes
its box of the labels, and writes it: no rank ever holds a volume. The output is zarr, HDF5 or npy,
by its suffix.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

import distconv as dc
from distconv.data import on_rank_zero
from distconv.grid.ranks import world
from distconv.transport.interface import ObjectCommunicator
from examples.segmenting.dice import count, dice_coefficients
from examples.trainer.arguments import add_grid, command_line, errors_in_one_line, natural
from examples.trainer.building import make_grid
from examples.trainer.ranks import boxes_of

from .data import Volumes, made_volume
from .generate import side_lengths
from .network import UNet3d
from .plots import plot_slices
from .tomography import CLASSES
from .train import Segmentation

LARGEST_PICTURE = 2**24
"""The most voxels of a volume whose slices are drawn, as rank 0 holds it."""


def segment(
    run: Path,
    volume: dc.data.Dataset,
    output: Path,
    picture: Path | None = None,
) -> dict[str, float]:
    """Segment the first volume of a dataset and write the labels, one box a rank. Collective.

    Args:
        run: the folder of a training run.
        volume: an image (1, D, H, W) and its labels (D, H, W).
        output: the file or folder of the labels, (1, D, H, W) in 8 bits.
        picture: a file for slices of the result, for volumes that rank 0 can hold.

    Returns the Dice coefficient of each class. Raises DataError where the checkpoint or the volume
    cannot be read, or the output cannot be written.
    """
    grid = volume.grid
    model = load_network(run, grid)
    with torch.no_grad():
        image, truth = volume.batch([0])
        predicted = model(image).argmax(1)
    dc.data.save(output, predicted.to(torch.uint8))
    coefficients = dice_coefficients(count(predicted, truth, len(CLASSES)))
    if picture is not None and truth.numel() <= LARGEST_PICTURE:
        below, true, guess = (
            x.full_tensor()[0].cpu().numpy() for x in (image[:, 0], truth, predicted)
        )
        boxes = boxes_of(image, grid)
        title = f"a volume of {' x '.join(map(str, true.shape))} voxels on {grid.size} ranks"
        on_rank_zero(grid, lambda: plot_slices(picture, below, true, guess, boxes, title))
    return dict(zip(CLASSES, coefficients, strict=True))


def load_network(run: Path, grid: dc.ProcessGrid) -> nn.Module:
    """Return the network of a training run, with its weights, in evaluation mode. Collective."""

    def width() -> float:
        path = run / "metrics.json"
        if not path.exists():
            raise FileNotFoundError(f"{path}: no such file; train first, or name another folder")
        return float(json.loads(path.read_text())["width"])

    model = dc.parallelize(UNet3d(1, len(CLASSES), on_rank_zero(grid, width)), grid)
    dc.load_checkpoint(run, model)
    return model.eval()


def main(arguments: Sequence[str] | None = None, comm: ObjectCommunicator | None = None) -> None:
    """Run the command line; errors are one line on rank 0, with exit status 2."""
    if comm is None:
        comm = world().for_program()
    parser, add = command_line("unet3d.segment", __doc__ or "", comm)
    add("--checkpoint", "folder of a training run", type=Path, required=True)
    add("--output", "zarr folder, HDF5 or npy file to write", type=Path, required=True)
    add("--volume", "file of `generate`, whose first volume is taken", type=Path)
    add("--size", "voxels of a volume that is made", type=side_lengths, default="65")
    add("--seed", "of the volume that is made", type=natural, default=2)
    add("--picture", "PNG file for slices of the result", type=Path)
    add_grid(add, Segmentation.axes, "depth=-1")
    args = parser.parse_args(arguments)
    with errors_in_one_line(comm):
        grid = make_grid(args, comm)
        if args.volume is not None:
            volume: dc.data.Dataset = Volumes(args.volume, grid, torch.float32)
        else:
            volume = made_volume(args.seed, 0, args.size, grid, torch.float32)
        found = segment(args.checkpoint, volume, args.output, args.picture)
    if comm.rank == 0:
        listed = ", ".join(f"{name} {value:.3f}" for name, value in found.items())
        print(f"{args.output}: Dice of {listed}", flush=True)


if __name__ == "__main__":
    main()
