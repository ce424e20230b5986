"""Element-wise functions, with operands broadcast against each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from distconv.geometry.layout import Cuts, operand_cuts
from distconv.ops.support.arguments import as_sizes, takes_sequence
from distconv.ops.support.dimensions import keeps_shape, works_elementwise
from distconv.ops.support.in_place import become_distributed, is_recorded
from distconv.ops.support.operands import (
    box_on_rank,
    broadcast_cuts,
    broadcast_shape,
    common_grid,
    local_operand,
    shard_of,
)
from distconv.ops.support.spectra import zeros
from distconv.tensor.aliasing import (
    is_of_parameter,
    make_fork,
    make_view,
    mark_of_parameter,
    prepare_write,
    update_views,
)
from distconv.tensor.dispatch import RULES, implements, refuse
from distconv.tensor.dist_tensor import DistTensor
from distconv.tensor.memory_format import in_one_format
from distconv.tensor.one_rank import serial_by

# Functions of one tensor and numbers, and n-ary ones that broadcast. Each name is looked up in
# torch, torch.special, torch.Tensor and torch.nn.functional, with its in-place form.
_NAMES = """
    abs absolute acos acosh add addcdiv addcmul angle arccos arccosh arcsin arcsinh arctan arctan2
    arctanh asin asinh atan atan2 atanh bitwise_and bitwise_left_shift bitwise_not bitwise_or
    bitwise_right_shift bitwise_xor ceil clamp clamp_max clamp_min clip clone conj conj_physical
    copysign cos cosh deg2rad digamma div divide entr eq erf erfc erfcinv erfcx erfinv exp
    exp2 expit expm1 fill fix float_power floor floor_divide fmax fmin fmod frac ge gcd greater
    greater_equal gt heaviside hypot i0 i0e i1 i1e igamma igammac imag isclose isfinite isinf isnan
    isneginf isposinf isreal lcm ldexp le lerp less less_equal lgamma log log10 log1p log2 log_ndtr
    logaddexp logaddexp2 logical_and logical_not logical_or logical_xor logit lt masked_fill maximum
    minimum mul multiply mvlgamma nan_to_num ndtr ndtri ne neg negative nextafter not_equal
    polygamma positive pow psi rad2deg real reciprocal remainder resolve_conj resolve_neg round
    rsqrt rsub sgn sigmoid sign signbit sin sinc sinh sqrt square sub subtract tan tanh threshold
    true_divide trunc xlog1py xlogy zero zeta
    celu elu gelu hardshrink hardsigmoid hardswish hardtanh leaky_relu logsigmoid mish relu relu6
    selu silu softplus softshrink softsign tanhshrink
    float double half bfloat16 int long short char byte bool cdouble cfloat chalf copy
    airy_ai bessel_j0 bessel_j1 bessel_y0 bessel_y1 chebyshev_polynomial_t chebyshev_polynomial_u
    chebyshev_polynomial_v chebyshev_polynomial_w complex gammainc gammaincc gammaln
    hermite_polynomial_h hermite_polynomial_he laguerre_polynomial_l legendre_polynomial_p
    modified_bessel_i0 modified_bessel_i1 modified_bessel_k0 modified_bessel_k1 multigammaln polar
    scaled_modified_bessel_k0 scaled_modified_bessel_k1 shifted_chebyshev_polynomial_t
    shifted_chebyshev_polynomial_u shifted_chebyshev_polynomial_v shifted_chebyshev_polynomial_w
    spherical_bessel_j0
""".split()

_DUNDERS = """
    add radd iadd sub rsub isub mul rmul imul truediv rtruediv itruediv floordiv rfloordiv
    ifloordiv mod rmod imod pow rpow ipow neg pos abs invert and rand iand or ror ior xor rxor ixor
    lshift rlshift ilshift rshift rrshift irshift eq ne lt le gt ge
""".split()


def _torch_rule(function: Callable[..., Any]) -> Callable[..., Any]:
    code, name = getattr(function, "__code__", None), getattr(function, "__name__", "")
    takes_inplace = code is not None and "inplace" in code.co_varnames
    operator = name.startswith("__")
    writes = name.startswith("__i") and name != "__invert__" if operator else name.endswith("_")
    rule = pointwise_rule(function, writes, takes_inplace)
    return rule if writes else serial_by(partial(_of_blocks, function))(rule)


def _of_blocks(function: Callable[..., Any], *blocks: Any, **named: Any) -> Any:
    """Return `function` of the blocks on a grid of one rank; NotImplemented if `inplace=True`."""
    if named.get("inplace"):
        return NotImplemented
    return function(*(in_one_format(blocks) if len(blocks) > 1 else blocks), **named)


def pointwise_rule(
    function: Callable[..., Any], in_place: bool = False, takes_inplace: bool = False
) -> Callable[..., Any]:
    """Return the rule of an element-wise function for DistTensors.

    The function may write to a plain first argument, equal on all ranks. If autograd records the
    call, the argument becomes distributed; otherwise it stays plain, and every rank writes the
    global result to it.

    Parameters
    ----------
    in_place: whether the function writes to its first argument, and returns it.
    takes_inplace: whether the function does so when it is called with `inplace=True`.
    """
    name = getattr(function, "__name__", str(function))

    @works_elementwise(name, in_place, takes_inplace)
    def rule(*args: Any, **kwargs: Any) -> Any:
        tensors: list[Tensor] = []
        operands: list[DistTensor] = []
        for x in (*args, *kwargs.values()):
            if isinstance(x, Tensor):
                tensors.append(x)
                if isinstance(x, DistTensor):
                    operands.append(x)
        written = None
        if in_place or (takes_inplace and kwargs.get("inplace")):
            written = args[0] if args else kwargs["input"]
            if not isinstance(written, DistTensor) and is_recorded(tensors):
                return become_distributed(
                    name, written, operands, lambda x: rule(x, *args[1:], **kwargs)
                )
        if isinstance(written, DistTensor):
            prepare_write(written, name)
        first = operands[0]
        shape, cuts, grid = tuple(first.shape), first.cuts, first.grid
        if len(tensors) == 1 or _same_layout(tensors):
            local: Callable[[Any], Any] = shard_of
        else:
            grid = common_grid(name, operands)
            shape = broadcast_shape(name, tensors)
            if written is None:
                cuts = broadcast_cuts(operands, shape)
            else:
                cuts = written.cuts if isinstance(written, DistTensor) else ((),) * len(shape)
            if written is not None and shape != tuple(written.shape):
                raise RuntimeError(
                    f"{name}: output with shape {tuple(written.shape)} doesn't match the "
                    f"broadcast shape {shape}"
                )

            def local(x: Any) -> Any:
                return local_operand(x, shape, cuts, grid, name)

        named = {k: local(x) for k, x in kwargs.items()} if kwargs else {}
        blocks: Sequence[Any] = list(map(local, args))
        if len(tensors) > 1 and len(shape) == 4 and written is None:
            blocks = in_one_format(blocks)
        result = function(*blocks, **named)
        if result is NotImplemented:  # Python then asks the other operand
            return result
        if written is not None:
            if isinstance(written, DistTensor):
                update_views(written)
            return written
        # A conversion that changes nothing returns the tensor itself, as in torch.
        return first if result is first.shard else DistTensor(result, shape, cuts, grid)

    return rule


def _same_layout(tensors: list[Tensor]) -> bool:
    """Return whether all `tensors` are DistTensors of one shape, layout and grid.

    Then nothing is to be redistributed or broadcast.
    """
    first = tensors[0]
    return isinstance(first, DistTensor) and all(
        isinstance(x, DistTensor)
        and x.shape == first.shape
        and x.cuts == first.cuts
        and x.grid is first.grid
        for x in tensors
    )


def _register() -> None:
    names = [*_NAMES, *(f"{n}_" for n in _NAMES)]
    dunders = [f"__{n}__" for n in _DUNDERS]
    for home in (torch, torch.special, torch.Tensor, F):
        for name in [*names, *dunders] if home is torch.Tensor else names:
            function = getattr(home, name, None)
            if callable(function) and function not in RULES:
                RULES[function] = _torch_rule(function)


_register()


@implements(torch.detach, torch.Tensor.detach, torch.Tensor.data.__get__)  # type: ignore[attr-defined]
@keeps_shape
def detach(input: DistTensor) -> DistTensor:
    """Return a tensor that shares the memory of `input`, outside the autograd graph."""
    x: Any = input
    make: Any = detach
    recipe, write, writable, place = input.recipe, None, True, None
    if recipe is not None:
        # A write reaches the elements of the base, but not its history.
        x = torch.detach(recipe.base)
        _, make, write, writable, place, *_ = recipe
        if write is None:
            return make(x)
    shard = input.shard.detach()
    return make_view(x, shard, input.shape, input.cuts, make, write, writable=writable, place=place)


def _part_of_complex(name: str, *functions: Callable[..., Any]) -> None:
    @keeps_shape
    def view(input: DistTensor) -> DistTensor:
        shard = getattr(torch, name)(input.shard)
        if shard is input.shard:  # of real numbers
            return input
        return make_view(input, shard, input.shape, input.cuts, view)

    implements(getattr(torch, name), *functions)(view)


_part_of_complex("real", torch.Tensor.real.__get__)  # type: ignore[attr-defined]
_part_of_complex("imag", torch.Tensor.imag.__get__)  # type: ignore[attr-defined]
_part_of_complex("conj", torch.Tensor.conj)


@implements(torch.detach_, torch.Tensor.detach_)
def detach_(input: DistTensor) -> DistTensor:
    """Detach `input` from the autograd graph in place; raise RuntimeError for a view."""
    if input.recipe is not None:
        raise RuntimeError("detach_: views cannot be detached in place; use x = x.detach()")
    if input.is_leaf:
        return input.requires_grad_(False)  # type: ignore[no-any-return]
    input.__dict__.pop("_redistributed", None)
    input.shard = input.shard.detach()
    input.sync_requires_grad()
    return input


_where = pointwise_rule(torch.where)


@implements(torch.where)
def where(condition: Tensor, input: Any = None, other: Any = None) -> Any:
    if input is None and other is None:
        return torch.nonzero(condition, as_tuple=True)
    made = _where(condition, input, other)
    # torch.nn.init.trunc_normal_ draws random numbers into the result again.
    return _of_parameter_as(other, made) if isinstance(other, DistTensor) else made


@implements(torch.Tensor.contiguous)
@keeps_shape
def contiguous(
    input: DistTensor, memory_format: torch.memory_format = torch.contiguous_format
) -> DistTensor:
    """Return `input` with contiguous blocks; each block that is not contiguous is copied."""
    shard = input.shard.contiguous(memory_format=memory_format)
    return make_fork(input, shard, input.shape, input.cuts)


@implements(torch.Tensor.to)
@keeps_shape
def to(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Return `input` in another type or memory format, or in the type of a tensor `other`.

    A plain `input` stays plain, even if `other` is distributed. Raises UnsupportedOperation for a
    device of another type than the grid's.
    """
    args = tuple(_like(x) for x in args)
    kwargs = {k: _like(x) for k, x in kwargs.items()}
    if not isinstance(input, DistTensor):
        return input.to(*args, **kwargs)
    shard = input.shard.to(*args, **kwargs)
    _require_here("to", input, shard.device)
    if kwargs.get("memory_format", torch.preserve_format) != torch.preserve_format:
        if shard.dtype == input.dtype and not kwargs.get("copy"):
            # Whether a block is copied depends on its memory format on each rank.
            return make_fork(input, shard, input.shape, input.cuts)
    if shard is input.shard:
        return input
    result = DistTensor(shard, input.shape, input.cuts, input.grid)
    # A block without elements may have the format already, so that nothing is copied there.
    result.made_after = input.made_after
    return result


@implements(torch.Tensor.cpu)
def cpu(
    input: DistTensor, memory_format: torch.memory_format = torch.preserve_format
) -> DistTensor:
    """Return `input` on a grid of CPUs; raise UnsupportedOperation on other devices."""
    _require_here("cpu", input, torch.device("cpu"))
    return to(input, "cpu", memory_format=memory_format)  # type: ignore[return-value]


def _require_here(operator: str, input: DistTensor, device: torch.device) -> None:
    """Raise UnsupportedOperation unless `device`, that of a result, is the device of the grid.

    `operator` is the name of the called function, for the error.
    """
    if device != input.device:
        reason = f"the tensors of a grid are on its devices, not on {device}"
        way_out = "Move x.full_tensor() or x.to_local(); x.item() gives a number"
        refuse(operator, reason, input, way_out=way_out)


@implements(torch.Tensor.type)
@keeps_shape
def type_(input: DistTensor, dtype: Any = None, non_blocking: bool = False) -> Any:
    result = input.shard.type(dtype, non_blocking) if dtype is not None else input.shard.type()
    if isinstance(result, str):
        return result
    if result is input.shard:
        return input
    _require_here("type", input, result.device)
    return DistTensor(result, input.shape, input.cuts, input.grid)


def _like(x: Any) -> Any:
    return x.example if isinstance(x, DistTensor) else x


def _of_parameter_as(input: DistTensor, made: DistTensor) -> DistTensor:
    """Return `made`, after marking it if `input` is a sharded parameter, a view of one, or marked.

    Functions that fill a marked tensor draw the random numbers of serial torch.
    """
    if is_of_parameter(input):
        mark_of_parameter(made)
    return made


def _constant(function: Callable[..., Any]) -> Callable[..., Any]:
    @keeps_shape
    def filled(input: DistTensor, *args: Any, **kwargs: Any) -> Any:
        if function is torch.zeros_like and input.pending is not None:
            example = function(input.example, *args, **kwargs)
            _require_here("zeros_like", input, example.device)
            return zeros(input.shape, input.cuts, input.grid, example)
        shard = function(input.shard, *args, **kwargs)
        _require_here(function.__name__, input, shard.device)
        return _of_parameter_as(input, DistTensor(shard, input.shape, input.cuts, input.grid))

    def rule(input: DistTensor, *args: Any, requires_grad: bool = False, **kwargs: Any) -> Any:
        result = filled(input, *args, **kwargs)
        return result.requires_grad_() if requires_grad else result

    return rule


for _function in (torch.zeros_like, torch.ones_like, torch.full_like, torch.empty_like):
    RULES[_function] = _constant(_function)


def _new_tensor(
    function: Callable[..., Tensor],
    input: DistTensor,
    shape: tuple[int, ...],
    *args: Any,
    requires_grad: bool = False,
    **kwargs: Any,
) -> DistTensor:
    """Return a new tensor of global `shape` by `function`, such as torch.Tensor.new_zeros.

    Dimensions of the same number and size as in `input` are partitioned as in `input`.
    """
    torch.empty(shape, device="meta")  # raises for negative sizes
    cuts: Cuts = ((),) * len(shape)
    if len(shape) == input.dim():
        cuts = operand_cuts(shape, tuple(input.shape), input.cuts)
    if function is torch.Tensor.new_zeros and input.pending is not None:
        example = function(input.example, 0, **kwargs)
        _require_here("new_zeros", input, example.device)
        result = zeros(shape, cuts, input.grid, example)
        return result.requires_grad_() if requires_grad else result
    shard = function(input.example, box_on_rank(shape, cuts, input.grid).shape, *args, **kwargs)
    _require_here(function.__name__, input, shard.device)
    result = _of_parameter_as(input, DistTensor(shard, shape, cuts, input.grid))
    return result.requires_grad_() if requires_grad else result


def _new(function: Callable[..., Tensor]) -> None:
    @implements(function)
    @takes_sequence("size")
    def rule(input: DistTensor, *size: Any, **kwargs: Any) -> DistTensor:
        return _new_tensor(function, input, as_sizes(size), **kwargs)


_new(torch.Tensor.new_zeros)
_new(torch.Tensor.new_ones)
_new(torch.Tensor.new_empty)


@implements(torch.Tensor.new)
def new(input: DistTensor, *size: Any) -> DistTensor:
    """Return an uninitialised tensor of `size`, as `new_empty`, for older programs and LBFGS."""
    if len(size) == 1 and isinstance(size[0], torch.Size):
        size = tuple(size[0])
    if not all(type(n) is int for n in size):
        refuse("new", "only sizes are supported", input, way_out="Use distribute_tensor for data")
    return _new_tensor(torch.Tensor.new_empty, input, size)


@implements(torch.Tensor.new_full)
def new_full(
    input: DistTensor, size: Sequence[int], fill_value: float, **kwargs: Any
) -> DistTensor:
    return _new_tensor(torch.Tensor.new_full, input, tuple(size), fill_value, **kwargs)


@implements(torch.Tensor.new_tensor)
def new_tensor(
    input: DistTensor, data: Any, *, requires_grad: bool = False, **kwargs: Any
) -> DistTensor:
    """Return a replicated tensor of `data`, equal on all ranks; a DistTensor keeps its layout."""
    if isinstance(data, DistTensor):
        shard, shape, cuts = data.shard.detach().clone(), data.shape, data.cuts
        shard = shard.to(kwargs.get("dtype") or shard.dtype)
    else:
        shard = input.example.new_tensor(data, **kwargs)
        shape, cuts = shard.shape, ((),) * shard.dim()
    _require_here("new_tensor", input, shard.device)
    result = DistTensor(shard, shape, cuts, input.grid)
    return result.requires_grad_() if requires_grad else result


@implements(F.prelu, torch.prelu, torch.Tensor.prelu)
def prelu(input: DistTensor, weight: Tensor) -> DistTensor:
    if not isinstance(input, DistTensor) or isinstance(weight, DistTensor):
        way_out = "Use weight.full_tensor()"
        refuse("prelu", "the slopes must be a plain tensor", input, weight, way_out=way_out)
    if weight.dim() > 1 or weight.numel() not in (1, input.shape[1] if input.dim() > 1 else 1):
        raise RuntimeError(
            f"prelu: slopes of shape {tuple(weight.shape)} for an input of shape "
            f"{tuple(input.shape)}; expected one slope, or one for each channel"
        )
    if weight.numel() > 1:
        channels = (input.shape[1],), (input.cuts[1],)
        weight = local_operand(weight.flatten(), *channels, input.grid, "prelu")
    return DistTensor(torch.prelu(input.shard, weight), input.shape, input.cuts, input.grid)
