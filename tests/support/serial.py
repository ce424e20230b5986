"""Comparison of functions on distributed tensors with serial torch: the judge of all operators."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from mpi4py import MPI
from torch import Tensor, nn

import distconv as dc
from distconv.geometry.topology import AXES
from tests.support.verdicts import one_verdict, raise_together

TOLERANCE = 1e-10
"""Largest deviation from serial in float64, relative to the largest entry."""


_SHARE = {4: 0.6, 6: 0.5, 8: 0.5}


def examples(n: int) -> range:
    """Return the numbers of `n` random examples; of fewer where many ranks make each slow."""
    return range(max(1, round(n * _SHARE.get(MPI.COMM_WORLD.size, 1.0))))


@contextmanager
def told_on_one_rank(text: str) -> Iterator[None]:
    """Assert that the first rank gets a warning that `text` matches, and the others get none."""
    if MPI.COMM_WORLD.rank == 0:
        with pytest.warns(UserWarning, match=text):
            yield
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            yield


@contextmanager
def told_once(text: str) -> Iterator[list[str]]:
    """Assert that one rank gets one warning that holds `text`, which is in the list afterwards."""
    said: list[str] = []
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        yield said
    everywhere = MPI.COMM_WORLD.allgather([str(w.message) for w in told])
    said += [message for each in everywhere for message in each if text in message]
    assert len(said) == 1, everywhere


def raised_everywhere(error: type[Exception], function: Callable, *arguments: object) -> str:
    """Return the message of the error that a call raises on every rank, the same on all."""
    with one_verdict(), pytest.raises(error) as caught:
        function(*arguments)
    texts = MPI.COMM_WORLD.allgather(str(caught.value))
    assert texts == [texts[0]] * MPI.COMM_WORLD.size
    return texts[0]


def random_grid(rng: random.Random, axes: Sequence[str] = AXES) -> dc.ProcessGrid:
    """Draw a grid of all ranks, factored over some of the grid axes; the same on every rank."""
    left = MPI.COMM_WORLD.size
    extents = dict.fromkeys(axes, 1)
    while left > 1:
        factor = next(p for p in range(2, left + 1) if left % p == 0)
        extents[rng.choice(list(axes))] *= factor
        left //= factor
    return dc.ProcessGrid(**extents)


def random_layout(
    rng: random.Random, grid: dc.ProcessGrid, shape: Sequence[int], whole: Sequence[int] = ()
) -> dc.Layout:
    """Draw a layout: each grid axis goes to a dimension, or to none, which replicates."""
    cuts: list[tuple[str, ...]] = [()] * len(shape)
    free = [d for d in range(len(shape)) if d not in whole]
    for axis in rng.sample(AXES, len(AXES)):
        if grid.topology.extent(axis) > 1 and free and rng.random() < 0.85:
            d = rng.choice(free)
            cuts[d] = (*cuts[d], axis)
    return dc.Layout.of(tuple(cuts))


def random_tensor(rng: random.Random, shape: Sequence[int], dtype: Any = torch.float64) -> Tensor:
    """Draw normal values, the same on every rank."""
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    return torch.randn(tuple(shape), generator=generator, dtype=dtype)


def deviation(actual: Any, expected: Any, least: float = 1e-30) -> float:
    """Return the largest difference, relative to the largest expected entry; nan equals nan.

    If that entry is below `least`, the difference is relative to `least`. A distributed tensor is
    made whole, so that all ranks call this.
    """
    if isinstance(actual, dc.DistTensor):
        actual = actual.full_tensor()
    actual, expected = actual.detach(), expected.detach()
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    actual = actual.to(expected.device)
    if not expected.numel():
        return 0.0
    if not (expected.dtype.is_floating_point or expected.dtype.is_complex):
        return float(not torch.equal(actual, expected))
    finite = expected.isfinite()
    if not finite.all():
        if not torch.equal(actual[~finite].nan_to_num(7.0), expected[~finite].nan_to_num(7.0)):
            return torch.inf
        return deviation(actual[finite], expected[finite], least)
    difference = (actual - expected).abs().max().item()
    return difference / max(expected.abs().max().item(), least) if difference else 0.0


def same_gradients(model: nn.Module, serial: nn.Module, tolerance: float = TOLERANCE) -> None:
    """Assert that parameters, whole or sharded, have the serial gradients, or none where none."""
    for (name, p), q in zip(model.named_parameters(), serial.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None:
            assert p.grad.dtype == q.grad.dtype, name
            assert deviation(p.grad, q.grad) <= tolerance, name


def same_state(model: nn.Module, serial: nn.Module, tolerance: float = TOLERANCE) -> None:
    """Assert that parameters, whole or sharded, and buffers have the serial values."""
    state = dc.full_state_dict(model)
    assert list(state) == list(serial.state_dict())
    for name, value in serial.state_dict().items():
        assert type(state[name]) is Tensor
        assert deviation(state[name], value) <= tolerance, name


def agrees(
    function: Callable[..., Any],
    inputs: Sequence[Tensor],
    parameters: Sequence[Tensor],
    grid: dc.ProcessGrid,
    rng: random.Random,
    layouts: Sequence[dc.Layout | None] | None = None,
    tolerance: float = TOLERANCE,
    vanishing: float | None = None,
) -> None:
    """Assert that outputs, input gradients and parameter gradients are the serial ones.

    `inputs` are distributed, `parameters` stay plain. The gradients fed in are random. Serial torch
    computes on the grid's device, as kernels of other devices round otherwise. Gradients smaller
    than `vanishing`, if given, are rounding errors: they are judged as if they were as large, and
    zeros equal None.
    """
    inputs, parameters = ([x.to(grid.device) for x in xs] for xs in (inputs, parameters))
    serial_inputs = [x.clone().requires_grad_(x.is_floating_point()) for x in inputs]
    serial_parameters = [p.clone().requires_grad_(p.is_floating_point()) for p in parameters]
    expected = function(*serial_inputs, *serial_parameters)
    if layouts is None:
        layouts = [random_layout(rng, grid, x.shape) for x in inputs]
    distributed = [
        dc.distribute_tensor(x, grid, layout) for x, layout in zip(inputs, layouts, strict=True)
    ]
    for x in distributed:
        x.requires_grad_(x.is_floating_point())
    plain = [p.clone().requires_grad_(p.is_floating_point()) for p in parameters]
    actual = function(*distributed, *plain)

    wrong: list[str] = []

    def check(holds: bool, what: str) -> None:
        if not holds:
            wrong.append(what)

    pairs = list(zip(_flat(actual), _flat(expected), strict=True))
    for got, wanted in pairs:
        assert isinstance(got, dc.DistTensor)
        assert got.shape == wanted.shape and got.dtype == wanted.dtype
        check(got.shard.shape == got.box.shape, "the block is not canonical")
        check(deviation(got, wanted) <= tolerance, "output")
        check(got.requires_grad == wanted.requires_grad, "what is differentiable")
    differentiable = [(g, w) for g, w in pairs if w.requires_grad]
    raise_together(wrong)
    if not differentiable:
        return
    # Gradients enter in the type of the result, and are shared out over its replicas there.
    tolerance = max(tolerance, *(8 * torch.finfo(w.dtype).eps for _, w in differentiable))
    seeds = [random_tensor(rng, w.shape, w.dtype).to(grid.device) for _, w in differentiable]
    torch.autograd.backward([w for _, w in differentiable], seeds)
    for i, ((got, _), seed) in enumerate(zip(differentiable, seeds, strict=True)):
        got.backward(seed, retain_graph=i + 1 < len(seeds))
    for kind, gots, wanteds in (
        ("input", distributed, serial_inputs),
        ("parameter", plain, serial_parameters),
    ):
        for got, wanted in zip(gots, wanteds, strict=True):
            a, b = got.grad, wanted.grad
            if (a is None) != (b is None):
                zeros = vanishing is not None and deviation(b if a is None else a, 0 * wanted) == 0
                check(zeros, f"an {kind} gradient, or none")
            if a is not None and b is not None:
                allowed = max(tolerance, 8 * torch.finfo(b.dtype).eps)
                check(deviation(a, b, vanishing or 1e-30) <= allowed, f"{kind} gradient")
    raise_together(wrong)


def _flat(result: Any) -> list[Tensor]:
    return list(result) if isinstance(result, (tuple, list)) else [result]


REFUSALS = (RuntimeError, ValueError, IndexError, TypeError, ArithmeticError)
"""Errors that serial torch raises for arguments that it does not take."""


def raises_alike(
    function: Callable[..., Any],
    inputs: Sequence[Tensor],
    parameters: Sequence[Tensor],
    grid: dc.ProcessGrid,
    rng: random.Random,
    layouts: Sequence[dc.Layout | None] | None = None,
) -> None:
    """Assert that the serial function raises, and the distributed one on all ranks, in silence."""
    inputs, parameters = ([x.to(grid.device) for x in xs] for xs in (inputs, parameters))
    with pytest.raises(REFUSALS) as serial:
        function(*inputs, *parameters)
    refused(function, inputs, parameters, grid, rng, layouts, serial.type)


def refused(
    function: Callable[..., Any],
    inputs: Sequence[Tensor],
    parameters: Sequence[Tensor],
    grid: dc.ProcessGrid,
    rng: random.Random,
    layouts: Sequence[dc.Layout | None] | None = None,
    error: type[Exception] = dc.UnsupportedOperation,
) -> None:
    """Assert that the distributed function raises on all ranks before it sends anything.

    It raises `error`, or that it is not supported. Whatever else it raises is an error of its own.
    """
    inputs, parameters = ([x.to(grid.device) for x in xs] for xs in (inputs, parameters))
    if layouts is None:
        layouts = [random_layout(rng, grid, x.shape) for x in inputs]
    distributed = [
        dc.distribute_tensor(x, grid, layout) for x, layout in zip(inputs, layouts, strict=True)
    ]
    raised, carrier = None, grid.transport
    with ExitStack() as stack:
        sends = [
            stack.enter_context(mock.patch.object(carrier, name, wraps=getattr(carrier, name)))
            for name in ("exchange", "all_reduce", "all_gather", "broadcast")
        ]
        with one_verdict():
            try:
                function(*distributed, *parameters)
            except (error, dc.UnsupportedOperation) as caught:
                raised = caught
    everywhere = MPI.COMM_WORLD.allgather((repr(raised)[:200], any(s.called for s in sends)))
    assert all(text != "None" for text, _ in everywhere), f"raised on some ranks: {everywhere}"
    assert not any(sent for _, sent in everywhere), f"raised after sending: {everywhere}"


@contextmanager
def noted(*what: Any) -> Iterator[None]:
    """Add a note that names the case to any error raised within the block."""
    try:
        yield
    except BaseException as error:
        if hasattr(error, "add_note"):  # from Python 3.11 on
            error.add_note(" ".join(map(str, what)))
        raise
