"""`distribute`: the mini-batches of an ordinary DataLoader as DistTensors on a grid."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial, reduce
from itertools import islice
from operator import attrgetter
from typing import Any, NoReturn, TypeVar
from zlib import crc32

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from distconv.comm.checksums import CURE, Checked, checksum, unequal
from distconv.data.errors import DataError, in_step, on_rank_zero, together
from distconv.data.fields import batch_cuts
from distconv.data.nested import mapped
from distconv.data.sampler import drawn_from, set_states, states_of
from distconv.data.sources.functions import REPEATS
from distconv.geometry.layout import Layout, block, rank_box
from distconv.grid.process_grid import ProcessGrid
from distconv.tensor.dist_tensor import DistTensor
from distconv.tensor.memory_format import in_sample_format

Result = TypeVar("Result")

_REMEDY = (
    "All ranks iterate over the same mini-batches, and each loads its own samples: remove "
    "DistributedSampler and other divisions of samples among ranks (batch_size counts over all "
    "ranks), draw samples with torch's, NumPy's or Python's global random numbers or with seeded "
    "generators, and pad all samples to one shape"
)


def distribute(
    loader: Iterable[Any], grid: ProcessGrid, layout: Layout | Mapping[Any, Layout] | None = None
) -> DistributedLoader:
    """Return the mini-batches of a loader as DistTensors. Collective, with equal loaders.

    If a DataLoader draws the indices of its mini-batches, each rank loads only the samples at its
    coordinate along the `sample` axis, and keeps its block of each sample. The indices are drawn
    from rank 0's random numbers, so shuffling needs no seed. With any other iterable, such as a
    DataLoader on an IterableDataset or with an overridden `__iter__`, each rank loads all
    mini-batches, which must be equal. To read only the block of each rank, use `Dataset` and
    `Loader`.

    Mini-batches keep their structure: nested dictionaries, tuples, named tuples and lists of
    tensors with the samples first. Other leaves, such as names, are those that this rank loaded.

    Parameters
    ----------
    loader: yields the mini-batches.
    grid: the process grid.
    layout: the layout of the first tensor, or a dictionary of layouts by key or position, with
        tuples of keys for nested tensors; see `Dataset`.

    Examples
    --------
    >>> grid = dc.ProcessGrid(height=2)
    >>> samples = torch.utils.data.TensorDataset(torch.ones(8, 3, 16, 16), torch.arange(8))
    >>> loader = torch.utils.data.DataLoader(samples, batch_size=4, shuffle=True)
    >>> for x, y in dc.data.distribute(loader, grid):
    ...     print(tuple(x.shape), tuple(x.to_local().shape), tuple(y.shape))
    (4, 3, 16, 16) (4, 3, 8, 16) (4,)
    (4, 3, 16, 16) (4, 3, 8, 16) (4,)
    """
    return DistributedLoader(loader, grid, layout)


class DistributedLoader:
    """An iterable over the mini-batches of another loader as DistTensors; made by `distribute`.

    Iterating is collective. A loop raises DataError on every rank if any rank cannot load its
    samples, if ranks that share samples load different values, or if ranks draw different indices.
    Other attributes, such as `dataset`, `batch_size` and `sampler`, are those of the loader.
    """

    def __init__(
        self, loader: Iterable[Any], grid: ProcessGrid, layout: Layout | Mapping[Any, Layout] | None
    ) -> None:
        self.grid = grid
        self._loader, self._layout = loader, layout
        self._shares: _OwnSamplesLoader | None = None
        if isinstance(loader, DataLoader) and _draws_indices(loader):
            self._shares = _OwnSamplesLoader(loader, grid, _sample_axes(layout))
        self._place = _start_of(0)
        self._begun = False
        self._yielded = 0

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute of the wrapped loader; a DataLoader raises ValueError for some names."""
        if self._owns(name):
            object.__setattr__(self, name, value)
        else:
            setattr(self._loader, name, value)

    def __delattr__(self, name: str) -> None:
        """Delete an attribute of the wrapped loader."""
        if self._owns(name):
            object.__delattr__(self, name)
        else:
            delattr(self._loader, name)

    def _owns(self, name: str) -> bool:
        return name.startswith("_") or name == "grid" or hasattr(type(self), name)

    def __len__(self) -> int:
        """Return the number of mini-batches of an epoch."""
        return len(self._loader)  # type: ignore[arg-type]

    @property
    def epoch(self) -> int:
        """Return the number of the current epoch, from 0; between loops, of the next epoch."""
        return int(self._place["epoch"])

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the epoch, after the last mini-batch that the loop yielded.

        After a loop that `break` has ended, the state is the position in the interrupted epoch. The
        state can be loaded on any grid; a checkpoint saves the state of rank 0.
        """
        return dict(self._place)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume in the next loop where `state_dict` was called, on this grid or another.

        The loop draws the same indices again and skips finished mini-batches without loading them;
        an iterable that draws no indices is read from its beginning. The loop raises DataError if
        its mini-batches differ from those of the saved run.
        """
        self._place = {name: state[name] for name in self._place}
        self._begun = False

    def __iter__(self) -> Iterator[Any]:
        """Return an iterator over the next epoch; after `load_state_dict`, over the rest of one.

        Random numbers are drawn when torch's DataLoader draws them: the seed of the workers in
        `__iter__`, and the indices with the first mini-batch, or in `__iter__` with workers.
        """
        if self._begun:
            self._place = _start_of(self.epoch + 1)
        self._begun, place, shares = True, self._place, self._shares
        done = place["batch"], place["drawn"]

        def begun() -> _Loading:
            return _whole(self._loader, *done) if shares is None else shares.begin(*done)

        return self._epoch(place, self._drawing(place, "random", begun))

    def _drawing(self, place: dict[str, Any], name: str, action: Callable[[], Result]) -> Result:
        """Run `action` with random number generators in the states `place[name]`. Collective.

        If `place[name]` is None, it is set to the current states of this rank, or of rank 0 if each
        rank loads only its own samples. Returns the result of `action`; raises DataError on every
        rank if `action` raises on any rank.
        """
        generators = () if self._shares is None else self._shares.generators
        if place[name] is None:
            own = states_of(generators)
            if self._shares is not None:
                own = on_rank_zero(self.grid, lambda: own)
            place[name] = own

        def drawn() -> Result:
            with drawn_from(place[name], generators):
                return action()

        return together(self.grid, drawn)

    def _epoch(self, place: dict[str, Any], loading: _Loading) -> Iterator[Any]:
        """Yield the mini-batches of an epoch as DistTensors; count in `place`. Collective."""
        shares = self._shares
        self._drawing(place, "first", loading.look_ahead)
        axes = () if shares is None else shares.axes
        named = ((f"{batch.name} with {_text(batch.tensors)}", batch) for batch in loading.batches)
        for batch in in_step(self.grid, named, _REMEDY, partial(_held, axes), [axes]):
            self._yielded += 1
            # Ranks along the sample axis load different samples. So at mini-batches 1, 2, 4, ...
            # all ranks also load a few common samples to compare.
            if shares is not None and not self._yielded & (self._yielded - 1):
                self._check_dataset(shares, batch.spread)
            place["batch"] += 1
            place["drawn"] = _with_name(place["drawn"], batch.name)
            yield self._assemble(batch)
        self._place, self._begun = _start_of(self.epoch + 1), False

    def _assemble(self, batch: _MiniBatch) -> Any:
        """Return the content of a mini-batch with each loaded tensor replaced by a DistTensor."""
        axes = () if self._shares is None else self._shares.axes
        shapes = {name: tuple(x.shape[1:]) for name, x in batch.tensors.items()}
        made = {}
        for name, cuts in batch_cuts(shapes, self._layout, self.grid).items():
            own = batch.tensors[name]
            shape = len(own) if batch.samples is None else batch.samples, *shapes[name]
            box = rank_box(shape, cuts, self.grid.topology, self.grid.rank)
            if axes and cuts[0] != tuple(axis for axis in axes if self.grid.shape[axis] > 1):
                _refuse_layouts({cuts[0], axes})
            # If samples are partitioned, this rank has loaded only its own samples.
            first = slice(0, box.shape[0]) if axes else box.slices[0]
            mine = in_sample_format(own[(first, *box.slices[1:])], shape, cuts, self.grid)
            made[name] = DistTensor.from_local(mine, self.grid, Layout.of(cuts))
        return mapped(batch.content, lambda name, leaf: made.get(name, leaf))

    def _check_dataset(self, shares: _OwnSamplesLoader, some: list[Any]) -> None:
        """Raise DataError if ranks load different values of the samples `some`. Collective.

        `some` are indices into the dataset. Samples that change at random with each load may
        differ.
        """
        if shares.parts == 1 or self.grid.device.type == "meta":
            return
        before = states_of()

        def loaded(times: int) -> list[dict[Any, Tensor]]:
            try:
                return [_tensors(x, len(some)) for x in shares.load([some] * times)]
            finally:
                set_states(before)

        mine = together(self.grid, lambda: loaded(1)[0] if some else {})
        facts = str(some), _text(mine)
        if any(other != facts for other in self.grid.all_gather_object(facts)):
            return  # Ranks that draw other samples, or load other shapes, are reported by the loop.
        found = unequal(_held((), mine), self.grid)
        if not found:
            return
        sums = [checksum(x) for x in mine.values()]
        again = together(self.grid, lambda: loaded(REPEATS))
        varies = any([checksum(x) for x in one.values()] != sums for one in again)
        if not any(self.grid.all_gather_object(varies)):
            raise DataError(
                f"distribute: of samples {some} of the dataset, {found[0]} is not the same on all "
                f"ranks: {found[1]}. Pass the same dataset on all ranks, since distribute selects "
                "the samples of each rank: remove every other division among ranks, and if a "
                f"random split or cache selects the samples, {CURE}"
            )


@dataclass
class _MiniBatch:
    """One mini-batch as this rank loaded it: all samples, or only the samples of this rank.

    Attributes
    ----------
    name: a text that identifies the samples of the mini-batch, for ranks to compare.
    samples: the global number of samples; None if this rank loaded all samples.
    content: the loaded object.
    tensors: the tensors in `content`, by name.
    spread: the indices of up to 4 evenly spaced samples, with the first and the last.
    """

    name: str
    samples: int | None
    content: Any
    tensors: dict[Any, Tensor]
    spread: list[Any] = field(default_factory=list)


@dataclass
class _Loading:
    """An iterator over the mini-batches of an epoch, which are loaded on demand.

    `look_ahead` is called once before the first mini-batch, to draw the first sample indices or to
    skip finished mini-batches.
    """

    batches: Iterator[_MiniBatch]
    look_ahead: Callable[[], object]


class _OwnSamplesLoader:
    """A copy of a DataLoader that loads only this rank's samples of each mini-batch.

    Attributes
    ----------
    axes: the grid axes over which samples are partitioned.
    parts: the number of blocks of samples, which is the number of ranks along `axes`.
    generators: the random number generators that draw the indices of mini-batches.
    """

    def __init__(self, loader: DataLoader[Any], grid: ProcessGrid, axes: tuple[str, ...]) -> None:
        self.axes, self.parts = axes, grid.topology.parts(axes)
        drawing: Any = loader.batch_sampler
        samplers = loader, drawing, getattr(drawing, "sampler", None)
        found = [getattr(sampler, "generator", None) for sampler in samplers]
        self.generators = [g for g in dict.fromkeys(found) if isinstance(g, torch.Generator)]
        own = loader.generator or torch.default_generator
        part = grid.topology.part(grid.coords, axes)
        self._sampler = _ShareSampler(drawing, self.parts, part, own)
        self._loader = loader
        self._sharing = _like(loader, self._sampler, loader.num_workers, self._sampler.seeds)

    def begin(self, done: int, drawn: int) -> _Loading:
        """Start to load this rank's samples of each mini-batch after the first `done`.

        `drawn` is the checksum of the names of the first `done` mini-batches in the saved state.
        With the first mini-batch, DataError is raised if the checksum is another one now.
        """
        self._sampler.begin(done, drawn, self._loader.persistent_workers)
        loading = iter(self._sharing)
        indices = self._sampler.indices
        return _Loading(self._loaded(loading, indices), indices.look_ahead)

    def load(self, batches: list[list[Any]]) -> Iterator[Any]:
        """Return an iterator that loads extra mini-batches with the sample indices `batches`.

        The mini-batches of the current epoch are not affected.
        """
        workers = min(1, self._loader.num_workers)
        return iter(_like(self._loader, batches, workers, self._sampler.seeds))

    def _loaded(self, loading: Iterator[Any], indices: _Indices) -> Iterator[_MiniBatch]:
        for content in loading:
            batch, count = indices.drawn.popleft()
            spread = [
                batch[i]
                for i in sorted({i * (len(batch) - 1) // 3 for i in range(4 if batch else 0)})
            ]
            yield _MiniBatch(_name(batch), len(batch), content, _tensors(content, count), spread)


class _ShareSampler:
    """A batch sampler that yields this rank's indices of each mini-batch of another batch sampler.

    The sampler must not refer to its DataLoader: torch waits 5 seconds for each persistent worker
    of a DataLoader that the garbage collector finds.

    Attributes
    ----------
    seeds: the generator from which worker processes are seeded.
    indices: the iterator over this rank's indices in the current loop.
    """

    indices: _Indices

    def __init__(self, drawing: Any, parts: int, part: int, own: torch.Generator) -> None:
        self._drawing, self._parts, self._part, self._own = drawing, parts, part, own
        self.seeds = torch.Generator()
        self._seeded = False

    def begin(self, done: int, drawn: int, persistent: bool) -> None:
        """Prepare the next loop, which skips the first `done` mini-batches.

        `drawn` is the checksum of the names of the skipped mini-batches in the saved state, which
        the loop checks. Workers are seeded again unless they are `persistent` and have been seeded.
        """
        self._done = done, drawn
        self._seeded = self._seeded and persistent

    def __iter__(self) -> _Indices:
        # A DataLoader calls `__iter__`, draws the seed of its workers, and then requests indices.
        batches = map(_listed, self._drawing)
        if not self._seeded:
            self._seed_workers()
        self.indices = _Indices(self._behind(batches, *self._done), self._parts, self._part)
        return self.indices

    @staticmethod
    def _behind(batches: Iterator[list[Any]], done: int, drawn: int) -> Iterator[list[Any]]:
        _skip(map(_name, batches), done, drawn)
        yield from batches

    def __len__(self) -> int:
        return len(self._drawing)

    def _seed_workers(self) -> None:
        """Draw the seed of this rank's workers when a serial DataLoader would draw its seed.

        Ranks that load the same samples have the same seed, so that their workers change samples
        alike. Ranks with other samples have other seeds; the first block has the serial seed.
        """
        self._seeded = True
        self.seeds.set_state(self._own.get_state())
        torch.empty((), dtype=torch.int64).random_(generator=self._own)
        torch.empty(self._part, dtype=torch.int64).random_(generator=self.seeds)


class _Indices:
    """An iterator over this rank's sample indices of each mini-batch, which records all indices.

    Attributes
    ----------
    drawn: for each mini-batch that is being loaded, the indices of its samples over all ranks, and
        the number of samples that this rank loads.
    """

    def __init__(self, batches: Iterator[list[Any]], parts: int, part: int) -> None:
        self._batches, self._parts, self._part = batches, parts, part
        self._next: list[list[Any]] = []
        self.drawn: deque[tuple[list[Any], int]] = deque()

    def look_ahead(self) -> None:
        """Draw the indices of the first mini-batch, unless the DataLoader has requested them."""
        if not self.drawn:
            self._next = list(islice(self._batches, 1))

    def __iter__(self) -> _Indices:
        return self

    def __next__(self) -> list[Any]:
        batch = self._next.pop() if self._next else next(self._batches)
        start, stop = block(len(batch), self._parts, self._part)
        # A rank without samples loads the first sample, for the shapes of its tensors.
        own = batch[start:stop] or batch[:1]
        self.drawn.append((batch, len(own)))
        return own


def _start_of(epoch: int) -> dict[str, Any]:
    """Return the `state_dict` of a loader at the start of an epoch.

    "random" and "first" are later set to the states of the random number generators at `__iter__`
    and at the first mini-batch.
    """
    return {"epoch": epoch, "batch": 0, "drawn": 0, "random": None, "first": None}


def _whole(loader: Iterable[Any], done: int, drawn: int) -> _Loading:
    """Start to load all samples of each mini-batch after the first `done`.

    `drawn` is the checksum of the names of the first `done` mini-batches in the saved state. With
    the first mini-batch, DataError is raised if the checksum is another one now.
    """
    loading = iter(loader)

    def loaded() -> Iterator[_MiniBatch]:
        for content in loading:
            tensors = _tensors(content, None)
            yield _MiniBatch(f"{[*map(len, tensors.values())]} rows", None, content, tensors)

    batches = loaded()
    return _Loading(batches, lambda: _skip(map(attrgetter("name"), batches), done, drawn))


def _skip(names: Iterator[str], done: int, drawn: int) -> None:
    """Skip the first `done` mini-batches of `names`, an iterator over names of mini-batches.

    Raises DataError if there are fewer names, or if the checksum of the skipped names is not
    `drawn`, the checksum in the saved state.
    """
    found = list(islice(names, done))
    if (len(found), reduce(_with_name, found, 0)) != (done, drawn):
        raise DataError(
            f"distribute: the state was saved after {done} mini-batches of an epoch, but this "
            "loader has other mini-batches; create it with the same dataset, batch_size and "
            "sampler, or start from the beginning"
        )


def _with_name(number: int, name: str) -> int:
    return crc32(name.encode(), number)


def _draws_indices(loader: DataLoader[Any]) -> bool:
    """Return whether a loader selects its mini-batches by the indices of its batch sampler."""
    return (
        loader.batch_sampler is not None
        and not isinstance(loader.dataset, IterableDataset)
        and type(loader).__iter__ is DataLoader.__iter__
    )


def _name(batch: list[Any]) -> str:
    return f"samples {batch}"


def _listed(batch: Any) -> list[Any]:
    """Return the indices `batch` (a list, tuple, tensor or array) as a list."""
    return batch.tolist() if hasattr(batch, "tolist") else list(batch)


def _like(
    loader: DataLoader[Any], batches: Any, workers: int, generator: torch.Generator
) -> DataLoader[Any]:
    """Return a copy of a DataLoader with other mini-batches, workers and random numbers.

    `batches` are the indices of each mini-batch, `workers` the number of worker processes, and
    `generator` the generator from which the workers are seeded.
    """
    return DataLoader(
        loader.dataset,
        batch_sampler=batches,
        num_workers=workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=generator,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
    )


def _sample_axes(layout: Layout | Mapping[Any, Layout] | None) -> tuple[str, ...]:
    """Return the grid axes over which samples are partitioned.

    Raises ValueError if the axes differ between the layouts.
    """
    if layout is None:
        return ("sample",)
    layouts = list(layout.values()) if isinstance(layout, Mapping) else [layout]
    axes = {chosen.axes("sample") for chosen in layouts} or {("sample",)}
    if len(axes) > 1:
        _refuse_layouts(axes)
    return axes.pop()


def _refuse_layouts(axes: set[tuple[str, ...]]) -> NoReturn:
    raise ValueError(
        f"distribute: the layouts partition samples over different axes, {sorted(axes)}; use the "
        "same axes in all layouts"
    )


def _held(axes: tuple[str, ...], batch: _MiniBatch | dict[Any, Tensor]) -> list[Checked]:
    """Return the tensors of `batch`, to compare among ranks with equal coordinates on `axes`."""
    tensors = batch.tensors if isinstance(batch, _MiniBatch) else batch
    return [Checked(f"tensor {name!r}", x, axes) for name, x in tensors.items()]


def _text(tensors: Mapping[Any, Tensor]) -> str:
    """Return the names, sample shapes and types of tensors in a text, for ranks to compare."""
    return ", ".join(f"{name!r} of {(*x.shape[1:],)} {x.dtype}" for name, x in tensors.items())


def _tensors(content: Any, count: int | None) -> dict[Any, Tensor]:
    """Return the tensors in a mini-batch by name; subclasses become plain tensors.

    `count` is the number of samples that each tensor must have; None for any number. Raises
    DataError for a mini-batch without tensors, for tensors that cannot be partitioned over samples,
    and for objects that hold tensors as attributes.
    """
    found: dict[Any, Tensor] = {}
    kinds = {}

    def look(name: Any, x: Any) -> None:
        kinds[name] = type(x).__name__
        if isinstance(x, Tensor):
            if isinstance(x, DistTensor) or x.is_nested or x.layout != torch.strided:
                _refuse(kinds[name], name, "plain, dense tensors")
            if not x.dim():
                _refuse(kinds[name], name, "tensors with samples first")
            if count is not None and len(x) != count:
                _refuse(
                    f"{len(x)} rows instead of {count} samples",
                    name,
                    "all samples, as the first dimension of each tensor. Omit samples in the "
                    "dataset or the sampler, not in collate_fn",
                )
            found[name] = x.as_subclass(Tensor)
        elif any(isinstance(value, Tensor) for value in getattr(x, "__dict__", {}).values()):
            _refuse(f"{kinds[name]}, an object with tensors,", name, "a dictionary of them")

    mapped(content, look)
    if not found:
        name, kind = next(iter(kinds.items()), (0, type(content).__name__))
        _refuse(kind, name, "tensors with samples first")
    return found


def _refuse(kind: str, name: Any, expected: str) -> NoReturn:
    raise DataError(f"distribute: a mini-batch holds {kind} at {name!r}; expected {expected}")
