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
    """Return the mini-batches of a loader as DistTensors. All ranks call it with equal loaders.

    If a DataLoader draws the indices of its mini-batches, each rank loads only the samples of its
    position on the `sample` axis, whole, and keeps its block. The indices are drawn from rank 0's
    random numbers, so shuffling needs no seed. With any other iterable, such as a DataLoader on an
    IterableDataset or one with an `__iter__` of its own, each rank goes through all mini-batches,
    which must be equal. `Dataset` and `Loader` read no more than the box.

    Mini-batches keep their form: dictionaries, tuples, named tuples and lists, nested at will,
    whose tensors have the samples first. Other leaves, such as names, are the ones that this rank
    loaded.

    Parameters
    ----------
    loader: yields the mini-batches.
    grid: the process grid.
    layout: the layout of the first tensor, or a dictionary by key or position, with tuples for
        nested ones; see `Dataset`.

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

    All ranks go through each epoch together. A loop raises DataError on every rank if one cannot
    load its samples, if ranks that share samples load different ones, or draw different indices.
    Other attributes, such as `dataset`, `batch_size` and `sampler`, are those of the loader.
    """

    def __init__(
        self, loader: Iterable[Any], grid: ProcessGrid, layout: Layout | Mapping[Any, Layout] | None
    ) -> None:
        self.grid = grid
        self._loader, self._layout = loader, layout
        self._shares: _Shares | None = None
        if isinstance(loader, DataLoader) and _draws_indices(loader):
            self._shares = _Shares(loader, grid, _sample_axes(layout))
        self._place = _start_of(0)
        self._begun = False
        self._yielded = 0

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute of the loader, which raises ValueError for `batch_size` and others."""
        if self._owns(name):
            object.__setattr__(self, name, value)
        else:
            setattr(self._loader, name, value)

    def __delattr__(self, name: str) -> None:
        """Delete an attribute of the loader."""
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
        """Return the number of the current epoch, from 0; between loops, of the next one."""
        return int(self._place["epoch"])

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the epoch, behind the last mini-batch that the loop yielded.

        After a loop that `break` has ended, this is the position in the epoch that was cut short.
        It can be loaded on any grid; a checkpoint saves rank 0's.
        """
        return dict(self._place)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next loop continue where `state_dict` was called, on this grid or another.

        The loop draws the same indices again and skips finished mini-batches without loading them;
        an iterable that draws no indices is read from its beginning. The loop raises DataError if
        its mini-batches are others than before.
        """
        self._place = {name: state[name] for name in self._place}
        self._begun = False

    def __iter__(self) -> Iterator[Any]:
        """Return an iterator over the next epoch, or the rest of one after `load_state_dict`.

        Random numbers are drawn when torch's DataLoader draws them: the seed of the workers here,
        and the indices with the first mini-batch, or here if there are workers.
        """
        if self._begun:
            self._place = _start_of(self.epoch + 1)
        self._begun, place, shares = True, self._place, self._shares
        done = place["batch"], place["drawn"]

        def begun() -> _Loading:
            return _whole(self._loader, *done) if shares is None else shares.begin(*done)

        return self._epoch(place, self._drawing(place, "random", begun))

    def _drawing(self, place: dict[str, Any], name: str, action: Callable[[], Result]) -> Result:
        """Return the result of `action`, which draws from the random numbers in `place[name]`.

        Collective. The entry is made of the current random numbers, rank 0's where ranks load only
        their samples, unless a saved state had it.
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
        """Yield the mini-batches of an epoch, and record in `place` how many were yielded."""
        shares = self._shares
        self._drawing(place, "first", loading.look_ahead)
        axes = () if shares is None else shares.axes
        named = ((f"{batch.name} with {_text(batch.tensors)}", batch) for batch in loading.batches)
        for batch in in_step(self.grid, named, _REMEDY, partial(_held, axes), [axes]):
            self._yielded += 1
            # Mini-batches 1, 2, 4, 8, ...: ranks that load other samples share none to compare.
            if shares is not None and not self._yielded & (self._yielded - 1):
                self._check_dataset(shares, batch.spread)
            place["batch"] += 1
            place["drawn"] = _with_name(place["drawn"], batch.name)
            yield self._assemble(batch)
        self._place, self._begun = _start_of(self.epoch + 1), False

    def _assemble(self, batch: _MiniBatch) -> Any:
        """Return a mini-batch with a DistTensor in place of each tensor that this rank loaded."""
        axes = () if self._shares is None else self._shares.axes
        shapes = {name: tuple(x.shape[1:]) for name, x in batch.tensors.items()}
        made = {}
        for name, cuts in batch_cuts(shapes, self._layout, self.grid).items():
            own = batch.tensors[name]
            shape = len(own) if batch.samples is None else batch.samples, *shapes[name]
            box = rank_box(shape, cuts, self.grid.topology, self.grid.rank)
            if axes and cuts[0] != tuple(axis for axis in axes if self.grid.shape[axis] > 1):
                _refuse_layouts({cuts[0], axes})
            # Where samples are cut, this rank has loaded its own alone.
            first = slice(0, box.shape[0]) if axes else box.slices[0]
            mine = in_sample_format(own[(first, *box.slices[1:])], shape, cuts, self.grid)
            made[name] = DistTensor.from_local(mine, self.grid, Layout.of(cuts))
        return mapped(batch.content, lambda name, leaf: made.get(name, leaf))

    def _check_dataset(self, shares: _Shares, some: list[Any]) -> None:
        """Raise DataError if ranks load different values of samples `some`. Collective.

        `some` are indices of a mini-batch. Samples that change at random each time they are loaded
        may differ.
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
    """One mini-batch as this rank loaded it: all of its samples, or this rank's alone.

    Attributes
    ----------
    name: a text that identifies the samples of the mini-batch, for ranks to compare.
    samples: the number of samples of the whole mini-batch; None if this rank loaded all of it.
    content: the loaded object.
    tensors: the tensors in it, by name.
    spread: the indices of a few samples at equal distances, the first and the last among them.
    """

    name: str
    samples: int | None
    content: Any
    tensors: dict[Any, Tensor]
    spread: list[Any] = field(default_factory=list)


@dataclass
class _Loading:
    """The mini-batches of an epoch as they are loaded.

    `look_ahead` is called once before the first, and draws the indices of samples, if they are not
    drawn yet.
    """

    batches: Iterator[_MiniBatch]
    look_ahead: Callable[[], object]


class _Shares:
    """A copy of a DataLoader that loads only this rank's samples of each mini-batch.

    Attributes
    ----------
    axes: the grid axes over which samples are cut.
    parts: the number of parts into which these axes cut samples.
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

        `drawn` is the checksum of the names of the first `done` mini-batches in the saved state;
        DataError is raised with the first mini-batch if these mini-batches are others now.
        """
        self._sampler.begin(done, drawn, self._loader.persistent_workers)
        loading = iter(self._sharing)
        indices = self._sampler.indices
        return _Loading(self._loaded(loading, indices), indices.look_ahead)

    def load(self, batches: list[list[Any]]) -> Iterator[Any]:
        """Return an iterator over mini-batches with the indices `batches`, to check their samples.

        The mini-batches of the loop are not affected.
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

    It must not refer to its DataLoader: torch waits 5 seconds for each persistent worker of a
    DataLoader that the garbage collector finds.

    Attributes
    ----------
    seeds: the generator from which worker processes are seeded.
    indices: the indices of the current loop.
    """

    indices: _Indices

    def __init__(self, drawing: Any, parts: int, part: int, own: torch.Generator) -> None:
        self._drawing, self._parts, self._part, self._own = drawing, parts, part, own
        self.seeds = torch.Generator()
        self._seeded = False

    def begin(self, done: int, drawn: int, persistent: bool) -> None:
        """Prepare the next loop, which skips the first `done` mini-batches.

        `drawn` is the checksum of these mini-batches in the saved state, which the loop compares.
        Workers are seeded again unless they are `persistent` and have been seeded.
        """
        self._done = done, drawn
        self._seeded = self._seeded and persistent

    def __iter__(self) -> _Indices:
        # A DataLoader calls this, draws the seed of its workers, and then asks for indices.
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
        """Draw the seed of this rank's workers, when a serial DataLoader would draw its own.

        Each part of the `sample` axis has a seed of its own, so that workers on ranks that share
        samples change them alike. The first part has the serial program's seed.
        """
        self._seeded = True
        self.seeds.set_state(self._own.get_state())
        torch.empty((), dtype=torch.int64).random_(generator=self._own)
        torch.empty(self._part, dtype=torch.int64).random_(generator=self.seeds)


class _Indices:
    """An iterator over this rank's indices of each mini-batch; it records the indices of all ranks.

    Attributes
    ----------
    drawn: for each mini-batch that is being loaded, the indices of its samples on all ranks, and
        the number of samples that this rank loads.
    """

    def __init__(self, batches: Iterator[list[Any]], parts: int, part: int) -> None:
        self._batches, self._parts, self._part = batches, parts, part
        self._next: list[list[Any]] = []
        self.drawn: deque[tuple[list[Any], int]] = deque()

    def look_ahead(self) -> None:
        """Draw the indices of the first mini-batch now, unless a worker has drawn them already."""
        if not self.drawn:
            self._next = list(islice(self._batches, 1))

    def __iter__(self) -> _Indices:
        return self

    def __next__(self) -> list[Any]:
        batch = self._next.pop() if self._next else next(self._batches)
        start, stop = block(len(batch), self._parts, self._part)
        # A rank without samples loads one to know its shape.
        own = batch[start:stop] or batch[:1]
        self.drawn.append((batch, len(own)))
        return own


def _start_of(epoch: int) -> dict[str, Any]:
    """Return the `state_dict` of a loader at the start of an epoch, before numbers are drawn.

    "random" and "first" are for the states of random numbers at `iter` and at the first mini-batch.
    """
    return {"epoch": epoch, "batch": 0, "drawn": 0, "random": None, "first": None}


def _whole(loader: Iterable[Any], done: int, drawn: int) -> _Loading:
    """Start to load the whole mini-batches that follow the first `done`.

    `drawn` is the checksum of the first `done` mini-batches when the state was saved; DataError is
    raised with the first mini-batch if they have another checksum now.
    """
    loading = iter(loader)

    def loaded() -> Iterator[_MiniBatch]:
        for content in loading:
            tensors = _tensors(content, None)
            yield _MiniBatch(f"{[*map(len, tensors.values())]} rows", None, content, tensors)

    batches = loaded()
    return _Loading(batches, lambda: _skip(map(attrgetter("name"), batches), done, drawn))


def _skip(names: Iterator[str], done: int, drawn: int) -> None:
    """Take the names of the first `done` mini-batches from an iterator.

    Raises DataError if there are fewer, or if their checksum is not `drawn`, that of the saved
    state.
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
    """Return whether a loader takes its mini-batches from the indices of its batch sampler."""
    return (
        loader.batch_sampler is not None
        and not isinstance(loader.dataset, IterableDataset)
        and type(loader).__iter__ is DataLoader.__iter__
    )


def _name(batch: list[Any]) -> str:
    return f"samples {batch}"


def _listed(batch: Any) -> list[Any]:
    """Return a mini-batch of a sampler (a list, tuple, tensor or array of indices) as a list."""
    return batch.tolist() if hasattr(batch, "tolist") else list(batch)


def _like(
    loader: DataLoader[Any], batches: Any, workers: int, generator: torch.Generator
) -> DataLoader[Any]:
    """Return a copy of a DataLoader that has other mini-batches, workers and random numbers.

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
    """Return the grid axes that cut samples; raise ValueError if they differ between layouts."""
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
    """Return tensors to compare among the ranks with equal coordinates along `axes`."""
    tensors = batch.tensors if isinstance(batch, _MiniBatch) else batch
    return [Checked(f"tensor {name!r}", x, axes) for name, x in tensors.items()]


def _text(tensors: Mapping[Any, Tensor]) -> str:
    """Describe tensors by name, shape of a sample, and type, in a text that ranks compare."""
    return ", ".join(f"{name!r} of {(*x.shape[1:],)} {x.dtype}" for name, x in tensors.items())


def _tensors(content: Any, count: int | None) -> dict[Any, Tensor]:
    """Return the tensors in a mini-batch by name; subclasses become plain tensors.

    `count` is the number of samples that each must have; None for any number. Raises DataError for
    a mini-batch without tensors, and for tensors that cannot be cut by samples.
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
