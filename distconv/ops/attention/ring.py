"""Ring attention: partitioned queries attend to partitioned keys, which no rank gathers.

Keys are sent to the ranks of a ring one block after another, and each rank updates the attention of
its own queries (Liu, Zaharia and Abbeel, Ring Attention with Blockwise Transformers, 2023). The
owner sends a block directly to each rank, while the ranks compute with the previous block. The
backward pass sends the keys again, and returns gradients to the owners. Along axes that partition
keys but not queries, the results of the ranks are combined by their log-sum-exps.

If attention is causal and the blocks are consecutive, the first rank attends to one block and the
last rank to all blocks. To balance the work, keys are sent only to the nearer half of the later
ranks. For the farther half, queries are sent to the keys instead, and the results are returned (Li
et al., DistFlashAttn, 2024). All ranks then compute equally, and send half as many bytes on average
as without causality.

A tour sends the keys of a few samples or heads at a time, so that received blocks take little
memory. A block on another rank is called a visitor.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from math import inf, prod
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from distconv.comm.collectives import all_gather, all_reduce, all_reduce_
from distconv.comm.ledger import Movement, record
from distconv.geometry.layout import Box, Layout
from distconv.geometry.plan import Plan, Route
from distconv.grid.interface import Grid
from distconv.ops.attention.blocks import Dropout, Pair, attend, gradients, merge_
from distconv.ops.attention.schedule import (
    Positions,
    Round,
    Schedule,
    Tour,
    is_balanced,
    rounds_of,
    tours_of,
)
from distconv.ops.support.operands import in_type, numbers_in_box
from distconv.torch_private import ShardFunction


class Spec(NamedTuple):
    """The settings of the attention of this rank's block.

    Attributes
    ----------
    schedule: the ranks to send to and receive from.
    scale: the factor of the products of queries and keys.
    p, key: the probability of dropout, and the key of its random numbers; the key is None without
        dropout.
    accelerated: whether the blocks are on an accelerator.
    """

    grid: Grid
    schedule: Schedule
    scale: float
    p: float
    key: Tensor | None
    accelerated: bool

    def pair(
        self, rows: Positions, columns: Positions, mask: Tensor | None, tour: Tour | None = None
    ) -> Pair:
        """Return the pair of blocks: the queries at `rows` and the keys at `columns`.

        `mask` is (..., R or 1, C or 1), or None. With `tour`, only the samples and heads of the
        tour are included.
        """
        schedule, dropout = self.schedule, None
        if self.key is not None:
            box = schedule.samples
            whole = Box((*box.start, *rows.box.start), (*box.stop, *rows.box.stop))
            shape = (*schedule.sizes.batch, *rows.sizes)
            numbers = numbers_in_box(whole, shape, self.key.device) * prod(columns.sizes)
            numbers = numbers.flatten(len(box.start)).unsqueeze(-1)
            if tour is not None:
                numbers = of_tour(tour, numbers)
            dropout = Dropout(self.p, self.key, numbers)
        return Pair(rows, columns, self.scale, schedule.causal, mask, dropout, self.accelerated)


class _Parcel:
    """A message to one rank and a message from another rank, each with several tensors.

    All ranks of the grid create their parcels in the same order.

    Parameters
    ----------
    leaving: the rank to send to or None, and the tensors to send, in order of falling item size.
    arriving: the rank to receive from or None, and examples of the tensors to receive.
    count: the number of rows (the dimension before the last) of the tensors to receive.
    """

    def __init__(
        self,
        grid: Grid,
        leaving: tuple[int | None, Sequence[Tensor]],
        arriving: tuple[int | None, Sequence[Tensor]],
        count: int,
    ):
        transport, self._views = grid.transport, list[Tensor]()
        into, out = [], []
        source, kinds = arriving
        if source is not None:
            shapes = [(*x.shape[:-2], count, x.shape[-1]) for x in kinds]
            sizes = [prod(s) * x.element_size() for s, x in zip(shapes, kinds, strict=True)]
            like = kinds[0].new_empty(0, dtype=torch.uint8)
            memory = transport.empty((sum(sizes),), like)
            pieces = zip(memory.split(sizes), kinds, shapes, strict=True)
            self._views = [piece.view(x.dtype).view(shape) for piece, x, shape in pieces]
            into.append((source, memory))
        target, tensors = leaving
        if target is not None:
            message = torch.cat([x.contiguous().view(-1).view(torch.uint8) for x in tensors])
            out.append((target, message))
        self._request = transport.exchange(into, out, transport.next_tag())

    def wait(self) -> list[Tensor]:
        """Wait for both messages, and return the received tensors."""
        self._request.wait()
        return self._views


class _Pass:
    """The forward or backward pass of a tour, for this rank's queries and keys.

    Attributes
    ----------
    answers: for keys (False) and for queries (True), whether results are returned to their owner.
    """

    answers: ClassVar[dict[bool, bool]]

    def __init__(self, spec: Spec, tour: Tour, mask: Tensor | None):
        self.spec, self.tour, self.mask = spec, tour, mask

    def make(self) -> None:
        """Run the tour: send, receive and compute at each step. Collective."""
        spec, here = self.spec, self.spec.grid.rank
        rounds = rounds_of(spec.schedule, self.tour)
        answers = self.answers[False] or is_balanced(spec.schedule)
        coming = [self._start(rounds[0])] if rounds else []
        self.meet(self.pair(here, here), None)
        home: list[tuple[bool, _Parcel]] = []
        for number, r in enumerate(rounds, 1):
            visitors = coming.pop().wait()
            if number < len(rounds):
                coming.append(self._start(rounds[number]))
            taken: list[Tensor] = []
            if r.source is not None:
                pair = self.pair(r.source, here) if r.queries_come else self.pair(here, r.source)
                taken = self.meet(pair, visitors, r.queries_come)
            self._receive_results(home)
            if answers:
                home.append((r.queries_go, self._start_back(r, taken)))
        self._receive_results(home)

    def _start(self, r: Round) -> _Parcel:
        """Start to send this rank's queries or keys to a rank, and to receive those of another."""
        leaving = r.target, self.travellers(r.queries_go)
        arriving = r.source, self.travellers(r.queries_come)
        count = 0 if r.source is None else self._count(r.source, r.queries_come)
        return _Parcel(self.spec.grid, leaving, arriving, count)

    def _start_back(self, r: Round, taken: Sequence[Tensor]) -> _Parcel:
        """Start to send the results `taken` to a visitor's owner, and to receive results."""
        source = r.source if self.answers[r.queries_come] else None
        target = r.target if self.answers[r.queries_go] else None
        count = self._count(self.spec.grid.rank, r.queries_go)
        return _Parcel(self.spec.grid, (source, taken), (target, self.results(r.queries_go)), count)

    def _receive_results(self, home: list[tuple[bool, _Parcel]]) -> None:
        """Wait for the results of this rank's queries or keys on other ranks, and add them.

        `home` lists the messages, each with True for results of queries; it is emptied.
        """
        while home:
            queries, parcel = home.pop()
            arrived = parcel.wait()
            if arrived:
                self.add_arrived(queries, arrived)

    def _count(self, rank: int, queries: bool) -> int:
        schedule = self.spec.schedule
        return (schedule.rows(rank) if queries else schedule.columns(rank)).size

    def pair(self, rows: int, columns: int) -> Pair:
        """Return the pair of blocks: the queries of rank `rows` and the keys of rank `columns`."""
        schedule = self.spec.schedule
        keys, mask = schedule.columns(columns), None
        if self.mask is not None:
            mask = self.mask[self.places(keys)].flatten(-len(keys.sizes))
        return self.spec.pair(schedule.rows(rows), keys, mask, self.tour)

    def places(self, keys: Positions) -> tuple[Any, ...]:
        """Return the index of the mask's columns for `keys`, an item for each dimension."""
        assert self.mask is not None
        if not self.spec.schedule.ring:  # the mask has the columns of this rank's keys only
            return (...,)
        own = self.mask.shape[-len(keys.sizes) :]
        slices = zip(own, keys.box.slices, strict=True)
        return (..., *(slice(None) if n == 1 else s for n, s in slices))

    @abstractmethod
    def travellers(self, queries: bool) -> list[Tensor]:
        """Return the tensors to send to other ranks with this rank's queries, or with its keys.

        `queries` selects the queries.
        """

    @abstractmethod
    def results(self, queries: bool) -> list[Tensor]:
        """Return examples of the results to receive for this rank's queries, or for its keys."""

    @abstractmethod
    def meet(
        self, pair: Pair, visitors: Sequence[Tensor] | None, queries: bool = False
    ) -> list[Tensor]:
        """Compute with `visitors`, blocks of another rank; return the results to send back.

        `queries` states that the visitors are queries. With None for `visitors`, compute with this
        rank's own queries and keys.
        """

    @abstractmethod
    def add_arrived(self, queries: bool, arrived: Sequence[Tensor]) -> None:
        """Add `arrived`, the results of this rank's queries, or of its keys, on another rank."""


class _Forward(_Pass):
    """The forward pass: attention and log-sum-exps, which are returned to the owner of queries."""

    answers: ClassVar = {True: True, False: False}

    def __init__(self, spec: Spec, tour: Tour, own: Sequence[Tensor], mask: Tensor | None):
        super().__init__(spec, tour, mask)
        self.q, self.k, self.v = own
        self.out = self.lse = self.q

    def travellers(self, queries: bool) -> list[Tensor]:
        return [self.q] if queries else [self.k, self.v]

    def results(self, queries: bool) -> list[Tensor]:
        return [self.lse, self.out] if queries else []

    def meet(
        self, pair: Pair, visitors: Sequence[Tensor] | None, queries: bool = False
    ) -> list[Tensor]:
        if visitors is None:
            self.out, self.lse = attend(self.q, self.k, self.v, pair)
            return []
        if queries:
            out, lse = attend(visitors[0], self.k, self.v, pair)
            return [lse, out]
        out, lse = attend(self.q, visitors[0], visitors[1], pair)
        self.add_arrived(True, [lse, out])
        return []

    def add_arrived(self, queries: bool, arrived: Sequence[Tensor]) -> None:
        lse, out = arrived
        merge_(self.out, self.lse, out, lse)


class _Backward(_Pass):
    """The backward pass: gradients are returned to the owners of keys and of queries.

    `own` are the log-sum-exp, the queries, the attention and its gradient. The pass adds the
    gradient of an added mask to `dmask`, which may be None.
    """

    answers: ClassVar = {True: True, False: True}

    def __init__(
        self,
        spec: Spec,
        tour: Tour,
        own: Sequence[Tensor],
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        dmask: Tensor | None,
    ):
        super().__init__(spec, tour, mask)
        self.own, self.k, self.v, self.dmask = list(own), k, v, dmask
        self.found: list[Tensor] = []

    def travellers(self, queries: bool) -> list[Tensor]:
        return self.own if queries else [self.k, self.v]

    def results(self, queries: bool) -> list[Tensor]:
        return [self.own[1]] if queries else [self.k, self.v]

    def meet(
        self, pair: Pair, visitors: Sequence[Tensor] | None, queries: bool = False
    ) -> list[Tensor]:
        lse, q, out, grad = self.own if visitors is None or not queries else visitors
        k, v = (self.k, self.v) if visitors is None or queries else visitors
        dq, dk, dv, dmask = gradients(grad, q, k, v, out, lse, pair)
        if dmask is not None and self.dmask is not None:
            part = self.dmask[self.places(pair.columns)]
            part += dmask.view(part.shape)
        if visitors is None:
            self.found = [dq, dk, dv]
            return []
        self.add_arrived(not queries, [dk, dv] if queries else [dq])
        return [in_type(dq, q.dtype)] if queries else [in_type(x, k.dtype) for x in (dk, dv)]

    def add_arrived(self, queries: bool, arrived: Sequence[Tensor]) -> None:
        for total, part in zip(self.found[:1] if queries else self.found[1:], arrived, strict=True):
            total += part


def of_tour(tour: Tour, x: Tensor, trailing: int = 2) -> Tensor:
    """Return the samples and heads of a tour in `x`; they precede `trailing` other dimensions."""
    d = x.dim() - trailing - tour.back
    if not tour.back or d < 0 or x.shape[d] == 1:
        return x
    return x.narrow(d, tour.start, tour.stop - tour.start)


def _joined(tour: Tour, x: Tensor, parts: list[Tensor]) -> Tensor:
    """Return the gradient of `x`, joined from `parts`, one for each tour.

    Every tour divides the same dimension; `tour` is any of them.
    """
    if len(parts) == 1:
        return parts[0]
    d = x.dim() - 2 - tour.back
    return torch.cat(parts, d) if d >= 0 and x.shape[d] > 1 else torch.stack(parts).sum(0)


class BlockwiseAttention(ShardFunction):
    """Attention of this rank's queries to all keys, which are partitioned over ranks. Collective.

    Blocks are (..., R, E), (..., C, E) and (..., C, V). A mask is (..., R or 1, *columns): if there
    is a ring, with the columns of all keys, otherwise with those of this rank's keys. `twice` is a
    function of q, k, v and mask with the same value, and with every step recorded by autograd, for
    second derivatives.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        spec: Spec,
        twice: Callable[..., Tensor],
    ) -> Tensor:
        tours, trailing = tours_of(spec.schedule), 1 + len(spec.schedule.sizes.columns)
        made = []
        for tour in tours:
            part = None if mask is None else of_tour(tour, mask, trailing)
            own = [of_tour(tour, x) for x in (q, k, v)]
            run = _Forward(spec, tour, own, part)
            run.make()
            made.append((run.out, run.lse))
        out, lse = (
            parts[0] if len(parts) == 1 else torch.cat(parts, parts[0].dim() - 2 - tours[0].back)
            for parts in zip(*made, strict=True)
        )
        if spec.schedule.sums:
            out, lse = _combined(out, lse, spec)
        out = in_type(out, q.dtype)
        ctx.save_for_backward(q, k, v, mask, out, lse)
        ctx.movement = spec, twice
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, mask, out, lse = ctx.saved_tensors
        (spec, twice), grad, needed = ctx.movement, grads[0], ctx.needs_input_grad[:4]
        if torch.is_grad_enabled():
            again = twice(q, k, v, mask)
            leaves = [x for x, n in zip((q, k, v, mask), needed, strict=True) if n]
            found = iter(torch.autograd.grad(again, leaves, grad, create_graph=True))
            return *(next(found) if n else None for n in needed), None, None
        if spec.schedule.sums:
            grad = all_reduce(grad, spec.grid, spec.schedule.sums)
        trailing = 1 + len(spec.schedule.sizes.columns)
        made = []
        dmask = torch.zeros_like(mask, dtype=lse.dtype) if needed[3] else None
        for tour in tours_of(spec.schedule):
            masks = [None if x is None else of_tour(tour, x, trailing) for x in (mask, dmask)]
            own = [of_tour(tour, x) for x in (lse, q, out, grad)]
            run = _Backward(spec, tour, own, of_tour(tour, k), of_tour(tour, v), *masks)
            run.make()
            made.append(run.found)
            del run
        totals = [_joined(tour, x, parts) for x, *parts in zip((q, k, v), *made, strict=True)]
        pairs = zip((*totals, dmask), (q, k, v, mask), strict=True)
        return *(None if d is None else in_type(d, x.dtype) for d, x in pairs), None, None


def _combined(out: Tensor, lse: Tensor, spec: Spec) -> tuple[Tensor, Tensor]:
    """Return the attention to the keys of all ranks, and its log-sum-exp. Collective.

    `out` and `lse` are the attention and log-sum-exp of this rank's queries for its own keys. The
    ranks are those along the grid axes that partition keys but not queries.
    """
    axes = spec.schedule.sums
    total = all_gather(lse, spec.grid, axes).logsumexp(0)
    out = (out * (lse - total.masked_fill(total == -inf, 0)).exp()).contiguous()
    all_reduce_(out, spec.grid, axes)
    return out, total


def record_tours(spec: Spec, operator: str, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Record the blocks that this rank receives in the ledger, under the function name `operator`.

    q, k and v are this rank's blocks.
    """
    schedule = spec.schedule
    sizes, cuts, visits = schedule.sizes, schedule.arrangement, list[Route]()
    for tour in tours_of(schedule):
        for r in rounds_of(schedule, tour):
            if r.source is None:
                continue
            rank, visitors = r.source, [q] if r.queries_come else [k, v]
            count = (schedule.rows(rank) if r.queries_come else schedule.columns(rank)).size
            own = (of_tour(tour, x) for x in visitors)
            size = sum(prod(x.shape[:-2]) * count * x.shape[-1] for x in own)
            visits.append(Route(rank, (), size, (size,)))
    if visits:
        plan = Plan((), (), (), (), tuple(visits), identity=False)
        whole = Layout.of((*cuts.batch, *((),) * len(sizes.columns), ()))
        partitioned = Layout.of((*cuts.batch, *cuts.columns, ()))
        record(Movement(operator, partitioned, whole, plan, q.element_size()))
