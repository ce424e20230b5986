"""Parameters that are counted wrongly, found out when a backward pass reaches them.

A parameter that meets distributed tensors gets this rank's part of its gradient, and a parallelized
module adds up the parts. Where no module does, or where every rank computes the whole gradient of
a term and not a part of it, the numbers are wrong without a sign of it.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward
from torch.nn import Parameter

from distconv.comm.replication import is_unreplicated

OWNED = "_distconv_owned"
"""The attribute of a parameter or buffer with the number of ranks of its parallelized module."""

_WATCHED = "_distconv_watched"
"""Where a parameter without a parallelized module keeps the handle of the hook that says so."""

_DISTRIBUTED: list[list[Tensor]] = []
"""The blocks of distributed tensors at which the backward passes under way have started."""


def own(tensors: Iterable[Tensor], ranks: int) -> None:
    """Note that parameters and buffers belong to a module that is parallelized over `ranks`."""
    for x in tensors:
        x.__dict__[OWNED] = ranks
        handle = x.__dict__.pop(_WATCHED, None)
        if handle is not None:
            handle.remove()


def watch(plain: Iterable[Tensor]) -> None:
    """Raise when `backward()` gives one of these a gradient, if it is a parameter without a module.

    It is called with the plain tensors that meet tensors distributed over several ranks. Other
    plain tensors, and programs that ask torch.autograd.grad, get a rank's part.
    """
    if not torch.is_grad_enabled():
        return
    for p in plain:
        if p.requires_grad and _WATCHED not in p.__dict__ and isinstance(p, Parameter):
            p.__dict__[_WATCHED] = p.register_post_accumulate_grad_hook(_refuse_part)


def _refuse_part(p: Tensor) -> None:
    raise RuntimeError(
        f"a parameter of shape {tuple(p.shape)} has met distributed tensors and belongs to no "
        "parallelized module: its gradient would be this rank's part only. Call "
        "parallelize(model, grid) before the forward pass, which adds up the parts; "
        "torch.autograd.grad gives the gradient of a distributed loss, and of its to_local() the "
        "part"
    )


class started_at:
    """A context within which it is noted that a backward pass starts at distributed blocks."""

    __slots__ = ("_shards",)

    def __init__(self, shards: Iterable[Tensor]):
        self._shards = list(shards)

    def __enter__(self) -> None:
        _DISTRIBUTED.append(self._shards)

    def __exit__(self, *_: object) -> None:
        _DISTRIBUTED.pop()


def check_counted_once() -> None:
    """Raise in a backward pass that reaches a parallelized parameter from plain tensors alone.

    In such a pass every rank computes the whole gradient. Called while the pass is under way.
    """
    roots, known = _roots(), set(map(id, chain.from_iterable(_DISTRIBUTED)))
    if known.issuperset(map(id, roots)):
        return
    p = owned_among(x for x in roots if id(x) not in known)
    if p is not None:
        raise RuntimeError(
            f"a parameter of shape {tuple(p.shape)} of a parallelized module is part of a plain "
            "loss with no distributed tensor between them: each rank would count that gradient "
            "once, and their sum is too large. Add the term to the distributed loss before "
            "backward(): (loss + penalty).backward(), where loss is what a loss function makes of "
            "the model's output, or its sum, without full_tensor()"
        )


def owned_among(roots: Iterable[Tensor]) -> Tensor | None:
    """Return a parameter over several ranks on which `roots` depend through plain tensors, or None.

    The search ends at values that have been handed out as plain tensors by distributed ones.
    """
    seen: set[Any] = set()
    waiting: list[Any] = []
    for x in roots:
        if x.__dict__.get(OWNED, 1) > 1 and x.requires_grad:
            return x
        waiting.append(x.grad_fn)
    while waiting:
        node = waiting.pop()
        if node is None or node in seen or is_unreplicated(node):
            continue
        seen.add(node)
        p = getattr(node, "variable", None)
        if p is not None and p.__dict__.get(OWNED, 1) > 1:
            found: Tensor = p
            return found
        waiting.extend(following for following, _ in node.next_functions)
    return None


def _roots() -> list[Tensor]:
    """Return the tensors at which the backward pass under way has started; [] if unknown."""
    found = _started_below(sys._getframe(1))
    if found is None:
        # Of a GPU torch goes through the graph in a thread of its own, without Python above.
        own = threading.get_ident()
        others = (frame for thread, frame in sys._current_frames().items() if thread != own)
        found = next((x for x in map(_started_below, others) if x is not None), [])
    return found


def _started_below(frame: Any) -> list[Tensor] | None:
    """Return the roots of the backward pass that this frame, or a caller of it, has started."""
    while frame is not None and frame.f_code is not _engine_run_backward.__code__:
        frame = frame.f_back
    if frame is None:
        return None
    return [x for x in frame.f_locals.get("t_outputs", ()) if isinstance(x, Tensor)]
