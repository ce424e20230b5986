r"""Train the benchmark's U-Net on volumes of fractals cut over many ranks, to a validation Dice.

    mpiexec -n 4 python -m examples.fractals.train \
        --data train.h5 --validation validation.h5 --grid depth=2,height=2 --output run

or without MPI, by `torchrun --nproc-per-node 4 -m examples.fractals.train ...`. Interrupted at any
moment, it continues after the last whole epoch, on the same grid or another, with `--resume run`.
It ends when the mean Dice coefficient of the classes of fractals reaches `--target`;
`examples.fractals.merit` measures the time to this target, over several seeds.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
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

from .data import Fractals
from .network import STATISTICS, UNet
from .plots import plot_loss, plot_volume
from .score import FractalScore, class_weights, fractal_loss

USAGE = __doc__ or ""

LARGEST_PICTURE = 2**24
"""The most voxels of a volume that is drawn, as rank 0 holds it."""


class FractalSegmentation(Example[Fractals, UNet]):
    """The task of finding the fractal of each point in a volume."""

    name = "fractals"
    description = USAGE
    axes = ("sample", "channel", "filter", "depth", "height", "width")
    defaults = {"epochs": 150, "batch_size": 1, "recipe": "restarts"}
    decisive = ("channels", "autocast", "statistics", "target")
    score = FractalScore
    pictures = {
        "volume.png": "a volume nobody trained on: points, mask, prediction, errors and ranks",
        "loss.png": "loss and Dice coefficients of every epoch",
    }

    def add_arguments(self, add: Add) -> None:
        add("--channels", "of the network at full resolution", type=positive(int), default=64)
        add("--autocast", "compute in bfloat16 where torch.autocast does", action="store_true")
        add("--recompute", "compute activations anew in the backward pass", action="store_true")
        add(
            "--statistics",
            "of group norms: of whole samples, or of each rank's block, which is not exact",
            choices=STATISTICS,
            default="global",
        )
        add("--target", "validation Dice that ends training", type=positive(float), default=0.95)

    def open(self, args: argparse.Namespace, grid: dc.ProcessGrid) -> tuple[Fractals, Fractals]:
        dtype = PRECISIONS[args.precision]
        training = Fractals(args.data, grid, dtype)
        self._autocast = args.autocast
        self._weights = class_weights(training.facts["fractions"])
        self._scale = training.facts["scale"]
        return training, Fractals(args.validation, grid, dtype)

    def build_model(self, args: argparse.Namespace) -> UNet:
        """Return the network, whose levels follow from the scale of the samples."""
        return UNet(len(self._weights), self._scale, args.channels, args.statistics, args.recompute)

    def check(
        self, args: argparse.Namespace, model: UNet, training: Fractals, validation: Fractals
    ) -> None:
        """Raise `ValueError` for samples of other classes or scale, and a target out of reach."""
        if args.target > 1:
            raise ValueError(f"--target {args.target:g} is no Dice coefficient; give one up to 1")
        for name in ("scale", "seed", "categories"):
            given, expected = validation.facts[name], training.facts[name]
            if given != expected:
                raise ValueError(
                    f"{args.validation} has {name} {given}, {args.data} has {expected}; generate "
                    "both with the same"
                )

    def loss(self, model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        """Return weighted cross entropy plus Dice loss."""
        image, labels = batch
        return fractal_loss(self._predict(model, image), labels, self._weights)

    def evaluate(self, model: nn.Module, batches: Iterable[Sequence[Any]]) -> FractalScore:
        model.eval()
        loss = partial(fractal_loss, weights=self._weights)
        predict = partial(self._predict, model)
        total, (_, *of_fractals) = evaluate(predict, loss, batches, len(self._weights))
        return FractalScore(total, sum(of_fractals) / len(of_fractals), min(of_fractals))

    def is_done(self, args: argparse.Namespace, record: Mapping[str, Any]) -> bool:
        return bool(record["dice"] >= args.target)

    def draw(
        self,
        args: argparse.Namespace,
        model: nn.Module,
        validation: Fractals,
        history: list[dict[str, Any]],
    ) -> None:
        """Write loss.png, and volume.png of the first volume of the validation set."""
        on_rank_zero(
            validation.grid, lambda: plot_loss(args.output / "loss.png", history, args.target)
        )
        model.eval()
        with torch.no_grad():
            image, truth = validation.batch([0])
            predicted: Any = self._predict(model, image).argmax(1)
        if truth.numel() > LARGEST_PICTURE:
            return
        boxes = boxes_of(image, validation.grid)
        alone = None
        if not args.autocast:
            alone = on_one_rank(lambda: self.build_model(args), model, image)
        true, guess = (x.full_tensor()[0].cpu().numpy() for x in (truth, predicted))

        def write() -> None:
            title = f"{args.validation}, the first volume"
            if alone is not None:
                others = int((alone().argmax(1)[0].cpu().numpy() != guess).sum())
                title += f"; one rank predicts another class in {others} of {guess.size} voxels"
            plot_volume(args.output / "volume.png", true, guess, boxes, title)

        on_rank_zero(validation.grid, write)

    def _predict(self, model: nn.Module, image: Tensor) -> Tensor:
        with torch.autocast(image.device.type, torch.bfloat16, enabled=self._autocast):
            scores = model(image)
        result: Tensor = scores.to(image.dtype)
        return result


def main(arguments: Sequence[str] | None = None, comm: ObjectCommunicator | None = None) -> None:
    """Train on the ranks of `comm`; errors are one line on rank 0, with exit status 2."""
    run(FractalSegmentation(), arguments, comm)


if __name__ == "__main__":
    main()
