"""A strategy of PyTorch Lightning for modules that are parallelized on a process grid.

Lightning then uses the rank numbers of the grid: rank 0 alone writes checkpoints and logs and shows
the progress bar, and all ranks agree on decisions. Gradients are summed by `parallelize`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from distconv.data.sources.interface import import_package
from distconv.grid.process_grid import ProcessGrid
from distconv.model.state_dicts import full_state_dict
from distconv.tensor.dist_tensor import DistTensor

_pytorch = import_package("lightning.pytorch", "distconv.lightning", "lightning")
_fabric = import_package("lightning.fabric", "distconv.lightning", "lightning")
_OneDevice: Any = _pytorch.strategies.SingleDeviceStrategy


class GridStrategy(_OneDevice):  # type: ignore[misc]
    """The strategy for a `Trainer` whose module is parallelized on a grid.

    Every rank runs the trainer, `L.Trainer(strategy=GridStrategy(grid), devices=1)`, and its
    loaders return DistTensors.

    Parameters
    ----------
    grid: the process grid.
    options: as for Lightning's `SingleDeviceStrategy`.
    """

    strategy_name = "distconv"

    def __init__(self, grid: ProcessGrid, **options: Any) -> None:
        super().__init__(grid.device, **options)
        self._grid = grid
        self.global_rank, self.world_size = grid.rank, grid.size
        # Loggers, progress bars and messages of Lightning read this number.
        _fabric.utilities.rank_zero.rank_zero_only.rank = grid.rank

    @property
    def is_global_zero(self) -> bool:
        """Return whether this is rank 0, which writes checkpoints and logs."""
        return bool(self._grid.rank == 0)

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait for all ranks. Collective."""
        self._grid.all_gather_object(None)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return the object of rank `src`. Collective."""
        return self._grid.all_gather_object(obj)[src]

    def reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the mean over the ranks of a plain tensor of one number. Collective.

        Other values are returned unchanged: a DistTensor covers all ranks already.
        """
        if isinstance(tensor, DistTensor) or not isinstance(tensor, Tensor) or tensor.numel() != 1:
            return tensor
        return torch.tensor(self._grid.mean(tensor), device=tensor.device, dtype=tensor.dtype)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return whether `decision` is true on all ranks, or with all=False on any. Collective."""
        share = self._grid.mean(float(decision))
        return share == 1 if all else share > 0

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the state of the serial module, for a checkpoint. Collective."""
        return dict(full_state_dict(self.lightning_module))
