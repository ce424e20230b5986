"""Memory of messages is used again, but never while anything still refers to it."""

import pytest
import torch

from distconv.transport import interface
from distconv.transport.interface import BufferPool, release_idle

LIKE = torch.zeros(1)


@pytest.fixture(autouse=True)
def any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let memory of small messages be kept as well."""
    monkeypatch.setattr(interface, "SMALL_BYTES", 0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.bool, torch.complex64])
def test_a_message_has_the_shape_and_type_it_was_asked_for(dtype):
    message = BufferPool().empty((2, 3), torch.zeros(1, dtype=dtype))
    assert message.shape == (2, 3)
    assert message.dtype == dtype
    assert message.is_contiguous()
    message.fill_(1)
    assert message.sum() == 6


def test_memory_of_a_message_that_is_over_is_used_again_for_any_type():
    memory = BufferPool()
    first = memory.empty((6,), LIKE)
    address = first.data_ptr()
    del first
    second = memory.empty((3,), torch.zeros(1, dtype=torch.float64))
    assert second.data_ptr() == address


def test_memory_is_not_used_again_while_a_view_or_a_graph_holds_it():
    memory = BufferPool()
    kept = memory.empty((6,), LIKE).view(2, 3)[1:].detach()
    factor = memory.empty((6,), LIKE).fill_(2.0)
    y = torch.ones(6, requires_grad=True) * factor
    address = factor.data_ptr()
    del factor
    later = [memory.empty((6,), LIKE).fill_(7.0) for _ in range(3)]
    assert len({m.data_ptr() for m in later} | {address, kept.data_ptr() - 12}) == 5
    y.sum().backward()
    del y, later
    assert memory.empty((6,), LIKE).data_ptr() != kept.data_ptr() - 12


def test_no_more_than_the_limit_is_kept(monkeypatch):
    monkeypatch.setattr(interface, "KEPT_BYTES", 64)
    memory = BufferPool()
    large = memory.empty((100,), LIKE)
    del large
    assert memory._idle_bytes == 0
    both = [memory.empty((10,), LIKE), memory.empty((8,), LIKE)]
    del both
    assert memory._idle_bytes in (32, 40)
    assert sum(m.nbytes for stack in memory._idle.values() for m in stack) == memory._idle_bytes


def test_sizes_of_which_nothing_is_idle_are_forgotten():
    memory = BufferPool()
    for n in range(1, 20):
        memory.empty((n,), LIKE)
    in_use = [memory.empty((n,), LIKE) for n in range(1, 40)]
    assert len(in_use) == 39
    assert not memory._idle


def test_idle_memory_is_released_when_asked_for_and_lent_memory_comes_back_later() -> None:
    memory = BufferPool()
    lent, idle = memory.empty((8,), LIKE), memory.empty((10,), LIKE)
    del idle
    release_idle()
    assert memory._idle_bytes == 0
    del lent
    assert memory._idle_bytes == 32
