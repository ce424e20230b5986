"""Whoever uses memory that a stream of messages uses, waits for it: found without a GPU.

A step of training runs by NCCL, for which MPI stands in, while torch's sanitizer for CUDA looks at
the order of all uses of memory. It finds the waits that are left out on purpose, and gradients
that are summed on a stream of their own. Not run here: autograd's engine, which on a GPU lets each
node work on the stream of its forward pass, and accumulates a gradient on the stream on which its
node was made; on a CPU it knows one stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import timedelta
from functools import partialmethod
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from mpi4py import MPI
from torch import Tensor, nn
from torch.distributed import HashStore

import distconv as dc
from distconv.device import streams
from distconv.device.streams import SideStream, StreamRequest
from distconv.grid import communicators
from distconv.model.buckets import Bucket
from distconv.transport.interface import Request, Transport
from distconv.transport.mpi import MPICommunicator, MPITransport
from distconv.transport.nccl import NCCLTransport
from distconv.transport.staged import LaunchQueue, PinnedCopies, StagedTransport
from distconv.transport.torch import TorchStreamTransport
from tests.support.nccl import Communicator, ProcessGroup, replace_cupy
from tests.support.sanitizer import Event, Sanitizer, Stream, WatchedMPI

WORLD = MPI.COMM_WORLD
SHAPE = 2, 1, 12, 6


class Net(nn.Module):
    """A network with halos, sums in both passes, and tensors that move between layouts."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 2, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(2)
        self.second = nn.Conv2d(2, 2, 3, stride=2, padding=1)

    def forward(self, x: Any) -> Any:
        x = F.relu(self.norm(self.first(x)))
        x = F.max_pool2d(x, 3, 1, 1)
        return self.second(x).flip(2)


def steps(grid: dc.ProcessGrid | None, method: str) -> list[Tensor]:
    """Train for two steps; return the losses and the parameters, of serial torch without a grid."""
    torch.manual_seed(3)
    x, net = torch.randn(SHAPE), Net()
    if grid is not None:
        net = dc.parallelize(net, grid)
        x = dc.distribute_tensor(x, grid)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    losses = []
    for _ in range(2):
        with dc.method(method):
            loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    totals = [a.full_tensor() if isinstance(a, dc.DistTensor) else a for a in losses]
    return [*totals, *(p.detach() for p in net.parameters())]


CARRIERS = "torch", "nccl", "mpi", "direct mpi"


@pytest.fixture
def sanitizer(monkeypatch: pytest.MonkeyPatch) -> Sanitizer:
    """One that watches all streams."""
    watching = Sanitizer()
    watching.replace_streams(monkeypatch)
    replace_cupy(monkeypatch)
    monkeypatch.setattr("distconv.transport.torch.make_group", ProcessGroup)
    monkeypatch.setattr(Communicator, "launched", staticmethod(watching.launched))
    monkeypatch.setattr(PinnedCopies, "host", lambda self, like: watching.pinned(like))
    return watching


def carrier(comm: MPICommunicator, name: str, sanitizer: Sanitizer) -> Transport:
    """A transport between GPUs."""
    device = torch.device("cpu")
    if name == "nccl":
        return NCCLTransport(comm, device, SideStream(device))
    if name == "torch":
        limit = timedelta(seconds=60)
        return TorchStreamTransport(comm, HashStore(), device, limit, SideStream(device))
    mpi: Any = WatchedMPI(MPITransport(comm), sanitizer)
    return StagedTransport(mpi, PinnedCopies(device), LaunchQueue(), name == "direct mpi")


def reports(
    sanitizer: Sanitizer,
    monkeypatch: pytest.MonkeyPatch,
    method: str = "overlapped",
    name: str = "torch",
) -> list[str]:
    """Train under the sanitizer, messages carried by this name; return what it finds."""
    made = communicators._store()
    monkeypatch.setattr(made, "carriers", {})
    monkeypatch.setattr(made, "transports", {})
    monkeypatch.setattr(
        communicators, "_connected", lambda comm, *_: carrier(comm, name, sanitizer)
    )
    with sanitizer:
        grid = dc.ProcessGrid(height=-1, transport="mpi")
        assert grid.transport.name == name.split()[-1]
        for ours, theirs in zip(steps(grid, method), steps(None, method), strict=True):
            torch.testing.assert_close(ours, theirs)
    return sanitizer.reports


@pytest.mark.parallel([3])
@pytest.mark.parametrize("method", ["overlapped", "assembled"])
@pytest.mark.parametrize("name", CARRIERS)
def test_a_step_of_training_waits_for_all_that_it_uses(
    sanitizer: Sanitizer, monkeypatch: pytest.MonkeyPatch, name: str, method: str
) -> None:
    assert reports(sanitizer, monkeypatch, method, name) == []


@pytest.mark.parallel([2])
def test_gradients_that_are_added_up_within_the_backward_pass_are_waited_for(
    sanitizer: Sanitizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(NCCLTransport, "ordered", False)
    assert reports(sanitizer, monkeypatch, name="nccl") == []


class _Unwaited:
    """A request for which nobody waits."""

    def __init__(self, request: Request):
        self.request = request

    def wait(self) -> None:
        pass


def in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def leave_out(
    monkeypatch: pytest.MonkeyPatch, name: str, where: Callable[[Any], bool]
) -> list[Request]:
    """Wait for no message of a kind that is started where it holds; return them."""
    unwaited: list[Request] = []
    start = getattr(TorchStreamTransport, name)

    def started(self: TorchStreamTransport, *arguments: Any) -> Request:
        request: Request = start(self, *arguments)
        if where(arguments):
            unwaited.append(request)
            return _Unwaited(request)
        return request

    monkeypatch.setattr(TorchStreamTransport, name, started)
    return unwaited


def halos(forward: bool) -> Callable[[Any], bool]:
    return lambda arguments: bool(arguments[0] or arguments[1]) and in_backward() != forward


MISSING: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "forward": ("exchange", halos(True)),
    "backward": ("exchange", halos(False)),
    "reductions": ("all_reduce", lambda arguments: arguments[1].purpose == "gradients"),
}


@pytest.mark.parallel([3])
@pytest.mark.parametrize("method", ["overlapped", "assembled"])
@pytest.mark.parametrize("where", MISSING)
def test_a_wait_that_is_left_out_is_found(
    sanitizer: Sanitizer, monkeypatch: pytest.MonkeyPatch, where: str, method: str
) -> None:
    unwaited = leave_out(monkeypatch, *MISSING[where])
    found = reports(sanitizer, monkeypatch, method)
    assert unwaited and any("does not wait for writing to on stream" in report for report in found)


@pytest.mark.parallel([2])
def test_messages_that_do_not_wait_for_what_they_send_are_found(
    sanitizer: Sanitizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SideStream, "follow", lambda self: None)
    found = reports(sanitizer, monkeypatch, name="nccl")
    assert any(
        "(messages) does not wait for writing to on stream 0 (aten::" in report for report in found
    )


@pytest.mark.parallel([2])
@pytest.mark.parametrize("name", ["torch", "nccl", "mpi"])
@pytest.mark.parametrize("method", ["start", "wait"])
def test_gradients_that_are_summed_on_another_stream_are_found(
    sanitizer: Sanitizer, monkeypatch: pytest.MonkeyPatch, method: str, name: str
) -> None:
    right: Any = getattr(Bucket, method)

    def wrong(*given: Any) -> Any:
        with streams.using(torch.Stream()):
            return right(*given)

    monkeypatch.setattr(Bucket, method, wrong)
    # They are read before the backward pass has written them, or used before they are summed.
    early = {
        "start": "(aten::copy_) does not wait for writing to on stream 0",
        "wait": "on stream 0",
    }
    found = reports(sanitizer, monkeypatch, name=name)
    assert any(early[method] in report for report in found)


class _Forgetful(StreamRequest):
    """A request that holds none of the tensors that are in flight."""

    def __init__(self, stream: torch.Stream, tensors: Iterable[Tensor]):
        super().__init__(stream, ())


RELEASED = "memory of stream 0 is released while"


@pytest.mark.parallel([1, 2])
@pytest.mark.parametrize("end", ["waited for", "dropped"])
@pytest.mark.parametrize("name", ["torch", "nccl"])
@pytest.mark.parametrize("held", [True, False])
def test_memory_that_is_released_in_flight_is_found(
    sanitizer: Sanitizer, monkeypatch: pytest.MonkeyPatch, name: str, held: bool, end: str
) -> None:
    if not held:
        monkeypatch.setattr(streams, "StreamRequest", _Forgetful)
    to, source = (WORLD.rank + 1) % WORLD.size, (WORLD.rank - 1) % WORLD.size
    with sanitizer:
        transport = carrier(MPICommunicator(WORLD), name, sanitizer)
        leaving, arriving = torch.ones(50), torch.zeros(50)
        request = transport.exchange([(source, arriving)], [(to, leaving)], 1)
        del leaving, arriving
        if end == "waited for":
            request.wait()
        del request
        torch.ones(50)
    in_flight = name == "nccl" or WORLD.size > 1  # torch's groups send nothing to their own rank
    assert (sanitizer.reports == []) is (held or not in_flight)
    assert all(report.startswith(RELEASED) for report in sanitizer.reports)


LEFT_OUT: dict[str, tuple[Any, str, str]] = {
    "copies to the host wait for the computation": (Stream, "wait_event", "(aten::copy_) does not"),
    "the computation waits for copies": (StreamRequest, "wait", "for writing to on stream"),
    "the host waits for copies": (Event, "synchronize", "(MPI) does not wait for writing"),
}


@pytest.mark.parallel([2])
@pytest.mark.parametrize("what", LEFT_OUT)
def test_a_wait_of_copies_that_is_left_out_is_found(
    sanitizer: Sanitizer, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    kind, method, report = LEFT_OUT[what]
    monkeypatch.setattr(kind, method, lambda *_: None)
    assert any(report in found for found in reports(sanitizer, monkeypatch, name="mpi"))


@pytest.mark.parametrize("known", [True, False])
def test_memory_that_is_released_while_it_is_copied_is_found(
    sanitizer: Sanitizer, monkeypatch: pytest.MonkeyPatch, known: bool
) -> None:
    if not known:
        monkeypatch.setattr(Tensor, "record_stream", lambda *_: None)
    with sanitizer:
        copies = PinnedCopies(torch.device("cpu"))
        landing = torch.zeros(50)
        (host,), ready = copies.to_host([torch.ones(50)])
        ready.synchronize()
        copies.to_device([(host, landing)])
        del host, landing
        torch.ones(50)
    assert (sanitizer.reports == []) is known
    assert all(report.startswith(RELEASED) for report in sanitizer.reports)


@pytest.mark.parallel([2])
@pytest.mark.parametrize("name", ["torch", "nccl"])
def test_memory_of_a_message_that_is_written_before_it_has_left_is_found(
    sanitizer: Sanitizer, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    other = 1 - WORLD.rank
    for waits in (True, False):
        sanitizer.reports.clear()
        with sanitizer:
            transport = carrier(MPICommunicator(WORLD), name, sanitizer)
            leaving, arriving = torch.ones(50), torch.zeros(50)
            request = transport.exchange([(other, arriving)], [(other, leaving)], 1)
            if waits:
                request.wait()
            leaving.fill_(2)
            request.wait()
        assert (sanitizer.reports == []) is waits
        assert all("does not wait for reading" in report for report in sanitizer.reports)


@pytest.mark.parallel([2])
def test_messages_that_leave_come_first_and_no_error_hides_another(
    sanitizer: Sanitizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, order = 1 - WORLD.rank, list[str]()
    transport = carrier(MPICommunicator(WORLD), "torch", sanitizer)
    for name in ("send", "recv"):

        def noted(self: Any, *given: Any, name: str = name, start: Any = None) -> None:
            order.append(name)
            start(self, *given)

        start = getattr(ProcessGroup, name)
        monkeypatch.setattr(ProcessGroup, name, partialmethod(noted, start=start))
    messages = [(other, torch.zeros(3))], [(other, torch.ones(3))]
    transport.exchange(*messages, 1).wait()
    assert order == ["send", "recv"] and messages[0][0][1].tolist() == [1, 1, 1]

    def fails(what: str) -> Any:
        def call(*_: Any) -> None:
            raise RuntimeError(what)

        return call

    monkeypatch.setattr(ProcessGroup, "recv", fails("the first error"))
    monkeypatch.setattr(ProcessGroup, "send", lambda *_: None)
    monkeypatch.setattr(ProcessGroup, "_end_coalescing", fails("the second"))
    monkeypatch.setattr(Communicator, "group", None)  # which nobody ends
    with pytest.raises(RuntimeError, match="the first error"):
        transport.exchange(*messages, 2)


@pytest.mark.parallel([2])
@pytest.mark.parametrize("abort", [True, False])
@pytest.mark.parametrize("name", ["torch", "nccl"])
def test_all_groups_are_ended_even_where_one_raises(
    sanitizer: Sanitizer, monkeypatch: pytest.MonkeyPatch, name: str, abort: bool
) -> None:
    ended: list[str] = []

    def end(how: str) -> Any:
        def ends(_: Any) -> None:
            ended.append(how)
            raise RuntimeError("the connection is lost")

        return ends

    of_torch = name == "torch"
    names = ("abort", "shutdown") if of_torch else ("abort", "destroy")
    for how in names:
        monkeypatch.setattr(
            ProcessGroup if of_torch else Communicator, how, end(how), raising=False
        )
    transport: Any = carrier(MPICommunicator(WORLD), name, sanitizer)
    transport.all_reduce(torch.ones(1), MPICommunicator(WORLD, "another purpose")).wait()
    transport.close(abort)
    assert ended == [names[0] if abort else names[1]] * 2
