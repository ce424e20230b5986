"""Train a mesh-tangling network on samples cut over many ranks.

    mpiexec -n 4 python -m examples.mesh_tangling.train \\
        --data train.h5 --validation validation.h5 --grid sample=2,height=2 --output run

or without MPI, by `torchrun --nproc-per-node 4 -m examples.mesh_tangling.train ...`.
Interrupted at any moment, it continues after the last whole epoch, on the same grid or another:

    mpiexec -n 2 python -m examples.mesh_tangling.train \\
        --data train.h5 --validation validation.h5 --grid height=2 --output run \\
        --resume run
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import distconv as dc
from distconv.data import on_rank_zero
from distconv.transport.interface import ObjectCommunicator
from examples.trainer.arguments import Add, positive
from examples.trainer.example import PRECISIONS, Example
from examples.trainer.ranks import boxes_of, needed_boxes, on_one_rank
from examples.trainer.training import run

from .data import MeshTanglingData
from .network import NETWORKS, MeshNetwork
from .plots import CHANNELS_SHOWN, Ranks, plot_loss, plot_prediction
from .score import LOSSES, MeshScore, evaluate

USAGE = __doc__ or ""


class MeshTangling(Example[MeshTanglingData, MeshNetwork]):
    """The task of finding the zones that will tangle from a simulation's state on a mesh."""

    name = "mesh_tangling"
    description = USAGE
    axes = ("sample", "channel", "filter", "height", "width")
    decisive = ("network", "size", "width", "loss")
    score = MeshScore
    pictures = {
        "prediction.png": "a validation sample: the flow, the truth, the prediction, the blocks "
        "and halos of the ranks, and the difference from the same network on one rank",
        "loss.png": "loss and score of every epoch",
    }

    def add_arguments(self, add: Add) -> None:
        text = "published for 1024^2 or 2048^2 zones, or a U-Net for small meshes"
        add("--network", text, choices=NETWORKS, default="2k")
        text = "mean squared error, or cross entropy with the overlap of prediction and truth"
        add("--loss", text, choices=LOSSES, default="mse")
        add("--width", "multiplies the channels of the network", type=positive(float), default=1.0)
        add(
            "--size",
            "zones a side of the mesh that the network is scaled to (default: that of the data)",
            type=positive(int),
        )

    def open(
        self, args: argparse.Namespace, grid: dc.ProcessGrid
    ) -> tuple[MeshTanglingData, MeshTanglingData]:
        """Open both files, and read the size of the mesh from them unless it is given."""
        training = MeshTanglingData(args.data, grid, PRECISIONS[args.precision])
        validation = MeshTanglingData(args.validation, grid, training.dtype, normalise_as=training)
        args.size = args.size or training.size
        return training, validation

    def build_model(self, args: argparse.Namespace) -> MeshNetwork:
        self._loss = LOSSES[args.loss][1]
        return NETWORKS[args.network](args.width, args.size)

    def check(
        self,
        args: argparse.Namespace,
        model: MeshNetwork,
        training: MeshTanglingData,
        validation: MeshTanglingData,
    ) -> None:
        """Raise `ValueError` for meshes that do not fit."""
        for data in (training, validation):
            try:
                model.check_mesh(data.size, data.size)
            except ValueError as error:
                raise ValueError(f"{data.path}: {error}") from error

    def loss(self, model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        """Return the loss of the command line."""
        x, y = batch
        return self._loss(model(x), y)

    def evaluate(self, model: nn.Module, batches: Iterable[Sequence[Any]]) -> MeshScore:
        return evaluate(model, batches, self._loss)

    def draw(
        self,
        args: argparse.Namespace,
        model: nn.Module,
        validation: MeshTanglingData,
        history: list[dict[str, Any]],
    ) -> None:
        """Write loss.png and prediction.png."""
        grid = validation.grid
        # One sample for each replica, so that every rank has a block.
        samples = range(min(grid.shape["sample"], validation.samples))
        x, truth, probability = predict(model, validation, samples)
        boxes = boxes_of(x, grid)
        first = next(layer for layer in model.modules() if isinstance(layer, nn.Conv2d))
        needed = needed_boxes(first, boxes, x.shape)
        alone = on_one_rank(lambda: self.build_model(args), model, x)

        def write() -> None:
            plot_loss(args.output / "loss.png", history, LOSSES[args.loss][0])
            inputs = {name: validation.channel(0, name) for name in CHANNELS_SHOWN}
            density = [validation.channel(sample, "density") for sample in samples]
            apart = None if alone is None else np.abs(probability - alone()[:, 0].cpu().numpy())
            path = args.output / "prediction.png"
            ranks = Ranks(density, boxes, needed)
            plot_prediction(path, inputs, truth[0], probability[0], ranks, apart)

        on_rank_zero(grid, write)


def predict(
    model: nn.Module, data: MeshTanglingData, samples: Sequence[int]
) -> tuple[dc.DistTensor, np.ndarray, np.ndarray]:
    """Return n samples, their truth and predicted probability, (n, S, S) each. Collective."""
    model.eval()
    with torch.no_grad():
        x, y = data.batch(list(samples))
        truth, probability = y.full_tensor(), model(x).full_tensor()
    return x, truth[:, 0].cpu().numpy(), probability[:, 0].cpu().numpy()


def main(arguments: Sequence[str] | None = None, comm: ObjectCommunicator | None = None) -> None:
    """Train on the ranks of `comm`; errors are one line on rank 0, with exit status 2."""
    run(MeshTangling(), arguments, comm)


if __name__ == "__main__":
    main()
