"""`Loader`: mini-batches as DistTensors, read ahead by a background thread."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any, TypeVar

from distconv.data.cache import Arrivals, Arriving, Cache, Loaded
from distconv.data.dataset import Batch, Blocks, Dataset
from distconv.data.errors import check_alike, in_step, together
from distconv.data.fields import Values
from distconv.data.sampler import FixedBatches, Sampler
from distconv.grid.process_grid import ProcessGrid

Request = TypeVar("Request")
Item = TypeVar("Item")


def prefetched(
    read: Callable[[Request], Item], requests: Iterable[Request], ahead: int = 2
) -> Generator[Item, None, None]:
    """Yield `read(request)` for every request in order; one background thread calls `read`.

    The thread reads at most `ahead` results before they are requested. An exception of `read` is
    raised instead of its result. The thread ends with the iteration, even if the caller stops
    early.
    """
    background = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prefetch")
    waiting: deque[Future[Item]] = deque()
    try:
        for request in requests:
            waiting.append(background.submit(read, request))
            if len(waiting) > ahead:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        background.shutdown(cancel_futures=True)


@dataclass(frozen=True)
class Traffic:
    """The bytes that a rank has read and received, and the seconds it has waited for samples.

    Attributes
    ----------
    bytes_read: bytes of the blocks of this rank, in the types of the source.
    bytes_fetched: bytes of all chunks that intersect the blocks of this rank.
    seconds_waited: seconds that the program waited for samples.
    bytes_received: bytes of samples that other ranks sent from their caches.

    Examples
    --------
    >>> data = dc.data.Dataset(np.zeros((10, 1, 8), "float32"), dc.ProcessGrid(width=2))
    >>> loader = dc.data.Loader(data, batch_size=5)
    >>> for x in loader:
    ...     pass
    >>> loader.traffic.bytes_read, loader.traffic.bytes_received  # half of 10 samples of 32 bytes
    (160, 0)
    """

    bytes_read: int
    bytes_fetched: int
    seconds_waited: float
    bytes_received: int = 0

    def __str__(self) -> str:
        read = (
            f"{self.bytes_read / 1e6:.1f} MB read ({self.bytes_fetched / 1e6:.1f} MB with whole "
            "chunks)"
        )
        waited = f"{self.seconds_waited:.2f} s waited"
        if not self.bytes_received:
            return f"{read}, {waited}"
        return f"{read}, {self.bytes_received / 1e6:.1f} MB from other ranks, {waited}"


class Loader:
    """The mini-batches of a dataset, epoch by epoch. Collective, with the same arguments.

    Each `for` loop iterates over the next epoch. Mini-batches are the same on any grid. A
    background thread reads ahead.

    Parameters
    ----------
    dataset: the samples.
    batch_size: samples of a mini-batch, over all ranks.
    shuffle: whether each epoch has a random order of samples.
    drop_last: whether samples that do not fill a mini-batch are left out of the epoch. Otherwise
        the last mini-batch is smaller, and some ranks may hold no samples of it.
    seed: the seed of the shuffling.
    batch_sampler: a `Sampler`, or the sample numbers of each mini-batch, in place of `batch_size`,
        `shuffle`, `drop_last` and `seed`.
    ahead: the number of mini-batches that are read before the loop requests them.

    Attributes
    ----------
    dataset: the samples.
    batch_sampler: the sampler that makes the mini-batches.

    Raises
    ------
    DataError
        On every rank, if arguments differ or make no mini-batch; in a loop, if a rank cannot
        read its block.

    Examples
    --------
    >>> grid = dc.ProcessGrid(height=2)
    >>> data = dc.data.Dataset(np.zeros((10, 1, 33, 32), "float32"), grid)
    >>> loader = dc.data.Loader(data, batch_size=4, shuffle=True)
    >>> [len(x) for x in loader]
    [4, 4, 2]
    >>> loader.epoch, loader.batch_size, len(loader)
    (1, 4, 3)
    >>> loader.traffic.bytes_read < 10 * 33 * 32 * 4  # each rank has read its blocks alone
    True
    """

    def __init__(
        self,
        dataset: Dataset,
        batch_size: int = 1,
        shuffle: bool = False,
        *,
        drop_last: bool = False,
        seed: int = 0,
        batch_sampler: Sampler | Iterable[Sequence[int]] | None = None,
        ahead: int = 2,
    ) -> None:
        self.dataset = dataset
        self._ahead = ahead
        self._waited = 0.0
        self._batch = self._yielded = 0
        self._epoch = 0
        self._begun = False

        def chosen() -> Sampler | FixedBatches:
            if ahead < 1:
                raise ValueError(f"ahead={ahead} is not a number of mini-batches; choose 1 or more")
            if batch_sampler is None:
                return Sampler(
                    len(dataset), batch_size, shuffle=shuffle, drop_last=drop_last, seed=seed
                )
            if isinstance(batch_sampler, Sampler):
                return batch_sampler
            return FixedBatches(batch_sampler)

        self.batch_sampler = together(self.grid, chosen)
        facts = {name: str(value) for name, value in self.batch_sampler.description().items()}
        check_alike(self.grid, facts, "Create the loader with the same arguments on all ranks.")

    @property
    def grid(self) -> ProcessGrid:
        """Return the grid of the dataset."""
        return self.dataset.grid

    @property
    def epoch(self) -> int:
        """Return the epoch, from 0, of the next mini-batch."""
        return self._position()[0]

    @property
    def traffic(self) -> Traffic:
        """Return the bytes that this rank has read and received, and the seconds it has waited.

        Bytes are counted over all loaders of the dataset, seconds in this loader only.
        """
        data = self.dataset
        received = 0 if data.cache is None else data.cache.bytes_received
        return Traffic(data.bytes_read, data.bytes_fetched, self._waited, received)

    @property
    def batch_size(self) -> int | None:
        """Return the samples per mini-batch over all ranks; None for given mini-batches."""
        sampler = self.batch_sampler
        return sampler.batch_size if isinstance(sampler, Sampler) else None

    def __len__(self) -> int:
        """Return the number of mini-batches of an epoch."""
        return len(self.batch_sampler)

    def __iter__(self) -> Iterator[Batch]:
        """Return an iterator over the next epoch; after `load_state_dict`, over the rest of one."""
        if self._begun:
            self._epoch, self._batch = self._epoch + 1, 0
        self._epoch, self._batch = self._position()
        self._begun = True
        return self._batches(self.batch_sampler.batches(self._epoch)[self._batch :])

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch, and the number of its mini-batches that a loop has yielded.

        After a loop that `break` has ended, the state is the position in the interrupted epoch. The
        state is the same on all ranks, and can be loaded on any grid.

        Examples
        --------
        >>> data = dc.data.Dataset(np.zeros((10, 1, 8), "float32"), dc.ProcessGrid(width=2))
        >>> loader = dc.data.Loader(data, batch_size=4)
        >>> for x in loader:
        ...     break
        >>> state = loader.state_dict()
        >>> resumed = dc.data.Loader(data, batch_size=4)
        >>> resumed.load_state_dict(state)
        >>> [len(x) for x in resumed]  # the rest of the epoch
        [4, 2]
        """
        epoch, batch = self._position()
        return {"epoch": epoch, "batch": batch, "sampler": self.batch_sampler.description()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume in the next loop where `state_dict` was called, on this grid or another.

        Raises ValueError if the state is of a loader with other mini-batches. No communication.
        """
        own, saved = self.batch_sampler.description(), dict(state["sampler"])
        for name in dict.fromkeys([*own, *saved]):
            if own.get(name) != saved.get(name):
                raise ValueError(
                    f"the state is of a loader with {name}={saved.get(name)}, this one has "
                    f"{name}={own.get(name)}; create it with the saved value, or start from the "
                    "beginning"
                )
        self._epoch, self._batch, self._begun = int(state["epoch"]), int(state["batch"]), False

    def _position(self) -> tuple[int, int]:
        """Return the epoch of the next mini-batch, and its index in the epoch, both from 0."""
        if self._batch < len(self) or not len(self):
            return self._epoch, self._batch
        return self._epoch + 1, 0

    def _batches(self, batches: list[list[int]]) -> Iterator[Batch]:
        data = self.dataset
        for blocks in in_step(self.grid, self._timed(batches), held=data.held, axes=data.cut_over):
            self._batch += 1
            self._yielded += 1
            if blocks.rows is not None:
                data.compare_rows(*blocks.rows)
            yield data.assemble(blocks)

    def _timed(self, batches: list[list[int]]) -> Generator[tuple[str, Blocks], None, None]:
        """Yield the name of each mini-batch and this rank's blocks, and count the time waited."""
        with ExitStack() as closed:
            reading = self._reading(batches, closed)
            while True:
                start = time.perf_counter()
                blocks = next(reading, None)
                self._waited += time.perf_counter() - start
                if blocks is None:
                    return
                # Ranks that do not all compare a row here raise, and none waits.
                compared = "" if blocks.rows is None else f", and a row of sample {blocks.rows[0]}"
                yield f"samples {blocks.samples}{compared}", blocks

    def _reading(
        self, batches: list[list[int]], closed: ExitStack
    ) -> Generator[Blocks, None, None]:
        """Return an iterator over this rank's blocks of the mini-batches, read ahead by a thread.

        The thread ends when the exit stack `closed` is closed.
        """
        data, epoch = self.dataset, self._epoch

        def read(numbered: tuple[int, list[int]]) -> Blocks:
            number, samples = numbered
            blocks = data.read(samples, epoch)
            # Ranks along the sample axis read different samples. So at mini-batches 1, 2, 4, ...
            # all ranks also read rows of one common sample to compare.
            if data.grid.journal.compares and samples and not number & (number - 1):
                blocks.rows = data.rows(samples[number.bit_length() % len(samples)])
            return blocks

        if data.cache is None:
            reading = prefetched(read, enumerate(batches, self._yielded + 1), self._ahead)
        else:  # The sources may be gone after the first epoch, so no row is read from them.
            values = closed.enter_context(closing(self._exchanged(data.cache, batches, epoch)))
            reading = prefetched(data.converted, values, self._ahead)
        return closed.enter_context(closing(reading))

    def _exchanged(
        self, cache: Cache, batches: list[list[int]], epoch: int
    ) -> Generator[Values, None, None]:
        """Yield the elements that this rank needs of each mini-batch, from the caches of all ranks.

        Collective. A background thread reads samples that no rank caches yet. The calling thread
        starts the messages of the next mini-batch before it waits for the messages of this one.
        """
        sampler = self.batch_sampler
        others = range(sampler.samples) if isinstance(sampler, Sampler) else ()

        def planned() -> list[Arrivals]:
            for batch in (*batches, others):
                self.dataset.numbers(batch)
            return cache.plan(batches, others)

        arrivals = together(self.grid, planned)

        def loaded() -> Generator[tuple[str, Loaded], None, None]:
            with closing(prefetched(cache.load, arrivals, self._ahead)) as reading:
                for batch, found in zip(batches, reading, strict=True):
                    yield f"samples {batch}", found

        before: Arriving | None = None
        with closing(in_step(self.grid, loaded())) as found:
            for batch, new, boxes in zip(batches, arrivals, found, strict=True):
                arriving = self.dataset.exchange(batch, epoch, new, boxes)
                if before is not None:
                    yield before()
                before = arriving
        if before is not None:
            yield before()
