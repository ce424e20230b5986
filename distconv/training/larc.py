"""Layer-wise learning rates: LARS and LARC around any optimizer of torch.

A layer's step is kept in proportion to its weights. Without this, a large learning rate destroys
layers whose gradients are large compared with their weights, which limits the batch size.

- LARS: You et al., "Large Batch Training of Convolutional Networks", arXiv:1708.03888.
- LARC limits the rate where LARS sets it: Kurth et al., "Exascale Deep Learning for Climate
  Analytics", SC 2018.
- Scaling the update of Adam is LAMB: You et al., arXiv:1904.00962.

Parameters with fewer than two dimensions, that is biases and normalisations, keep the optimizer's
own step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from math import isfinite
from operator import attrgetter
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from distconv.model.clipping import tensor_norms
from distconv.tensor.base import shards_of
from distconv.training.checks import check_wrappable

Group = dict[str, Any]

_DECOUPLED = ("AdamW", "Adafactor", "Muon")
"""Names of torch's optimizers whose weight decay is not part of the gradient."""


class LARC(Optimizer):
    """Wrap an optimizer so that the step of a layer is small compared with its weights.

    Use it in place of the optimizer, whose parameter groups and state it shares: schedulers,
    gradient scalers and checkpoints work with it, and a checkpoint may come from the optimizer
    alone. All ranks of a grid take a step together; norms of sharded parameters are summed over
    ranks in one message for many. With w the weights of a layer, g their gradient, wd the weight
    decay, lr the learning rate and D the optimizer's own update, a step is

    - on="gradient": the optimizer's step on r (g + wd w), without its own weight decay, where
      t = trust |w| / (|g| + wd |w|) and r is t to scale, min(t / lr, 1) to clip. Gradients are
      overwritten, as by `clip_grad_norm_`. As published, for SGD.
    - on="update": r D, where t = trust |w| / |D| and r is lr t to scale, min(t, 1) to clip.
      For Adam and similar optimizers, whose updates hardly depend on the size of gradients.

    If a norm is 0, r is 1.

    Raises ValueError for a `trust` that is not positive, or an unknown `on`. Raises TypeError for
    an optimizer that cannot be wrapped.

    Parameters
    ----------
    optimizer: any optimizer of torch except LBFGS, which computes gradients again within a step.
    trust: the norm of a layer's step over the norm of its weights: to clip, the upper limit; to
        scale, the value at a learning rate of 1. With on="gradient" this holds for plain SGD.
    clip: True to clip, that is to limit the step; False to scale it, that is to set it.
    on: "gradient" or "update".

    Examples
    --------
    >>> model = dc.parallelize(nn.Conv2d(1, 4, 3), dc.ProcessGrid(height=2))
    >>> optimizer = dc.training.LARC(torch.optim.SGD(model.parameters(), lr=0.4, momentum=0.9))
    >>> x = dc.distribute_tensor(torch.ones(1, 1, 8, 8), dc.ProcessGrid(height=2))
    >>> model(x).square().mean().backward()
    >>> optimizer.step()
    """

    def __init__(
        self, optimizer: Optimizer, trust: float = 0.02, *, clip: bool = True, on: str = "gradient"
    ):
        kind = type(self).__name__
        check_wrappable(kind, optimizer, LARC)
        if not (trust > 0 and isfinite(trust)):
            raise ValueError(f"{kind}: trust={trust!r} is not positive; choose 0.02, for example")
        if on not in ("gradient", "update"):
            raise ValueError(f'{kind}: on={on!r} is unknown; choose "gradient" or "update"')
        # Not Optimizer.__init__: groups and state are those of the wrapped optimizer.
        self.optimizer = optimizer
        self.trust, self.clip, self.on = trust, clip, on

    def __repr__(self) -> str:
        how = f"trust={self.trust}, clip={self.clip}, on={self.on!r}"
        return f"{type(self).__name__}({self.optimizer!r}, {how})"

    def __getattr__(self, name: str) -> Any:
        # torch's methods for hooks look here for their lists.
        if name.startswith("_optimizer_") and "optimizer" in self.__dict__:
            return getattr(self.optimizer, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__.copy()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def state_dict(self) -> dict[str, Any]:
        """Return the state_dict of the wrapped optimizer."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state_dict into the wrapped optimizer."""
        self.optimizer.load_state_dict(dict(state_dict))

    def add_param_group(self, param_group: Group) -> None:
        """Add a parameter group to the wrapped optimizer."""
        self.optimizer.add_param_group(param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set all gradients to None, or to zero."""
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Take a step. Return the result of `closure`, if given, which computes the gradients."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            if self.on == "gradient":
                self._scale_gradients()
                with _without_weight_decay(self.param_groups):
                    self.optimizer.step()
            else:
                before = [
                    (group, p, p.detach().clone()) for group, p in self._layers() if p.dim() > 1
                ]
                self.optimizer.step()
                self._scale_updates(before)
        return loss

    def _layers(self) -> Iterator[tuple[Group, Tensor]]:
        """Yield the parameters that have a gradient, each with its group."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    yield group, p

    def _scale_gradients(self) -> None:
        layers = list(self._layers())
        kind = type(self.optimizer)
        apart = any(base.__name__ in _DECOUPLED for base in kind.__mro__)
        for group, _ in layers:
            if _decay(group) and (apart or group.get("decoupled_weight_decay", False)):
                raise ValueError(
                    f"{type(self).__name__}: the weight decay of {kind.__name__} is not part of "
                    'the gradient; use on="update", or weight_decay=0'
                )
        scaled = [(group, p, cast(Tensor, p.grad)) for group, p in layers if p.dim() > 1]
        norms = tensor_norms([t for _, p, gradient in scaled for t in (p.detach(), gradient)])
        ratios = {}
        for (group, p, _), size, slope in zip(scaled, norms[::2], norms[1::2], strict=True):
            ratio = self.trust * size / (slope + _decay(group) * size)
            if self.clip:
                ratio = (ratio / group["lr"]).clamp(max=1.0)
            ratios[p] = _one_where_zero(ratio, size, slope)
        for group, p in layers:
            gradient, weights = shards_of([cast(Tensor, p.grad), p.detach()])
            if _decay(group):
                sign = -1.0 if group.get("maximize", False) else 1.0
                gradient.add_(weights, alpha=sign * _decay(group))
            if p in ratios:
                gradient.mul_(ratios[p])

    def _scale_updates(self, layers: list[tuple[Group, Tensor, Tensor]]) -> None:
        norms = tensor_norms([t for _, p, before in layers for t in (before, p.detach() - before)])
        for (group, p, before), size, moved in zip(layers, norms[::2], norms[1::2], strict=True):
            ratio = self.trust * size / moved
            ratio = ratio.clamp(max=1.0) if self.clip else ratio * group["lr"]
            weights, old = shards_of([p.detach(), before])
            # With a ratio of 1 lerp returns the optimizer's own result, to the bit.
            weights.copy_(old.lerp(weights, _one_where_zero(ratio, size, moved).to(old.dtype)))


for _name in ("param_groups", "state", "defaults"):  # the attributes of the wrapped optimizer
    setattr(LARC, _name, property(attrgetter(f"optimizer.{_name}")))


class LARS(LARC):
    """Wrap an optimizer so that the step of each layer is in proportion to the size of its weights.

    This is `LARC` with clip=False. The learning rate of the optimizer is a factor common to all
    layers, which a schedule changes; published with SGD and momentum.

    Examples
    --------
    >>> model = dc.parallelize(nn.Conv2d(1, 4, 3), dc.ProcessGrid(height=2))
    >>> optimizer = dc.training.LARS(torch.optim.SGD(model.parameters(), lr=5.0, momentum=0.9))
    >>> x = dc.distribute_tensor(torch.ones(1, 1, 8, 8), dc.ProcessGrid(height=2))
    >>> model(x).square().mean().backward()
    >>> optimizer.step()
    """

    def __init__(self, optimizer: Optimizer, trust: float = 0.001, *, on: str = "gradient"):
        super().__init__(optimizer, trust, clip=False, on=on)


def _decay(group: Group) -> float:
    return float(group.get("weight_decay", 0.0))


def _one_where_zero(ratio: Tensor, *norms: Tensor) -> Tensor:
    """Return `ratio`, or 1 if one of the norms is 0, without waiting for the device."""
    zero = torch.stack(norms).eq(0).any()
    return torch.where(zero, torch.ones_like(ratio), ratio)


@contextmanager
def _without_weight_decay(groups: list[Group]) -> Iterator[None]:
    """Set the weight decay of parameter groups to 0 in a `with` block."""
    kept = [(group, group["weight_decay"]) for group in groups if "weight_decay" in group]
    for group, _ in kept:
        group["weight_decay"] = 0.0
    try:
        yield
    finally:
        for group, decay in kept:
            group["weight_decay"] = decay
