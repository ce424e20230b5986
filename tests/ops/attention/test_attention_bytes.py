"""Attention along a partitioned sequence moves what its rule says, and holds blocks only."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from mpi4py import MPI

import distconv as dc
from benchmarks.measuring.memory import peak_of
from tests.ops.attention.ways import attending_by
from tests.support.arriving import arriving


def _moved(
    shapes: list[tuple[int, ...]], way: str, causal: bool = False
) -> tuple[float, float, float]:
    """Return the bytes at the busiest rank over those of q, k and v: forward, backward, ledger."""
    grid = dc.ProcessGrid(height=-1)
    layouts = [dc.Layout(height="height") if s[2] > 1 else dc.Layout() for s in shapes]
    q, k, v = (
        dc.distribute_tensor(torch.ones(s), grid, layout).requires_grad_()
        for s, layout in zip(shapes, layouts, strict=True)
    )
    whole = sum(x.numel() * x.element_size() for x in (q, k, v))
    dc.redistributions(reset=True)
    with attending_by(way):
        with arriving(grid) as forward:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        with arriving(grid) as backward:
            out.sum().backward()
    told = sum(entry.bytes for entry in dc.redistributions(reset=True))
    own = [sum(forward) / whole, sum(backward) / whole, told / whole]
    everywhere = MPI.COMM_WORLD.allgather(own)
    return tuple(max(row) for row in zip(*everywhere, strict=True))  # type: ignore[return-value]


SQUARE = [(1, 8, 64, 4)] * 3


@pytest.mark.parallel([4])
def test_an_all_to_all_over_heads_moves_four_sixteenths_of_its_operands() -> None:
    forward, backward, told = _moved(SQUARE, "smallest")
    assert forward == told == 4 * 3 / 16 / 3
    assert backward == pytest.approx(forward, abs=0.01)


@pytest.mark.parallel([2, 4])
def test_a_ring_moves_keys_and_values_once_and_their_gradients_home() -> None:
    n = MPI.COMM_WORLD.size
    forward, backward, told = _moved(SQUARE, "ring")
    assert forward == told == pytest.approx(2 / 3 * (n - 1) / n)
    assert backward == pytest.approx(2 * forward, abs=0.01)


@pytest.mark.parallel([3, 4])
def test_a_causal_ring_moves_three_quarters_as_much_to_the_busiest_rank() -> None:
    n = MPI.COMM_WORLD.size
    forward, _, told = _moved([(1, 8, 48, 32)] * 3, "ring", causal=True)
    # Queries bring home their log-sum-exp, too: one number for 32 features.
    assert 0 < told < forward < 2 / 3 * (n - 1) / n * 0.78


@pytest.mark.parallel([2])
def test_a_causal_ring_is_chosen_if_no_gradients_are_recorded() -> None:
    # Both passes of the ring move 2.25 thirds, and both all-to-alls 2.
    forward, backward, told = _moved(SQUARE, "smallest", causal=True)
    assert forward == told == pytest.approx(backward, abs=0.01) == 1 / 3
    grid = dc.ProcessGrid(height=-1)
    x = dc.distribute_tensor(torch.ones(SQUARE[0]), grid, dc.Layout(height="height"))
    with attending_by("smallest"), arriving(grid) as arrived:
        F.scaled_dot_product_attention(x, x, x, is_causal=True)
    everywhere = MPI.COMM_WORLD.allgather(sum(arrived))
    assert max(everywhere) < 0.9 * x.nbytes


@pytest.mark.parallel([2, 4])
def test_few_whole_queries_gather_no_keys() -> None:
    forward, backward, told = _moved([(1, 2, 1, 8), (1, 2, 256, 8), (1, 2, 256, 8)], "smallest")
    assert forward < 0.02 and backward < 0.02 and told == 0


@pytest.mark.parallel([4])
def test_gathering_moves_more_than_any_other_way() -> None:
    assert _moved(SQUARE, "gather")[0] == 2 * 3 / 4 / 3


def _step(causal: bool, serial: bool, queries: int = 1024) -> Callable[[], object]:
    """Return a step of attention and its gradients; fewer queries than 1024 are whole."""
    tensors = [torch.ones(1, 8, n, 16) for n in (queries, 1024, 1024)]
    if not serial:
        grid = dc.ProcessGrid(height=-1)
        layouts = [
            dc.Layout(height="height") if x.shape[2] == 1024 else dc.Layout() for x in tensors
        ]
        tensors = [dc.distribute_tensor(x, grid, i) for x, i in zip(tensors, layouts, strict=True)]
    q, k, v = (x.requires_grad_() for x in tensors)

    def step() -> None:
        q.grad = k.grad = v.grad = None
        F.scaled_dot_product_attention(q, k, v, is_causal=causal).sum().backward()

    return step


@pytest.mark.parallel([4])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("way", "shares"), [("smallest", 2.8), ("ring", 1.35)])
def test_a_rank_needs_few_shares_of_the_serial_memory(
    way: str, shares: float, causal: bool
) -> None:
    serial = peak_of(partial(_step, causal, serial=True)).whole
    with attending_by(way, tiny=False):
        own = peak_of(partial(_step, causal, serial=False)).whole
    most = max(MPI.COMM_WORLD.allgather(own))
    assert most / serial < shares / 4, most / serial


@pytest.mark.parallel([2, 4])
def test_few_whole_queries_need_a_share_of_the_serial_memory() -> None:
    serial = peak_of(partial(_step, False, serial=True, queries=1)).whole
    with attending_by("few queries", tiny=False):
        own = peak_of(partial(_step, False, serial=False, queries=1)).whole
    most = max(MPI.COMM_WORLD.allgather(own))
    # Twice the share if the gradients of keys and values are added to zeros.
    assert most / serial < 1.5 / MPI.COMM_WORLD.size, most / serial


@pytest.mark.parallel([4])
def test_blocks_are_freed_as_contiguous_copies_of_them_are_made() -> None:
    def forward(serial: bool) -> Callable[[], object]:
        tensors = [torch.ones(1, 8, 1024, 16) for _ in range(3)]
        if not serial:  # blocks of planes have channels last
            grid = dc.ProcessGrid(height=-1)
            layout = dc.Layout(height="height")
            tensors = [dc.distribute_tensor(x, grid, layout) for x in tensors]
        q, k, v = (x.requires_grad_() for x in tensors)
        return lambda: F.scaled_dot_product_attention(q, k, v)

    serial = peak_of(lambda: forward(serial=True)).whole
    with attending_by("smallest", tiny=False):
        own = peak_of(lambda: forward(serial=False)).whole
    most = max(MPI.COMM_WORLD.allgather(own))
    # A seventh of the serial peak more with all three blocks and their copies.
    assert most / serial < 0.7, most / serial
