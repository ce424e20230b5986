"""The interface of an example: its additions to the shared training run."""

from __future__ import annotations

import argparse
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor, nn

import distconv as dc

from .arguments import Add

Data = TypeVar("Data", bound=dc.data.Dataset)
Network = TypeVar("Network", bound=nn.Module)

PRECISIONS = {"float32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True)
class Score:
    """The quality of the predictions for a set of samples; an example adds numbers of its own.

    Attributes:
        loss: the mean of the loss.
    """

    loss: float


class Example(ABC, Generic[Data, Network]):
    """A task to train a network on: its samples and its networks.

    All ranks make it, and call its methods together.

    Attributes:
        name: its folder in `examples`.
        description: the beginning of `--help`.
        axes: the axes of the process grid over which its samples can be cut.
        defaults: defaults of the shared arguments that differ from the first example's.
        decisive: its own arguments that determine the numbers of a run.
        score: the kind of score that `evaluate` returns.
        pictures: the files that `draw` writes, and their contents.
    """

    name: ClassVar[str]
    description: ClassVar[str]
    axes: ClassVar[tuple[str, ...]]
    defaults: ClassVar[Mapping[str, Any]] = {}
    decisive: ClassVar[tuple[str, ...]] = ()
    score: ClassVar[type[Score]] = Score
    pictures: ClassVar[Mapping[str, str]] = {}

    @abstractmethod
    def add_arguments(self, add: Add) -> None:
        """Add the arguments of this example alone to the command line, by `add(option, text)`."""

    @abstractmethod
    def open(self, args: argparse.Namespace, grid: dc.ProcessGrid) -> tuple[Data, Data]:
        """Open the training and the validation samples. Collective; raises DataError."""

    @abstractmethod
    def build_model(self, args: argparse.Namespace) -> Network:
        """Return the untrained network, whose initial weights follow from torch's seed."""

    def check(  # noqa: B027
        self, args: argparse.Namespace, model: Network, training: Data, validation: Data
    ) -> None:
        """Raise `ValueError` for samples on which this network cannot be trained."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        """Return the loss of a mini-batch of fields: DistTensors, or plain ones on one rank."""

    @abstractmethod
    def evaluate(self, model: nn.Module, batches: dc.data.Loader) -> Score:
        """Return the score over all `batches`, in evaluation mode and without gradients."""

    def is_done(self, args: argparse.Namespace, record: Mapping[str, Any]) -> bool:
        """Return whether training ends after an epoch with this record; all ranks agree."""
        return False

    @abstractmethod
    def draw(
        self,
        args: argparse.Namespace,
        model: nn.Module,
        validation: Data,
        history: list[dict[str, Any]],
    ) -> None:
        """Draw the results into `args.output`. Collective; rank 0 writes.

        `history` has a record of each epoch: `step_losses`, speed, `seconds` of training and
        validation, and the fields of the score.
        """

    def scores(self) -> tuple[str, ...]:
        """Return the names of the numbers of a score."""
        return tuple(field.name for field in fields(self.score))


def check_batch_size(batch_size: int, data: dc.data.Dataset, path: Path) -> None:
    """Raise `ValueError` unless `data`, read from `path`, can be divided into such mini-batches."""
    if batch_size > data.samples:
        raise ValueError(
            f"batch size {batch_size} is larger than the {data.samples} samples of {path}; "
            f"choose at most {data.samples}, or generate more samples"
        )
    parts = data.grid.shape["sample"]
    if batch_size < parts:
        raise ValueError(
            f"batch size {batch_size} leaves some of the sample={parts} parts of the grid without "
            f"a sample; choose at least {parts}, or cut over fewer samples and more rows or columns"
        )
