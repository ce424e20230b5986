"""A call that an error or an interrupt ends leaves the module, the grid and the library clean."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import distconv as dc
from distconv.tensor.dispatch import innermost_call

RANKS = [1, 2, 4]


class Net(nn.Module):
    """A network that calls `interrupt` in its middle, within a checkpoint if it is told to."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Conv2d(1, 2, 3, padding=1, dtype=torch.float64)
        self.norm = nn.BatchNorm2d(2, dtype=torch.float64)
        self.last = nn.Conv2d(2, 1, 3, dtype=torch.float64)
        self.interrupt: Callable[[torch.Tensor], Any] = lambda x: x
        self.checkpointed = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def middle(y: torch.Tensor) -> torch.Tensor:
            y = self.first(y)
            self.interrupt(y)
            return self.norm(y).relu()

        y = checkpoint(middle, x, use_reentrant=False) if self.checkpointed else middle(x)
        return self.last(y)


def fail(error: type[BaseException]) -> Callable[..., Any]:
    def interrupt(*_: Any) -> Any:
        raise error("as the test has it")

    return interrupt


def in_forward(net: Net, x: Any, error: type[BaseException]) -> None:
    net.interrupt = fail(error)
    net(x)


def in_a_checkpoint(net: Net, x: Any, error: type[BaseException]) -> None:
    net.checkpointed = True
    in_forward(net, x, error)


def in_a_checkpoint_run_again(net: Net, x: Any, error: type[BaseException]) -> None:
    net.checkpointed = True
    loss = net(x).sum()
    net.interrupt = fail(error)
    loss.backward()


def in_a_pre_hook(net: Net, x: Any, error: type[BaseException], first: bool = False) -> None:
    with Hook(net.register_forward_pre_hook(fail(error), prepend=first)):
        net(x)


def in_a_hook(net: Net, x: Any, error: type[BaseException], first: bool = False) -> None:
    with Hook(net.register_forward_hook(fail(error), prepend=first)):
        net(x)


def in_a_hook_of_a_part(net: Net, x: Any, error: type[BaseException]) -> None:
    with Hook(net.norm.register_forward_hook(fail(error))):
        net(x)


def in_a_hook_of_a_tensor(net: Net, x: Any, error: type[BaseException]) -> None:
    y = net(x)
    y.register_hook(fail(error))
    y.sum().backward()


def in_the_middle_of_backward(net: Net, x: Any, error: type[BaseException]) -> None:
    net.interrupt = lambda y: y.register_hook(fail(error))
    net(x).sum().backward()


def in_a_call_within(net: Net, x: Any, error: type[BaseException]) -> None:
    """Fail in a call of the network within one of its own, which goes on without a word."""

    def again(y: torch.Tensor) -> None:
        net.interrupt = fail(error)
        try:
            net(x)
        except error:
            assert innermost_call() is not None
            if torch.is_grad_enabled() and y.grid.size > 1:
                with pytest.raises(dc.UnsupportedOperation, match="must remain a DistTensor"):
                    y.full_tensor()

    net.interrupt = again
    net(x)
    raise error


def in_another_module(net: Net, x: Any, error: type[BaseException]) -> None:
    other = dc.parallelize(Net(), x.grid)
    net.interrupt = lambda y: in_forward(other, x, error)
    net(x)


class Hook:
    """A hook within a context."""

    def __init__(self, handle: Any):
        self._handle = handle

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self._handle.remove()


@pytest.mark.parallel([2])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize(
    "interrupt",
    [
        in_forward,
        in_a_checkpoint,
        in_a_checkpoint_run_again,
        in_a_pre_hook,
        partial(in_a_pre_hook, first=True),
        in_a_hook,
        partial(in_a_hook, first=True),
        in_a_hook_of_a_part,
        in_a_hook_of_a_tensor,
        in_the_middle_of_backward,
        in_a_call_within,
        in_another_module,
    ],
)
@pytest.mark.filterwarnings("error::UserWarning")
def test_the_next_step_is_the_serial_one(
    interrupt: Callable[[Net, Any, type[BaseException]], None], error: type[BaseException]
) -> None:
    grid = dc.ProcessGrid(height=-1)
    whole = torch.arange(2 * 3 * 4, dtype=torch.float64).view(2, 1, 3, 4).sin()
    serial, net = Net(), dc.parallelize(Net(), grid)
    x = dc.distribute_tensor(whole, grid)
    caught: BaseException | None = None
    try:
        interrupt(net, x, error)
    except error as raised:
        caught = raised  # and keeps the frames of the call
    assert caught is not None and innermost_call() is None
    net.load_state_dict(serial.state_dict())
    net.interrupt, net.checkpointed = serial.interrupt, False
    net.zero_grad()
    try:
        raise caught
    except error:  # where a program may well go on
        y = net(x)
    expected = serial(whole)
    torch.testing.assert_close(y.full_tensor(), expected.detach(), rtol=1e-12, atol=1e-14)
    y.square().sum().backward()
    expected.square().sum().backward()
    for p, q in zip(net.parameters(), serial.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-10, atol=1e-12)
