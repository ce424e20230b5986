"""Autocast: the element types in which torch computes a function, observed in its dispatcher.

torch converts operands in its dispatcher, below the functions that have rules. To find the types,
the function is run once on tensors without elements. The operands are then converted before the
rule is called, and the rule computes without autocast. If torch also converts tensors that it makes
inside the function, autocast stays on in the rule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from distconv import torch_private
from distconv.device.kinds import rehearsed
from distconv.tensor.base import DistTensorBase, tensors_in
from distconv.tensor.dispatch import RULES
from distconv.tensor.ownership import own_alike


def under_autocast(
    rule: Callable[..., Any], func: Callable[..., Any], operands: Sequence[Tensor]
) -> Callable[..., Any]:
    """Return the rule of `func`, wrapped to convert its operands and result to autocast's types.

    Without autocast return `rule` itself. torch has no autocast for the meta device, so a dry run
    without memory uses the types of the simulated device.
    """
    device = _device_of(next(x for x in operands if isinstance(x, DistTensorBase)))
    if not torch.is_autocast_enabled(device):
        return rule

    def converting(*args: Any, **kwargs: Any) -> Any:
        types = _types(func, args, kwargs, device)
        if types is None:
            return rule(*args, **kwargs)
        if any(types.operands):
            following = iter(types.operands)
            args, kwargs = _mapped((args, kwargs), lambda x: _in_type(x, next(following)))
        try:
            torch.set_autocast_enabled(device, types.others)
            result = rule(*args, **kwargs)
        finally:
            torch.set_autocast_enabled(device, True)
        return _in_type(result, types.result) if isinstance(result, Tensor) else result

    return converting


def result_type(func: Callable[..., Any], x: Tensor, *args: Any) -> torch.dtype:
    """Return the element type of `func(x, *args)` under the active autocast, if any.

    `x` has a floating-point type. Without autocast `func` returns a result of this type.
    """
    device = _device_of(x) if isinstance(x, DistTensorBase) else x.device.type
    types = _types(func, (x, *args), {}, device) if torch.is_autocast_enabled(device) else None
    return x.dtype if types is None or types.result is None else types.result


def _device_of(x: DistTensorBase) -> str:
    """Return the device type of `x`, such as "cuda"; in a dry run, of the simulated device."""
    if x.device.type == "meta":
        return rehearsed() if x.grid.computes_on_gpu else "cpu"
    return x.device.type


class _Types(NamedTuple):
    """The element types of operands and result of one function call under torch's autocast."""

    operands: tuple[torch.dtype | None, ...]
    """The type of each tensor among the arguments, in order; None where it does not change."""
    result: torch.dtype | None
    """The type of the result, if it is one tensor."""
    others: bool
    """Whether torch converts further tensors, which are created inside the function."""


_KNOWN: dict[Any, _Types | None] = {}
"""A cache of the types of function calls; None for a call whose types cannot be observed."""


def _types(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], device: str
) -> _Types | None:
    """Return the types of a call of `func` under autocast on `device`, cached; None if unknown."""
    key = func, device, torch.get_autocast_dtype(device), _kind(args), _kind(kwargs)
    try:
        return _KNOWN[key]
    except KeyError:
        if len(_KNOWN) > 4096:
            _KNOWN.clear()
        found = _KNOWN[key] = _seen(func, args, kwargs, device)
        return found


def _kind(x: Any) -> Any:
    """Return a cache key of an argument: a tensor's type and number of dimensions, or a value."""
    if isinstance(x, Tensor):
        return x.dtype, x.dim()
    if isinstance(x, (list, tuple)):
        return type(x), *map(_kind, x)
    if isinstance(x, dict):
        return *x, *map(_kind, x.values())
    return x if type(x) in _BY_VALUE else type(x)


_BY_VALUE = {bool, str, torch.dtype}


def _mapped(x: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return nested arguments with `change` applied to each tensor, in the order of arguments."""
    if isinstance(x, Tensor):
        return change(x)
    if isinstance(x, dict):
        return {k: _mapped(v, change) for k, v in x.items()}
    if type(x) in (list, tuple):
        return type(x)(_mapped(v, change) for v in x)
    return x


def _in_type(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return `x` converted to `dtype`, or `x` itself if `dtype` is None.

    A converted copy of a parameter still belongs to the parameter's module.
    """
    if dtype is None or x.dtype == dtype:
        return x
    if isinstance(x, DistTensorBase):
        converted: Tensor = RULES[Tensor.to](x, dtype)
        return converted
    y = x.to(dtype)
    own_alike(y, x)
    return y


class StandIn(Tensor):
    """A tensor without elements that replaces an operand on `device`, to observe conversions."""

    __torch_function__: Any = torch_private.no_torch_function
    meta: Tensor
    uses: set[torch.dtype]
    """The element types in which kernels have read the tensor, its views or its bases."""
    family: list[StandIn]
    """The operands of a call, and all tensors computed from the operands."""

    @staticmethod
    def __new__(cls, meta: Tensor, device: str, family: list[StandIn]) -> StandIn:
        self: StandIn = torch_private.make_wrapper(
            cls, meta.shape, meta.stride(), dtype=meta.dtype, device=device
        )
        self.meta, self.uses, self.family = meta, set(), family
        family.append(self)
        return self

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = [x for x in tensors_in(args, kwargs) if isinstance(x, StandIn)]
        first, converts = given[0], func is torch_private.conversion
        named = {k: "meta" if k == "device" else x for k, x in (kwargs or {}).items()}
        if func in _COMPOSED and first is first.family[0]:
            raise NotImplementedError(f"{func} converts types itself")
        args, named = _mapped((tuple(args), named), _without_elements)
        result = func(*args, **named)

        def standing_in(made: Tensor) -> StandIn:
            x = StandIn(made, first.device.type, first.family)
            if func.is_view:
                x.uses = first.uses
            return x

        if not func.is_view:
            for x in given:
                x.uses.add(result.dtype if converts else x.dtype)
        return _mapped(result, standing_in)


def _without_elements(x: Tensor) -> Tensor:
    return x.meta if isinstance(x, StandIn) else x.to("meta")


_COMPOSED = {
    torch.ops.aten.affine_grid_generator.default,
    torch.ops.aten.linalg_pinv.atol_rtol_tensor,
}
"""Functions whose kernels call further functions for which torch converts types internally."""


def _seen(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], device: str
) -> _Types | None:
    """Run `func` on tensors without elements, and return the types chosen by autocast.

    Return None if the run fails, or if `func` is not a function of torch.
    """
    if not (getattr(func, "__module__", None) or "torch").startswith("torch"):
        return None
    family: list[StandIn] = []

    def stand_in(x: Tensor) -> StandIn:
        return StandIn(torch.empty(x.shape, dtype=x.dtype, device="meta"), device, family)

    try:
        with torch.no_grad(), torch_private.without_modes():
            positional, named = _mapped((args, kwargs), stand_in)
            operands = tuple(family)
            made = func(*positional, **named)
    except Exception:  # for instance, where the result depends on elements
        return None
    result = made.dtype if isinstance(made, Tensor) and made.is_floating_point() else None
    own = {id(x.uses) for x in operands}
    others = any(_converted(x) and (len(x.uses) > 1 or id(x.uses) not in own) for x in family)
    widens = not any(x.dtype == result for x in operands)
    types = []
    for x in operands:
        used = next(iter(x.uses)) if len(x.uses) == 1 and not others else None
        if widens and used == x.dtype and used in _HALF:
            # Some functions take the type in which they sum from the result.
            used = result
        types.append(used if used and used.is_floating_point and used != x.dtype else None)
    return _Types(tuple(types), result, others)


_HALF = torch.float16, torch.bfloat16


def _converted(x: StandIn) -> bool:
    return any(dtype != x.dtype and dtype.is_floating_point for dtype in x.uses)
