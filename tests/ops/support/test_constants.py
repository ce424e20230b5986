"""Constants are made once; CPUs keep the last of them, GPUs all."""

from __future__ import annotations

from typing import Any
from weakref import ref

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from distconv.device.kinds import MOST_CONSTANTS, remembered
from distconv.ops.support.operands import constant

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def test_a_constant_is_made_once() -> None:
    assert constant(CPU, (3, 4)) is constant(CPU, (3, 4))
    assert constant(CPU, (3, 4)).tolist() == [3, 4]
    assert constant(CPU, (3, 4), torch.float64).dtype == torch.float64


def test_a_constant_is_made_outside_of_dispatch_modes() -> None:
    seen: list[Any] = []

    class Recorded(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Recorded():
        constant(CPU, (31, 4159))
        assert not seen
        torch.ones(1)
    assert seen == [torch.ops.aten.ones.default]


def test_a_constant_made_in_inference_mode_can_be_saved_by_autograd() -> None:
    with torch.inference_mode():
        factor = constant(CPU, (27, 1828), torch.float32)
    x = torch.ones(2, requires_grad=True)
    (x * factor).sum().backward()
    assert x.grad is not None and torch.equal(x.grad, factor)


def test_cpus_keep_the_constants_that_were_used_last() -> None:
    oldest, used = ref(constant(CPU, (-1,))), constant(CPU, (-2,))
    for i in range(MOST_CONSTANTS):
        constant(CPU, (i,))
        assert constant(CPU, (-2,)) is used
    assert oldest() is None


def test_gpus_keep_all_as_captured_graphs_read_them() -> None:
    @remembered
    def made(device: torch.device, number: int) -> list[int]:
        return [number]

    first = made(GPU, 0)
    for i in range(2 * MOST_CONSTANTS):
        made(GPU, i)
    assert made(GPU, 0) is first
