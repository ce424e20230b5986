"""An ordinary DataLoader yields the same mini-batches on a grid; ranks load their share of them."""

from __future__ import annotations

import io
import random
from argparse import Namespace as Batch
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Iterator
from itertools import count, islice
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
    random_split,
)

import distconv as dc
from distconv.data import distribute
from tests.support.everywhere import WORLD, fails_everywhere
from tests.support.sample_files import SAMPLES, X, Y

every_size = pytest.mark.parallel([1, 2, 4])
several = pytest.mark.parallel([2, 4])

GRIDS: dict[int, list[dict[str, int]]] = {
    1: [{}],
    2: [{"sample": 2}, {"width": 2}],
    4: [{"sample": 4}, {"sample": 2, "height": 2}],
}
BOTH = TensorDataset(torch.from_numpy(X), torch.from_numpy(Y))


class Counted(Dataset[Any]):
    """Samples as dictionaries, with a record of which were loaded."""

    def __init__(self) -> None:
        self.loaded: list[int] = []

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, sample: int) -> Any:
        self.loaded.append(sample)
        return {"x": torch.from_numpy(X[sample]), "y": torch.from_numpy(Y[sample])}


@every_size
@pytest.mark.parametrize(
    "options", [{}, {"shuffle": True}, {"drop_last": True}, {"num_workers": 1}]
)
def test_the_mini_batches_are_those_of_the_loader(options: dict[str, Any]) -> None:
    for extents in GRIDS[WORLD.size]:
        grid = dc.ProcessGrid(**extents)
        serial, loader = (
            DataLoader(BOTH, batch_size=2, generator=torch.Generator().manual_seed(3), **options)
            for _ in range(2)
        )
        spread = distribute(loader, grid)
        assert len(spread) == len(serial)
        for (expected_x, expected_y), (x, y) in zip(serial, spread, strict=True):
            assert torch.equal(x.full_tensor(), expected_x)
            assert torch.equal(y.full_tensor(), expected_y)
            assert y.grid_layout == dc.Layout.like(x, without="channel")


@several
def test_ranks_shuffle_as_rank_zero_does_and_load_only_their_samples() -> None:
    torch.manual_seed(WORLD.rank)
    for extents in GRIDS[WORLD.size]:
        grid = dc.ProcessGrid(**extents)
        counted = Counted()
        seen: list[float] = []
        for batch in distribute(DataLoader(counted, batch_size=4, shuffle=True), grid):
            assert batch["x"].shape[1:] == X.shape[1:]
            seen += batch["x"].full_tensor()[:, 0, 0, 0].tolist()
        assert sorted(seen) == X[:, 0, 0, 0].tolist()
        everyone = grid.all_gather_object(counted.loaded)
        # The second mini-batch is of one sample, of which each loads one for the sake of its shape.
        # Where ranks load other samples, all load four and one more, to compare the dataset.
        own = 4 // grid.shape["sample"] + 1 + 5 * (grid.shape["sample"] > 1)
        assert {len(loaded) for loaded in everyone} == {own}


@every_size
def test_loaders_without_indices_are_cut_whole() -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(torch.from_numpy(X))

    for extents in GRIDS[WORLD.size]:
        grid = dc.ProcessGrid(**extents)
        batches = torch.from_numpy(X).split(2)
        whole: Any = DataLoader(list(batches), batch_size=None)  # type: ignore[arg-type]
        for loader in (DataLoader(Stream(), batch_size=2), batches, whole):
            found = [batch.full_tensor() for batch in distribute(loader, grid)]
            assert torch.equal(torch.cat(found), torch.from_numpy(X)) and len(found) == 3


@every_size
def test_layouts_are_chosen_as_for_files() -> None:
    grid = dc.ProcessGrid(sample=-1)
    cut = dc.Layout(height="sample")
    [(x, y), *_] = distribute(DataLoader(BOTH, batch_size=4), grid, layout=cut)
    assert x.cuts == ((), (), ("sample",) if WORLD.size > 1 else (), ())
    assert torch.equal(x.full_tensor(), BOTH.tensors[0][:4])
    assert torch.equal(y.full_tensor(), BOTH.tensors[1][:4])
    with pytest.raises(ValueError, match="partition samples over different axes"):
        distribute(DataLoader(BOTH), grid, {0: cut, 1: dc.Layout(sample="sample")})
    if WORLD.size > 1:
        # The first tensor, of which nothing is said, is cut by samples.
        wide, by_width = dc.ProcessGrid(width=-1), dc.Layout(sample="width")
        with pytest.raises(ValueError, match="partition samples over different axes"):
            next(iter(distribute(DataLoader(BOTH), wide, {1: by_width})))
    [(x, y), *_] = distribute(DataLoader(BOTH, batch_size=4), grid, {1: dc.Layout()})
    assert torch.equal(x.full_tensor(), BOTH.tensors[0][:4])
    assert torch.equal(y.full_tensor(), BOTH.tensors[1][:4])


@several
def test_samples_changed_at_random_on_one_rank_are_an_error_on_all() -> None:
    class Noisy(Counted):
        def __getitem__(self, sample: int) -> Any:
            return torch.from_numpy(X[sample]) + torch.rand(())

    torch.manual_seed(WORLD.rank)
    grid = dc.ProcessGrid(width=-1)
    loader = DataLoader(Noisy(), batch_size=2)
    fails_everywhere(lambda: next(iter(distribute(loader, grid))), "tensor 0 .*torch.manual_seed")
    for _ in distribute([torch.zeros(2)] * 18, grid):
        pass
    fails_everywhere(lambda: next(iter(distribute(loader, grid))), "tensor 0 .*torch.manual_seed")


@every_size
@pytest.mark.parametrize(
    ("batches", "message"),
    [
        ([torch.zeros(2, 3), "text"], "holds str at 0; expected tensors"),
        ([{"a": [1, {"b": "text"}]}], r"holds int at \('a', 0\); expected tensors"),
        ([torch.zeros(2, 3).to_sparse()], "holds Tensor at 0; expected plain, dense tensors"),
        ([Batch(x=torch.zeros(2, 3))], "holds Namespace, an object with tensors, at 0; expected a"),
        ([torch.tensor(1.0)], "holds Tensor at 0; expected tensors with samples first"),
    ],
)
def test_mini_batches_without_a_tensor_to_cut_are_an_error_on_all_ranks(
    batches: Any, message: str
) -> None:
    grid = dc.ProcessGrid(width=-1)
    fails_everywhere(lambda: list(distribute(batches, grid)), message)


@several
def test_a_rank_that_fails_or_has_fewer_mini_batches_is_an_error_on_all() -> None:
    last = WORLD.rank == WORLD.size - 1

    class Failing(Counted):
        def __getitem__(self, sample: int) -> Any:
            if sample == 2 and last:
                raise OSError("disk on fire")
            return super().__getitem__(sample)

    grid = dc.ProcessGrid(width=-1)
    loader = DataLoader(Failing(), batch_size=2)
    fails_everywhere(lambda: list(distribute(loader, grid)), "^disk on fire$")
    uneven = torch.from_numpy(X[: 4 if last else 5]).split(2)
    others = "rank 0" if WORLD.size == 2 else "ranks 0-2"
    fails_everywhere(
        lambda: list(distribute(uneven, grid)),
        f"mini-batch 3 is .1. rows with .* on {others} and missing",
    )


class Drawn(BatchSampler):
    """A batch sampler that yields what `draw` returns."""

    def __init__(self, draw: Callable[[], Any]) -> None:
        self.draw = draw

    def __iter__(self) -> Iterator[Any]:
        return iter(self.draw())

    def __len__(self) -> int:
        return 2


class Reversing(DataLoader[Any]):
    """A DataLoader with a way of its own to go through its mini-batches."""

    def __iter__(self) -> Any:
        return iter(list(super().__iter__())[::-1])


def by_chance() -> list[list[int]]:
    return [random.sample(range(SAMPLES), 3), np.random.permutation(3).tolist()]


LOADERS: dict[str, Callable[[], Any]] = {
    "shuffled": lambda: DataLoader(BOTH, 2, shuffle=True),
    "incomplete": lambda: DataLoader(BOTH, 2, shuffle=True, drop_last=True),
    "workers": lambda: DataLoader(BOTH, 2, shuffle=True, num_workers=2, persistent_workers=True),
    "weighted": lambda: DataLoader(BOTH, 3, sampler=WeightedRandomSampler([1, 2, 3, 4, 5], 9)),
    "generator": lambda: DataLoader(
        BOTH,
        2,
        sampler=RandomSampler(
            BOTH, True, 40, torch.Generator().manual_seed(torch.randint(99, ()).item())
        ),
    ),
    "tensors": lambda: DataLoader(BOTH, batch_sampler=Drawn(lambda: torch.randperm(4).split(3))),
    "arrays": lambda: DataLoader(BOTH, batch_sampler=Drawn(lambda: np.arange(4).reshape(2, 2))),
    "tuples": lambda: DataLoader(BOTH, batch_sampler=Drawn(lambda: [(4, 0, 2), (1,)])),
    "other numbers": lambda: DataLoader(BOTH, batch_sampler=Drawn(by_chance)),
}


@pytest.mark.parallel([2])
@pytest.mark.parametrize("kind", LOADERS)
def test_samples_are_drawn_as_in_the_serial_program_from_the_numbers_of_rank_zero(
    kind: str,
) -> None:
    def seed(number: int) -> None:
        torch.manual_seed(number)
        np.random.seed(number)
        random.seed(number)

    seed(7)
    loader = LOADERS[kind]()
    serial = [list(loader) for _ in range(2)]
    state = torch.get_rng_state()
    for extents in GRIDS[WORLD.size]:
        grid = dc.ProcessGrid(**extents)
        seed(7 + WORLD.rank)
        spread = distribute(LOADERS[kind](), grid)
        for epoch in serial:
            assert len(spread) == len(epoch)
            for wanted, made in zip(epoch, spread, strict=True):
                assert type(made) is type(wanted)
                assert all(
                    torch.equal(a.full_tensor(), b) for a, b in zip(made, wanted, strict=True)
                )
        assert WORLD.rank or torch.equal(torch.get_rng_state(), state)


def padded(samples: list[Any]) -> Any:
    longest = max(int(y[0, 0]) for _, y in samples) + 1
    return torch.stack([x[0, 0, :1].expand(longest) for x, _ in samples])


def without_the_first(samples: list[Any]) -> Any:
    return torch.stack([x for x, y in samples if int(y[0, 0])])


DIVIDED: dict[str, tuple[Callable[[], Any], str]] = {
    "sampler": (
        lambda: DataLoader(BOTH, 2, sampler=DistributedSampler(BOTH, WORLD.size, WORLD.rank)),
        r"mini-batch 1 is samples .* remove DistributedSampler",
    ),
    "numbers of its own": (
        lambda: DataLoader(BOTH, batch_sampler=Drawn(lambda: [[0, 1], [WORLD.rank, 4]])),
        r"mini-batch 2 is samples \[0, 4\] .* and samples \[1, 4\]",
    ),
    "subset": (
        lambda: DataLoader(Subset(BOTH, [WORLD.rank, 4, (WORLD.rank + 1) % 4]), 3),
        r"of samples \[0, 1, 2\] of the dataset, tensor 0 is not the same",
    ),
    "files": (
        lambda: DataLoader(TensorDataset(torch.from_numpy(X[WORLD.rank : WORLD.rank + 2])), 2),
        r"of samples \[0, 1\] of the dataset, tensor 0 .* Pass the same dataset on all ranks",
    ),
    "workers": (
        lambda: DataLoader(Subset(BOTH, [WORLD.rank, 4]), 2, num_workers=1),
        r"of samples \[0, 1\] of the dataset",
    ),
    "split": (
        lambda: DataLoader(
            random_split(range(1000), [900, 100], torch.Generator().manual_seed(WORLD.rank))[0], 8
        ),
        "of the dataset, tensor 0 .* a random split",
    ),
    "length": (lambda: DataLoader(Subset(BOTH, range(2 + WORLD.rank % 2)), 8), "mini-batch 1 is"),
    "padded": (lambda: DataLoader(BOTH, 4, collate_fn=padded), "with 0 of .* pad all samples"),
    "left out": (
        lambda: DataLoader(BOTH, 4, collate_fn=without_the_first),
        "rows instead of . samples at 0; expected all samples|stack expects a non-empty",
    ),
}


@several
@pytest.mark.parametrize("kind", DIVIDED)
def test_samples_that_are_divided_among_ranks_already_are_an_error_on_all(kind: str) -> None:
    make, message = DIVIDED[kind]
    loader = distribute(make(), dc.ProcessGrid(sample=-1))
    fails_everywhere(lambda: list(loader), message)


class Noise(Counted):
    """Samples with noise, from torch's numbers or from a generator that no one has seeded."""

    def __init__(self, own: bool = False) -> None:
        super().__init__()
        self.numbers = np.random.default_rng() if own else None

    def __getitem__(self, sample: int) -> Any:
        if self.numbers is not None:
            return torch.from_numpy(self.numbers.random(8))
        return torch.rand(8) + sample


@several
@pytest.mark.parametrize("own", [False, True])
def test_noise_in_a_dataset_does_not_make_it_another_one(own: bool) -> None:
    torch.manual_seed(WORLD.rank)
    loader = DataLoader(Noise(own), batch_size=4)
    assert len(list(distribute(loader, dc.ProcessGrid(sample=-1)))) == 2


@pytest.mark.parallel([2])
@pytest.mark.parametrize("persistent", [False, True])
def test_workers_draw_the_serial_noise_and_another_in_each_part_of_the_samples(
    persistent: bool,
) -> None:
    def loader() -> Any:
        return DataLoader(Noise(), 4, num_workers=1, persistent_workers=persistent)

    torch.manual_seed(0)
    serial = loader()
    expected = [*serial, *serial]
    torch.manual_seed(WORLD.rank)
    spread = distribute(loader(), dc.ProcessGrid(width=-1))
    for made, wanted in zip([*spread, *spread], expected, strict=True):
        assert torch.equal(made.full_tensor(), wanted)
    torch.manual_seed(WORLD.rank)
    for made in distribute(loader(), dc.ProcessGrid(sample=-1)):
        noise = made.full_tensor().frac()
        assert len({tuple(row) for row in noise.tolist()}) == len(noise)


@several
def test_a_class_table_in_another_order_on_each_rank_is_found() -> None:
    # Of the classes, two have other numbers on the last rank, as list(set(names)) may give them.
    labels = torch.arange(4).repeat(64)
    other = torch.tensor([0, 2, 1, 3])[labels] if WORLD.rank == WORLD.size - 1 else labels
    for extents in GRIDS[WORLD.size]:
        torch.manual_seed(0)
        loader = DataLoader(TensorDataset(other), 8, shuffle=True)
        spread = distribute(loader, dc.ProcessGrid(**extents))
        fails_everywhere(lambda spread=spread: list(spread), "tensor 0 is not the same on all r")


@several
def test_a_label_that_differs_late_on_replicas_is_found() -> None:
    labels = torch.zeros(200)
    labels[150] = WORLD.rank == WORLD.size - 1
    spread = distribute(DataLoader(TensorDataset(labels), 1), dc.ProcessGrid(width=-1))
    seen: list[Any] = []
    fails_everywhere(lambda: seen.extend(spread), "tensor 0 is not the same on all ranks: rank")
    assert len(seen) == 150


@pytest.mark.parallel([1, 2])
@pytest.mark.parametrize("kinds", ["shuffled shuffled", "workers shuffled", "weighted workers"])
def test_loaders_that_are_zipped_draw_as_in_the_serial_program(kinds: str) -> None:
    def epochs(wrap: Callable[[Any], Any]) -> list[Any]:
        torch.manual_seed(5)
        first, second = (wrap(LOADERS[kind]()) for kind in kinds.split())
        return [pair for _ in range(2) for pair in zip(first, second, strict=False)]

    serial = epochs(lambda loader: loader)
    grid = dc.ProcessGrid(**GRIDS[WORLD.size][0])
    made = epochs(lambda loader: distribute(loader, grid))
    assert len(made) == len(serial)
    for wanted, found in zip(serial, made, strict=True):
        for a, b in zip(wanted, found, strict=True):
            assert torch.equal(b[0].full_tensor(), a[0])


@pytest.mark.parallel([1, 2])
@pytest.mark.parametrize("kind", ["shuffled", "workers"])
def test_a_zipped_loop_goes_on_where_its_state_was_taken(kind: str) -> None:
    grid = dc.ProcessGrid(**GRIDS[WORLD.size][0])

    def pair() -> list[Any]:
        return [distribute(LOADERS[kind](), grid) for _ in range(2)]

    torch.manual_seed(5)
    loaders = pair()
    started = zip(*loaders, strict=True)
    next(started)
    states = [loader.state_dict() for loader in loaders]
    rest = [(a[0].full_tensor(), b[0].full_tensor()) for a, b in started]
    torch.manual_seed(6)
    resumed = pair()
    for loader, state in zip(resumed, states, strict=True):
        loader.load_state_dict(state)
    found = [(a[0].full_tensor(), b[0].full_tensor()) for a, b in zip(*resumed, strict=True)]
    assert len(found) == len(rest) == 2
    assert all(all(map(torch.equal, x, y)) for x, y in zip(found, rest, strict=True))


@pytest.mark.parallel([1, 2])
def test_after_break_a_state_continues_the_epoch_and_the_next_loop_begins_another() -> None:
    grid = dc.ProcessGrid(**GRIDS[WORLD.size][0])
    torch.manual_seed(5)
    serial = DataLoader(BOTH, 2, shuffle=True)
    cut, whole = list(serial), list(serial)
    torch.manual_seed(5)
    loader = distribute(DataLoader(BOTH, 2, shuffle=True), grid)
    for x, _ in loader:
        assert torch.equal(x.full_tensor(), cut[0][0])
        break
    state = loader.state_dict()
    assert all(
        torch.equal(x.full_tensor(), wanted)
        for (x, _), (wanted, _) in zip(loader, whole, strict=True)
    )
    resumed = distribute(DataLoader(BOTH, 2, shuffle=True), grid)
    resumed.load_state_dict(state)
    assert all(
        torch.equal(x.full_tensor(), wanted)
        for (x, _), (wanted, _) in zip(resumed, cut[1:], strict=True)
    )


@pytest.mark.parallel([1, 2])
def test_attributes_and_length_are_those_of_the_loader() -> None:
    grid = dc.ProcessGrid(sample=-1)
    loader = DataLoader(BOTH, 2, drop_last=True)
    spread = distribute(loader, grid)
    for name in ("dataset", "batch_size", "sampler", "batch_sampler", "num_workers", "drop_last"):
        assert getattr(spread, name) is getattr(loader, name)
    assert len(spread) == len(loader) and len(spread.dataset) == SAMPLES
    for name in ("dataset", "batch_size", "sampler", "drop_last"):
        with pytest.raises(ValueError, match=f"{name} attribute should not be set"):
            setattr(spread, name, getattr(loader, name))
    spread.note = "kept"
    assert loader.note == "kept"  # type: ignore[attr-defined]
    del spread.note
    assert not hasattr(loader, "note")
    with pytest.raises(AttributeError, match="note"):
        del spread.note
    with pytest.raises(AttributeError, match="batchsize"):
        _ = spread.batchsize
    with pytest.raises(TypeError, match="no len"):
        len(distribute(iter([torch.zeros(2)]), grid))


@every_size
def test_a_sampler_without_end_is_drawn_as_far_as_the_loop_goes() -> None:
    class Endless(BatchSampler):
        def __init__(self) -> None:
            pass

        def __iter__(self) -> Any:
            return ([i % SAMPLES, (i + 1) % SAMPLES] for i in count())

    for extents in GRIDS[WORLD.size]:
        loader = distribute(DataLoader(BOTH, batch_sampler=Endless()), dc.ProcessGrid(**extents))
        for i, (x, _) in enumerate(islice(loader, 7)):
            assert torch.equal(x.full_tensor(), BOTH.tensors[0][[i % SAMPLES, (i + 1) % SAMPLES]])


Pair = namedtuple("Pair", ["image", "mask"])


class Marked(torch.Tensor):
    """A tensor with metadata, as MONAI has them."""


class Subjects(Counted):
    def __getitem__(self, sample: int) -> Any:
        x, y = torch.from_numpy(X[sample]), torch.from_numpy(Y[sample])
        return {
            "name": f"sample {sample}",
            "image": OrderedDict(data=x.as_subclass(Marked), affine=torch.eye(4), path=["a", "b"]),
            "both": Pair(x, y),
            "several": (y, [sample, "text"]),
        }


@pytest.mark.parallel([2])
@pytest.mark.parametrize("workers", [0, 1])
def test_mini_batches_keep_their_form_and_what_is_no_tensor(workers: int) -> None:
    for extents in GRIDS[WORLD.size]:
        grid = dc.ProcessGrid(**extents)
        loader = DataLoader(Subjects(), batch_size=4, num_workers=workers)
        (serial, _), (made, _) = list(loader), list(distribute(loader, grid))
        parts, part = grid.shape["sample"], grid.coords["sample"]
        own = slice(part * 4 // parts, (part + 1) * 4 // parts)
        assert list(made) == list(serial) and made["name"] == serial["name"][own]
        assert type(made["image"]) is OrderedDict and type(made["both"]) is Pair
        assert made["image"]["path"] == [names[own] for names in serial["image"]["path"]]
        assert made["several"][1][1] == serial["several"][1][1][own]
        data = made["image"]["data"]
        assert type(data) is dc.DistTensor and type(data.to_local()) is torch.Tensor
        for a, b in [
            (data, serial["image"]["data"]),
            (made["image"]["affine"], serial["image"]["affine"]),
            *zip(made["both"], serial["both"], strict=True),
            (made["several"][0], serial["several"][0]),
            (made["several"][1][0], serial["several"][1][0]),
        ]:
            assert torch.equal(a.full_tensor(), b.as_subclass(torch.Tensor))


@every_size
@pytest.mark.parametrize("make", [LOADERS["shuffled"], lambda: Reversing(BOTH, 2, shuffle=True)])
@pytest.mark.parametrize("done", [0, 1, 2, 3])
def test_a_loop_goes_on_where_its_state_was_taken_on_another_grid(make: Any, done: int) -> None:
    first, second = (dc.ProcessGrid(**extents) for extents in (GRIDS[WORLD.size] * 2)[:2])
    torch.manual_seed(3)
    loader = distribute(make(), first)
    list(loader)
    started = iter(loader)
    expected = [next(started)[0].full_tensor() for _ in range(done)]
    saved = io.BytesIO()
    torch.save(loader.state_dict(), saved)
    rest = [x.full_tensor() for x, _ in started]
    torch.manual_seed(4)
    numbers = torch.get_rng_state()
    resumed = distribute(make(), second)
    resumed.load_state_dict(torch.load(io.BytesIO(saved.getvalue()), weights_only=True))
    assert resumed.epoch == 1
    found = [x.full_tensor() for x, _ in resumed]
    assert len(found) == 3 - done and resumed.epoch == 2
    if done:
        assert all(map(torch.equal, found, rest)) and torch.equal(torch.get_rng_state(), numbers)
        assert torch.cat([*expected, *found]).unique(dim=0).shape[0] == SAMPLES
        resumed.load_state_dict(torch.load(io.BytesIO(saved.getvalue()), weights_only=True))
        other = distribute(DataLoader(BOTH, 5), second)
        other.load_state_dict(resumed.state_dict())
        fails_everywhere(lambda: list(other), f"saved after {done} mini-batches of an epoch, but")
