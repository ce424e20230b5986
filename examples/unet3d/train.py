"""Train the 3-D U-Net on tomographic volumes cut over many ranks.

    mpiexec -n 4 python -m examples.unet3d.train \\
        --data train.h5 --validation validation.h5 --grid depth=2,height=2 --output run

or without MPI, by `torchrun --nproc-per-node 4 -m examples.unet3d.train ...`.
Interrupted at any moment, it continues after the last whole epoch, on the same grid or another,
with `--resume run`. `examples.unet3d.segment` applies it to a volume of any size.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import distconv as dc
from distconv.data import on_rank_zero
from distconv.transport.interface import ObjectCommunicator
from examples.segmenting.dice import evaluate
from examples.trainer.arguments import Add, positive
from examples.trainer.example import PRECISIONS, Example
from examples.trainer.ranks import boxes_of, on_one_rank
from examples.trainer.training import run

from .data import Volumes
from .network import UNet3d
from .plots import plot_loss, plot_slices
from .score import SegmentationScore, segmentation_loss
from .tomography import CLASSES

USAGE = __doc__ or ""


class Segmentation(Example[Volumes, UNet3d]):
    """The task of finding the class of each voxel of a tomographic volume."""

    name = "unet3d"
    description = USAGE
    axes = ("sample", "channel", "filter", "depth", "height", "width")
    defaults = {"epochs": 20, "batch_size": 4}
    decisive = ("width", "augment")
    score = SegmentationScore
    pictures = {
        "slices.png": "a volume nobody trained on: truth, prediction, differences and ranks",
        "loss.png": "loss and Dice coefficients of every epoch",
    }

    def add_arguments(self, add: Add) -> None:
        add("--width", "multiplies the channels of the network", type=positive(float), default=1.0)
        add("--augment", "flip training samples at random", action="store_true")

    def open(self, args: argparse.Namespace, grid: dc.ProcessGrid) -> tuple[Volumes, Volumes]:
        dtype = PRECISIONS[args.precision]
        training = Volumes(args.data, grid, dtype, args.augment)
        return training, Volumes(args.validation, grid, dtype)

    def build_model(self, args: argparse.Namespace) -> UNet3d:
        """Return the network, which takes volumes of any size."""
        return UNet3d(1, len(CLASSES), args.width)

    def loss(self, model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        """Return cross entropy plus Dice loss."""
        image, labels = batch
        return segmentation_loss(model(image), labels)

    def evaluate(self, model: nn.Module, batches: Iterable[Sequence[Any]]) -> SegmentationScore:
        model.eval()
        loss, coefficients = evaluate(model, segmentation_loss, batches, len(CLASSES))
        return SegmentationScore(loss, *coefficients)

    def draw(
        self,
        args: argparse.Namespace,
        model: nn.Module,
        validation: Volumes,
        history: list[dict[str, Any]],
    ) -> None:
        """Write loss.png, and slices.png of the first volume of the validation set."""
        model.eval()
        with torch.no_grad():
            image, truth = validation.batch([0])
            predicted = model(image).argmax(1)
        boxes = boxes_of(image, validation.grid)
        alone = on_one_rank(lambda: UNet3d(1, len(CLASSES), args.width), model, image)
        below, true, guess = (
            x.full_tensor()[0].cpu().numpy() for x in (image[:, 0], truth, predicted)
        )

        def write() -> None:
            plot_loss(args.output / "loss.png", history)
            title = f"{args.validation}, the first volume"
            if alone is not None:
                others = int((alone().argmax(1)[0].cpu().numpy() != guess).sum())
                title += f"; one rank predicts another class in {others} of {guess.size} voxels"
            plot_slices(args.output / "slices.png", below, true, guess, boxes, title)

        on_rank_zero(validation.grid, write)


def main(arguments: Sequence[str] | None = None, comm: ObjectCommunicator | None = None) -> None:
    """Train on the ranks of `comm`; errors are one line on rank 0, with exit status 2."""
    run(Segmentation(), arguments, comm)


if __name__ == "__main__":
    main()
