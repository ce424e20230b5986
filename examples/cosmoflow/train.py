r"""Train a CosmoFlow network on universes cut over many ranks.

    mpiexec -n 4 python -m examples.cosmoflow.train \
        --data train.h5 --validation validation.h5 --grid depth=2,height=2 --output run

or without MPI, by `torchrun --nproc-per-node 4 -m examples.cosmoflow.train ...`. Interrupted at any
moment, it continues after the last whole epoch, on the same grid or another, with `--resume run`.
`--parts 2` trains on eighths of the universes instead, as is necessary where a sample must fit on
one device.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

import distconv as dc
from distconv.data import Loader, on_rank_zero
from distconv.transport.interface import ObjectCommunicator
from examples.trainer.arguments import Add, positive
from examples.trainer.example import PRECISIONS, Example
from examples.trainer.training import run

from .data import Universes
from .network import FORMS, CosmoFlowNet
from .plots import plot_estimates, plot_loss
from .score import ParameterScore, estimates, score

USAGE = __doc__ or ""


class CosmoFlow(Example[Universes, CosmoFlowNet]):
    """The task of estimating the parameters of a universe from the density of matter in a box."""

    name = "cosmoflow"
    description = USAGE
    axes = ("sample", "channel", "filter", "depth", "height", "width")
    defaults = {"epochs": 30, "batch_size": 8}
    decisive = ("network", "width", "batch_norm", "augment", "parts", "size")
    score = ParameterScore
    pictures = {
        "estimates.png": "estimated against true parameters of universes nobody trained on",
        "loss.png": "loss of every epoch, beside guessing the mean",
    }

    def add_arguments(self, add: Add) -> None:
        add("--network", "by the pooling that it has", choices=FORMS, default="average")
        add("--width", "multiplies the channels of the network", type=positive(float), default=1.0)
        add("--batch-norm", "have a batch norm behind each convolution", action="store_true")
        add("--augment", "flip and rotate training samples at random", action="store_true")
        add("--parts", "cut universes into N^3 samples", type=positive(int), default=1, metavar="N")

    def open(self, args: argparse.Namespace, grid: dc.ProcessGrid) -> tuple[Universes, Universes]:
        """Open both files, and take the size of the samples from them."""
        dtype = PRECISIONS[args.precision]
        training = Universes(args.data, grid, dtype, args.parts, augment=args.augment)
        validation = Universes(args.validation, grid, dtype, args.parts, normalise_as=training)
        args.size = training.size
        # Checked here, where all ranks fail together: there is no network of another size.
        dc.data.together(grid, lambda: self.build_model(args))
        return training, validation

    def build_model(self, args: argparse.Namespace) -> CosmoFlowNet:
        return CosmoFlowNet(FORMS[args.network], args.size, args.width, args.batch_norm)

    def check(
        self,
        args: argparse.Namespace,
        model: CosmoFlowNet,
        training: Universes,
        validation: Universes,
    ) -> None:
        """Raise `ValueError` for a validation set of another size."""
        if validation.size != training.size:
            raise ValueError(
                f"{args.validation} has samples of {validation.size}^3 cells and {args.data} of "
                f"{training.size}^3; generate both alike"
            )

    def loss(self, model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        """Return the mean squared error of the parameters, in -1 to 1 over their ranges."""
        density, parameters = batch
        return F.mse_loss(model(density), parameters)

    def evaluate(self, model: nn.Module, batches: Loader) -> ParameterScore:
        assert isinstance(batches.dataset, Universes)
        return score(*estimates(model, batches), batches.dataset.samples_a_universe)

    def draw(
        self,
        args: argparse.Namespace,
        model: nn.Module,
        validation: Universes,
        history: list[dict[str, Any]],
    ) -> None:
        """Write loss.png, and estimates.png of the validation set."""
        estimated, true = estimates(model, Loader(validation, args.batch_size))

        def write() -> None:
            plot_loss(args.output / "loss.png", history)
            path = args.output / "estimates.png"
            plot_estimates(path, estimated, true, validation.samples_a_universe)

        on_rank_zero(validation.grid, write)


def main(arguments: Sequence[str] | None = None, comm: ObjectCommunicator | None = None) -> None:
    """Train on the ranks of `comm`; errors are one line on rank 0, with exit status 2."""
    run(CosmoFlow(), arguments, comm)


if __name__ == "__main__":
    main()
