"""Servers and clients follow the serial recursions; all in one process, without ranks."""

from __future__ import annotations

import heapq
import socket
import struct
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import SGD, Adam

from distconv.training import AsynchronousElastic, Cosine, Downpour, Recipe, serving
from distconv.training.requests import MessageKind, Packing, dealt_out
from distconv.training.server import ServerCheckpoints
from distconv.transport.link import Link, message
from tests.support.serial import deviation
from tests.support.servers import InProcess

GOAL = torch.tensor([1.5, -0.5, 2.0], dtype=torch.float64)
CURVATURE = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)


class Point(nn.Module):
    """Three numbers; the loss is half of the sum of CURVATURE (x - GOAL)^2."""

    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Parameter(torch.tensor([3.0, -2.0, 0.5], dtype=torch.float64))

    def forward(self) -> Tensor:
        return (CURVATURE * (self.place - GOAL).square()).sum() / 2


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 2)).double()


def loss_of(model: nn.Module, number: int) -> Tensor:
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(5, 4, generator=generator, dtype=torch.float64)
    y = torch.randn(5, 2, generator=generator, dtype=torch.float64)
    return (model(x) - y).square().mean()


def assert_same_state(one: nn.Module, other: nn.Module) -> None:
    for (name, ours), theirs in zip(
        one.state_dict().items(), other.state_dict().values(), strict=True
    ):
        assert torch.equal(ours, theirs), name


OPTIMIZERS = [
    partial(SGD, lr=0.1),
    partial(SGD, lr=0.05, momentum=0.9, weight_decay=0.01),
    partial(Adam, lr=0.01),
]


@pytest.mark.parametrize("groups", [False, True])
@pytest.mark.parametrize("synchronous", [False, True])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_one_worker_that_brings_and_fetches_in_each_step_is_serial_training(
    optimizer: Callable[..., Any], synchronous: bool, groups: bool
) -> None:
    recipe = Recipe(
        batch_size=2, reference_batch_size=1, warmup_steps=3, decay=Cosine(), total_steps=12
    )
    method = Downpour(optimizer, synchronous=synchronous, schedule=recipe.schedule)
    root = InProcess(network, method, 1)
    # A server under a server, whose own steps are overwritten by what it fetches.
    near = InProcess(network, method, 1, above=root) if groups else root
    model, client = near.client()
    serial = network()
    steps = optimizer(serial.parameters())
    schedule = recipe.schedule(steps)
    for number in range(12):
        loss_of(serial, number).backward()
        steps.step()
        steps.zero_grad()
        schedule.step()
        loss_of(model, number).backward()
        client.step(5)
        assert all(p.grad is None for p in model.parameters())
    for trained in (model, root.model, near.model):
        assert_same_state(trained, serial)
    assert root.server.report.staleness == {0: 12}
    assert root.server.report.samples == 60


def test_parameters_without_gradient_stay_without() -> None:
    method = Downpour(partial(Adam, lr=0.1, weight_decay=0.1))
    root = InProcess(network, method, 1)
    model, client = root.client()
    before = model[3].weight.detach().clone()
    model[3].weight.requires_grad_(False)
    loss_of(model, 0).backward()
    client.step(1)
    assert torch.equal(root.model[3].weight, before)
    assert not torch.equal(root.model[0].weight, network()[0].weight)


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_synchronous_workers_step_with_the_mean_by_samples(workers: int) -> None:
    method = Downpour(partial(SGD, lr=0.1, momentum=0.5), synchronous=True)
    root = InProcess(Point, method, workers)
    connections = [root.connection() for _ in range(workers)]
    packing = Packing([GOAL])
    serial = Point()
    optimizer = method.optimizer(serial.parameters())
    for _ in range(3):
        gradients = [torch.rand(3, dtype=torch.float64) for _ in range(workers)]
        samples = [k + 1 for k in range(workers)]
        for k, gradient in enumerate(gradients):
            head = (MessageKind.PUSH_AND_FETCH, root.server.report.updates, samples[k], 1)
            due = root.server.handle(k, message(head, packing.pack([gradient])))
            assert [to for to, _ in due] == (list(range(workers)) if k == workers - 1 else [])
        serial.place.grad = sum(n * g for n, g in zip(samples, gradients, strict=True)) / sum(
            samples
        )
        optimizer.step()
        assert deviation(root.model.place.detach(), serial.place.detach()) <= 1e-15
    assert len(connections) == workers and root.server.report.staleness == {0: 3 * workers}


def in_turns(
    clients: list[tuple[nn.Module, Any]], durations: list[float], until: float
) -> Counter[int]:
    """Let workers train that take so long for a step, each; return how many steps each took."""
    taken: Counter[int] = Counter()
    events = [(duration, worker) for worker, duration in enumerate(durations)]
    heapq.heapify(events)
    while events and events[0][0] <= until:
        now, worker = heapq.heappop(events)
        model, client = clients[worker]
        client.step(1)
        taken[worker] += 1
        model().backward()  # the next gradient belongs to the parameters of now
        heapq.heappush(events, (now + durations[worker], worker))
    return taken


def ready(root: InProcess, workers: int, **options: Any) -> list[tuple[nn.Module, Any]]:
    clients = [root.client(**options) for _ in range(workers)]
    for model, _ in clients:
        model().backward()
    return clients


@pytest.mark.parametrize("workers", [1, 5])
@pytest.mark.parametrize(("push", "fetch"), [(1, 1), (3, 2), (1, 5)])
def test_any_number_of_workers_comes_to_the_minimum(workers: int, push: int, fetch: int) -> None:
    rate = 0.4 / workers / max(push, fetch)
    root = InProcess(Point, Downpour(partial(SGD, lr=rate), push=push, fetch=fetch), workers)
    clients = ready(root, workers, optimizer=partial(SGD, lr=rate))
    in_turns(clients, [1 + 0.1 * k for k in range(workers)], 400)
    assert deviation(root.model.place.detach(), GOAL) <= 1e-3
    assert root.server.report.staleness.total() == root.server.report.updates


@pytest.mark.parametrize("method", [Downpour(partial(SGD, lr=0.01)), AsynchronousElastic()])
def test_a_slow_worker_leaves_the_others_their_rate(method: Any) -> None:
    rates = []
    for durations in ([1.0] * 4, [1.0] * 3 + [10.0]):
        root = InProcess(Point, method, 4)
        clients = ready(root, 4, optimizer=partial(SGD, lr=0.01))
        taken = in_turns(clients, durations, 100)
        assert root.server.report.requests == taken
        rates.append([taken[k] for k in range(4)])
    alike, slowed = rates
    assert alike[3] == 100 and slowed[3] == 10
    for before, after in zip(alike[:3], slowed[:3], strict=True):
        assert after >= 0.9 * before


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_staleness_of_workers_in_turn_is_one_less_than_they_are(workers: int) -> None:
    root = InProcess(Point, Downpour(partial(SGD, lr=0.01)), workers)
    in_turns(ready(root, workers), [1.0] * workers, 20)
    # In the first round each has the parameters of the beginning.
    expected = Counter(range(workers)) + Counter({workers - 1: 19 * workers})
    assert root.server.report.staleness == expected
    assert f"{20 * workers} updates by {20 * workers} samples" in str(root.server.report)


def test_workers_in_turn_descend_with_the_gradients_of_earlier_parameters() -> None:
    workers, rate = 3, 0.1
    root = InProcess(Point, Downpour(partial(SGD, lr=rate)), workers)
    clients = ready(root, workers)
    places = [root.model.place.detach().clone()]
    in_turns(clients, [1.0] * workers, 10)
    # Update t brings the gradient of what the worker got after update t - workers.
    for t in range(10 * workers):
        then = places[max(0, t - workers + 1)]
        places.append(places[-1] - rate * CURVATURE * (then - GOAL))
    assert deviation(root.model.place.detach(), places[-1]) <= 1e-14


@pytest.mark.parametrize("alpha", [0.1, 0.45])
def test_asynchronous_elastic_workers_follow_the_recursion(alpha: float) -> None:
    root = InProcess(Point, AsynchronousElastic(2, alpha), 2)
    clients = ready(root, 2, optimizer=partial(SGD, lr=0.1))
    center = Point().place.detach().clone()
    x = [center.clone(), center.clone()]
    for step in range(1, 13):
        for k, (model, client) in enumerate(clients):
            slope = CURVATURE * (x[k] - GOAL)
            if step % 2 == 0:
                pull = alpha * (x[k] - center)
                x[k], center = x[k] - pull, center + pull
            x[k] = x[k] - 0.1 * slope
            client.step(1)
            assert deviation(model.place.detach(), x[k]) <= 1e-14
            assert deviation(root.model.place.detach(), center) <= 1e-14
            model().backward()


@pytest.mark.parametrize("method", [Downpour(partial(SGD, lr=0.05)), AsynchronousElastic()])
def test_servers_under_a_server_come_to_the_minimum(method: Any) -> None:
    root = InProcess(Point, method, 2)
    groups = [InProcess(Point, method, 2, above=root) for _ in range(2)]
    clients = [c for group in groups for c in ready(group, 2, optimizer=partial(SGD, lr=0.05))]
    in_turns(clients, [1.0, 1.1, 1.2, 1.3], 800)
    for group in (root, *groups):
        assert deviation(group.model.place.detach(), GOAL) <= 1e-3
    assert root.server.report.samples == sum(g.server.report.samples for g in groups)


def test_buffers_of_the_server_are_means_over_workers() -> None:
    root = InProcess(network, Downpour(partial(SGD, lr=0.1)), 2)
    clients = [root.client() for _ in range(2)]
    expected = root.model[1].running_mean.clone()
    for number in range(3):
        for model, client in clients:
            loss_of(model, number).backward()
            client.step(1)
            expected = (expected + model[1].running_mean) / 2
            assert deviation(root.model[1].running_mean, expected) <= 1e-14
    assert root.model[1].num_batches_tracked == 3


ACTS = st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["push", "meet", "end", "lose"])))


@given(acts=ACTS, synchronous=st.booleans())
def test_nobody_waits_for_a_worker_that_ends_or_is_lost(
    acts: list[tuple[int, str]], synchronous: bool
) -> None:
    root = InProcess(Point, Downpour(partial(SGD, lr=0.01), synchronous=synchronous), 4)
    server, packing = root.server, Packing([GOAL])
    waiting: dict[int, str] = {}
    for client, act in [*acts, *((k, "end") for k in range(4)), *((k, "end") for k in range(4))]:
        if client not in server.active or (client in waiting and act != "lose"):
            continue
        if act == "lose":
            waiting.pop(client, None)
            due = server.drop(client, "lost")
        else:
            waiting[client] = act
            kind = {
                "push": MessageKind.PUSH_AND_FETCH,
                "meet": MessageKind.MEET,
                "end": MessageKind.DONE,
            }[act]
            gradient = packing.pack([GOAL]) if act == "push" else None
            due = server.handle(client, message((kind, 0, 1, 1), gradient))
        for to, _ in due:
            del waiting[to]  # each answer is waited for
        at_work = server.active
        assert not waiting or not set(waiting.values()) == {"meet"} or at_work - waiting.keys()
        if "push" in waiting.values():
            assert synchronous and at_work - waiting.keys()
    assert not server.active and not waiting


@given(sizes=st.lists(st.integers(1, 50), min_size=1, max_size=12), parts=st.integers(1, 5))
def test_parameters_are_dealt_out_evenly(sizes: list[int], parts: int) -> None:
    dealt = dealt_out(sizes, parts)
    assert sorted(i for part in dealt for i in part) == list(range(len(sizes)))
    totals = [sum(sizes[i] for i in part) for part in dealt]
    assert max(totals) - min(totals) <= max(sizes)
    if len(sizes) >= parts:
        assert all(dealt)


@given(
    st.lists(
        st.tuples(
            st.sampled_from([torch.float32, torch.float64, torch.int64, torch.bfloat16]),
            st.lists(st.integers(0, 3), max_size=3),
            st.booleans(),
        ),
        max_size=6,
    )
)
def test_tensors_come_out_of_a_message_as_they_went_in(kinds: list[Any]) -> None:
    tensors = [torch.rand(shape).mul(99).to(dtype) for dtype, shape, _ in kinds]
    packing = Packing(tensors)
    some = [t if there else None for t, (_, _, there) in zip(tensors, kinds, strict=True)]
    found = packing.unpack(packing.pack(some))
    for one, other in zip(found, some, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert one.dtype == other.dtype and torch.equal(one, other)
    whole = packing.pack(some)
    with pytest.raises(ValueError, match="is none of"):
        packing.unpack(torch.cat([whole, whole.new_zeros(16)]))
    with pytest.raises(ValueError, match="synchronous=True all workers wait"):
        Downpour(partial(SGD, lr=0.1), push=2, synchronous=True)


def bytes_of(numbers: tuple[int, ...], payload: bytes = b"") -> bytes:
    """Return a message as a link sends it."""
    return struct.pack("<7q", *numbers, *(0,) * (6 - len(numbers)), len(payload)) + payload


@pytest.mark.parametrize(
    "malformed",
    [
        bytes_of((99,)),
        bytes_of((MessageKind.ANSWER,)),
        bytes_of((MessageKind.PULL,)),
        bytes_of((MessageKind.PUSH, 0, 1, 1), b"\1" * 5),
        bytes_of((MessageKind.PUSH, 7, 1, 1), Packing([GOAL]).pack([GOAL]).numpy().tobytes()),
        bytes_of((MessageKind.PUSH, 0, -1, 1), Packing([GOAL]).pack([GOAL]).numpy().tobytes()),
        struct.pack("<7q", MessageKind.PUSH, 0, 1, 1, 0, 0, -8),
    ],
)
def test_a_malformed_message_of_one_worker_ends_that_worker_and_not_the_job(
    malformed: bytes,
) -> None:
    root = InProcess(Point, Downpour(partial(SGD, lr=0.1)), 2)
    pairs = [socket.socketpair() for _ in range(2)]
    good, bad = (theirs for _, theirs in pairs)
    push = Packing([GOAL]).pack([GOAL]).numpy().tobytes()
    bad.sendall(malformed)
    good.sendall(bytes_of((MessageKind.PUSH, 0, 1, 1), push) + bytes_of((MessageKind.DONE,)))
    links = [Link(client, ours) for client, (ours, _) in enumerate(pairs)]
    state = ServerCheckpoints(root.model, root.rule, root.server, None, None, 2, None)
    with pytest.warns(UserWarning, match="client 1 is dropped"):
        serving._Service(state, None, links).run()
    assert root.server.report.requests == {0: 1} and [*root.server.report.lost] == [1]
    assert torch.equal(root.model.place, Point().place - 0.1 * GOAL)
    for end in (*links, good, bad):
        end.close()
