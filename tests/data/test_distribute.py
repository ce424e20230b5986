"""An ordinary DataLoader yields the same mini-batches on a grid; ranks load their share of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

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
        # The sampler draws its seed from torch's numbers, as does the iterator.
        loader = DataLoader(
            BOTH, batch_size=2, generator=torch.Generator().manual_seed(3), **options
        )
        drawn = list(loader.batch_sampler)  # type: ignore[arg-type]
        loader = DataLoader(
            BOTH, batch_size=2, generator=torch.Generator().manual_seed(3), **options
        )
        spread = distribute(loader, grid)
        assert len(spread) == len(drawn)
        for samples, (x, y) in zip(drawn, spread, strict=True):
            assert torch.equal(x.full_tensor(), BOTH.tensors[0][samples])
            assert torch.equal(y.full_tensor(), BOTH.tensors[1][samples])
            assert y.layout == dc.Layout.like(x, without="channel")


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
        assert {len(loaded) for loaded in everyone} == {4 // grid.shape["sample"] + 1}


@every_size
def test_loaders_without_indices_are_cut_whole() -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(torch.from_numpy(X))

    for extents in GRIDS[WORLD.size]:
        grid = dc.ProcessGrid(**extents)
        for loader in (DataLoader(Stream(), batch_size=2), torch.from_numpy(X).split(2)):
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
    with pytest.raises(ValueError, match="cut samples differently"):
        distribute(DataLoader(BOTH), grid, {0: cut, 1: dc.Layout(sample="sample")})


@several
def test_samples_changed_at_random_on_one_rank_are_an_error_on_all() -> None:
    class Noisy(Counted):
        def __getitem__(self, sample: int) -> Any:
            return torch.from_numpy(X[sample]) + torch.rand(())

    torch.manual_seed(WORLD.rank)
    grid = dc.ProcessGrid(width=-1)
    loader = DataLoader(Noisy(), batch_size=2)
    fails_everywhere(lambda: next(iter(distribute(loader, grid))), "tensor 0 .*torch.manual_seed")


@every_size
@pytest.mark.parametrize(
    ("batches", "message"),
    [
        ([torch.zeros(2, 3), "text"], "holds str at 0; expected tensors"),
        ([(torch.zeros(2, 3), 1)], "holds int at 1; expected tensors"),
        ([torch.tensor(1.0)], "holds Tensor at 0; expected tensors with samples first"),
    ],
)
def test_what_is_no_tensor_is_an_error_on_all_ranks(batches: Any, message: str) -> None:
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
        lambda: list(distribute(uneven, grid)), f"mini-batch 3 is number 3 on {others} and missing"
    )
