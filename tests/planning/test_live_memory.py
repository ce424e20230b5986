"""The bytes of a rank in a dry run, by kind."""

from __future__ import annotations

import torch

from distconv.planning.live_memory import LiveMemory
from tests.planning.test_prediction import SHAPE, network
from tests.planning.test_recorder import recorded


def hollow(nbytes: int) -> torch.Tensor:
    """A tensor of so many bytes without elements."""
    return torch.empty(nbytes, dtype=torch.uint8, device="meta")


def test_memory_is_counted_once_and_released_with_its_last_tensor() -> None:
    memory = LiveMemory()
    x, y = hollow(100), hollow(10)
    memory.hold([x, x.view(50, 2), y], "other")
    memory.turn_into(y, "gradients")
    assert memory.total == 110
    del x
    assert memory.total == 10
    memory.hold([hollow(20)], "other")
    assert (memory.total, memory.at_most) == (10, {"other": 110})


def test_the_pool_keeps_what_messages_took_for_others_of_the_same_size() -> None:
    memory, kib = LiveMemory(), 2**10
    # Of small ones malloc takes care.
    for size, total in ((100, 100), (100, 100), (200, 300), (100, 300), (64, 364)):
        message = hollow(size * kib)
        memory.hold([message], "halos")
        assert memory.total == total * kib
        del message


def test_what_lives_after_the_forward_pass_is_kept_for_the_backward_pass() -> None:
    memory = LiveMemory()
    result, state = hollow(100), hollow(10)
    memory.hold([result], "other", "layer")
    memory.hold([state], "parameters")
    assert memory.keep() == {"layer": 100}
    more = hollow(1)
    memory.hold([more], "other")
    assert memory.at_most == {"other": 1, "activations": 100, "parameters": 10}


def test_the_memory_of_a_step_counts_what_is_kept_by_kind() -> None:
    recording = recorded(SHAPE, {"sample": 2}, optimizer=torch.optim.Adam)
    weights = sum(p.nbytes for p in network().parameters())
    assert recording.memory["optimizer state"] == 2 * weights
    assert recording.memory["parameters"] == sum(
        t.nbytes for t in (*network().parameters(), *network().buffers())
    )
    block = 2 * 4 * 16 * 16
    # The results of the first convolution, of ReLU and batch norm.
    assert sum(recording.kept.values()) >= 2 * 8 * block
