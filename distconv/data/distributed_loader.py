"""The mini-batches of an ordinary DataLoader on a grid."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from distconv.comm.checksums import CURE, checksum, differing, due
from distconv.data.errors import DataError, in_step, on_rank_zero
from distconv.data.layouts import batch_cuts
from distconv.geometry.layout import Layout, block, rank_box
from distconv.grid.process_grid import ProcessGrid
from distconv.tensor.dist_tensor import DistTensor
from distconv.tensor.sample_format import in_sample_format


def distribute(
    loader: Iterable[Any],
    grid: ProcessGrid,
    layout: Layout | Mapping[Any, Layout] | None = None,
) -> DistributedLoader:
    """Return the mini-batches of a loader as DistTensors. All ranks call it with equal loaders.

    Of a DataLoader that draws the indices of its mini-batches each rank loads only those samples
    that its part of the `sample` axis has, whole, and keeps its box of them; rank 0's indices
    count, so that shuffling needs no seed. Of any other iterable, as a DataLoader on an
    IterableDataset, each rank goes through all mini-batches, which have to be equal. `Dataset` and
    `Loader` read no more than the box.

    Parameters
    ----------
    loader: yields tensors, or tuples, lists or dictionaries of tensors, samples first.
    grid: the process grid.
    layout: of the first tensor, or by key or position; see `Dataset`.
    """
    return DistributedLoader(loader, grid, layout)


class DistributedLoader:
    """The mini-batches of another loader on a grid; all ranks go through each epoch together.

    A loop raises DataError on every rank where one cannot load its samples, or has others than the
    ranks that share them.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        grid: ProcessGrid,
        layout: Layout | Mapping[Any, Layout] | None,
    ) -> None:
        self.grid = grid
        self._loader, self._layout = loader, layout
        self._shares: _Shares | None = None
        if isinstance(loader, DataLoader) and _draws_indices(loader):
            self._shares = _Shares(grid, _sample_axes(layout))
            self._loader = _with_batches(loader, self._shares)
        self._drawn: Any = getattr(loader, "batch_sampler", None)

    def __len__(self) -> int:
        """Return the number of mini-batches of an epoch."""
        return len(self._drawn if self._shares is not None else self._loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        """Go through the mini-batches of one epoch."""
        if self._shares is not None:
            # Every rank draws, so that what is random goes on alike on all.
            drawn = list(self._drawn)
            self._shares.batches = on_rank_zero(self.grid, lambda: drawn)
        for samples, loaded in in_step(self.grid, self._load()):
            yield self._assemble(samples, loaded)

    def _load(self) -> Generator[tuple[str, tuple[int | None, Any]], None, None]:
        """Yield what this rank loads of each mini-batch, with the samples of all ranks."""
        if self._shares is None:
            for place, loaded in enumerate(self._loader, 1):
                yield f"number {place}", (None, loaded)
        else:
            for batch, loaded in zip(self._shares.batches, self._loader, strict=True):
                yield f"samples {batch}", (len(batch), loaded)

    def _assemble(self, samples: int | None, loaded: Any) -> Any:
        """Return the mini-batch of `samples`, of which this rank has loaded its share, or all."""
        tensors = _tensors(loaded)
        axes = () if self._shares is None else self._shares.axes
        self._check_equal(tensors, axes)
        shapes = {name: tuple(x.shape[1:]) for name, x in tensors.items()}
        made = {}
        for name, cuts in batch_cuts(shapes, self._layout, self.grid).items():
            own = tensors[name]
            count = len(own) if samples is None else samples
            shape = count, *shapes[name]
            box = rank_box(shape, cuts, self.grid.topology, self.grid.rank)
            # A rank without samples has loaded one, for the sake of its shape.
            first = box.slices[0] if samples is None else slice(0, box.shape[0])
            mine = in_sample_format(own[(first, *box.slices[1:])], shape, cuts, self.grid)
            made[name] = DistTensor.from_local(mine, self.grid, Layout.of(cuts))
        if isinstance(loaded, Tensor):
            return made[0]
        return made if isinstance(loaded, Mapping) else tuple(made.values())

    def _check_equal(self, tensors: Mapping[Any, Tensor], axes: tuple[str, ...]) -> None:
        """Compare, now and then, what ranks have loaded that differ along no axis of `axes`."""
        if not due("distribute", self.grid, first=16, then=16):
            return
        sums = self.grid.all_gather_object([checksum(x) for x in tensors.values()])
        for (name, x), column in zip(tensors.items(), zip(*sums, strict=True), strict=True):
            ranks = differing(x, axes, column, self.grid)
            if ranks:
                raise DataError(
                    f"distribute: tensor {name!r} of a mini-batch is not the same on all ranks "
                    f"that share its samples: {ranks}. Where samples are changed at random, {CURE}"
                )


class _Shares:
    """A batch sampler: of each of `batches`, the indices whose samples this rank has."""

    def __init__(self, grid: ProcessGrid, axes: tuple[str, ...]) -> None:
        self.axes = axes
        self.batches: list[Any] = []
        self._parts = grid.topology.parts(axes)
        self._part = grid.topology.part(grid.coords, axes)

    def __iter__(self) -> Iterator[Any]:
        for batch in self.batches:
            start, stop = block(len(batch), self._parts, self._part)
            yield batch[start:stop] or batch[:1]

    def __len__(self) -> int:
        return len(self.batches)


def _draws_indices(loader: DataLoader[Any]) -> bool:
    return loader.batch_sampler is not None and not isinstance(loader.dataset, IterableDataset)


def _with_batches(loader: DataLoader[Any], shares: _Shares) -> DataLoader[Any]:
    """Return a DataLoader like this one that loads other mini-batches."""
    return DataLoader(
        loader.dataset,
        batch_sampler=shares,  # type: ignore[arg-type]
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
    )


def _sample_axes(layout: Layout | Mapping[Any, Layout] | None) -> tuple[str, ...]:
    """Return the grid axes over which samples are cut, in all tensors alike."""
    if layout is None:
        return ("sample",)
    layouts = list(layout.values()) if isinstance(layout, Mapping) else [layout]
    axes = {chosen.axes("sample") for chosen in layouts} or {("sample",)}
    if len(axes) > 1:
        raise ValueError(
            f"distribute: the layouts cut samples differently, over {sorted(axes)}; cut them alike"
        )
    return axes.pop()


def _tensors(loaded: Any) -> dict[Any, Tensor]:
    """Return the tensors of a mini-batch by key or position."""
    if isinstance(loaded, Tensor):
        found: dict[Any, Any] = {0: loaded}
    elif isinstance(loaded, Mapping):
        found = dict(loaded)
    elif isinstance(loaded, tuple | list):
        found = dict(enumerate(loaded))
    else:
        found = {0: loaded}
    for name, x in found.items():
        if not isinstance(x, torch.Tensor) or not x.dim():
            raise DataError(
                f"distribute: a mini-batch holds {type(x).__name__} at {name!r}; expected tensors "
                "with samples first, alone or in one tuple, list or dictionary"
            )
    return found
