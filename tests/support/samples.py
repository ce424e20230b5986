"""Sample calls of the torch functions that have a rule.

One table, by the bare name of a function: `sum` stands for torch.sum and torch.Tensor.sum, `add`
also for add_, which is then given a copy to write to. The arguments are those of a typical call, on
tensors of which most sizes are odd, so that blocks are uneven.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distconv.tensor.dispatch import RULES
from tests.support.serial import random_tensor

HOMES: dict[str, Any] = {
    "torch": torch,
    "torch.Tensor": torch.Tensor,
    "torch.nn.functional": F,
    "torch.special": torch.special,
    "torch.linalg": torch.linalg,
    "torch.fft": torch.fft,
    "torch.nn.init": nn.init,
    "torch.autograd": torch.autograd,
}
"""Modules and classes in which programs find functions."""

LISTWISE = ("_foreach", "_amp", "_fused")
"""Beginnings of the names of functions of lists of tensors, which have their own tests."""

Values = Callable[[random.Random, Sequence[int]], Tensor]


def _unit(rng: random.Random, shape: Sequence[int]) -> Tensor:
    """Return values from 0.1 to 0.9, where most functions are defined and smooth."""
    return 0.1 + 0.8 * torch.sigmoid(random_tensor(rng, shape))


def _above(rng: random.Random, shape: Sequence[int]) -> Tensor:
    return 1 + _unit(rng, shape)


def _large(rng: random.Random, shape: Sequence[int]) -> Tensor:
    return 10 + _unit(rng, shape)


def _integers(rng: random.Random, shape: Sequence[int]) -> Tensor:
    return (4 * _unit(rng, shape)).long()


def _booleans(rng: random.Random, shape: Sequence[int]) -> Tensor:
    return random_tensor(rng, shape) > 0


def _complex(rng: random.Random, shape: Sequence[int]) -> Tensor:
    return random_tensor(rng, shape, torch.complex128)


def _single(rng: random.Random, shape: Sequence[int]) -> Tensor:
    return random_tensor(rng, shape, torch.float32)


def _with_gaps(rng: random.Random, shape: Sequence[int]) -> Tensor:
    return random_tensor(rng, shape).masked_fill(_booleans(rng, shape), torch.nan)


def _signs(rng: random.Random, shape: Sequence[int]) -> Tensor:
    return random_tensor(rng, shape).sign()


def _label_sets(rng: random.Random, shape: Sequence[int]) -> Tensor:
    """Return two different classes for each row, and -1 for no more of them."""
    labels = torch.full(tuple(shape), -1)
    labels[..., 0] = _integers(rng, shape[:-1])
    labels[..., 1] = labels[..., 0] + 1
    return labels


def _different(rng: random.Random, shape: Sequence[int]) -> Tensor:
    """Return positions of which no two are the same."""
    return torch.tensor(rng.sample(range(5), shape[0]))


def _in_place(_: random.Random, shape: Sequence[int]) -> Tensor:
    """Return for each position of a plane its own number there."""
    return torch.arange(prod(shape[2:])).reshape(tuple(shape[2:])).expand(tuple(shape))


def _ascending(rng: random.Random, shape: Sequence[int]) -> Tensor:
    return random_tensor(rng, shape).sort().values


def _regular(rng: random.Random, shape: Sequence[int]) -> Tensor:
    """Return well-conditioned matrices of distinct eigenvalues and singular values."""
    scale = torch.arange(2, 2 + shape[-1], dtype=torch.float64)
    return torch.diag_embed(scale.expand(shape[:-1])) + 0.1 * random_tensor(rng, shape)


@dataclass(frozen=True)
class Operand:
    """A tensor of a sample call; `plain` ones, such as weights, are not distributed."""

    shape: tuple[int, ...]
    values: Values = random_tensor
    plain: bool = False


class Dim(int):
    """The number of the dimension that a function works along."""


@dataclass(frozen=True)
class Sample:
    """The arguments of one call.

    `through` takes the function and the arguments, where the function is not simply called.
    """

    args: tuple[Any, ...]
    kwargs: MappingProxyType[str, Any]
    through: Callable[..., Any] | None = None

    def operands(self, plain: bool) -> list[Operand]:
        """Return the distributed or the plain operands of the call, in order."""
        return [x for x in _every(Operand, self.args, dict(self.kwargs)) if x.plain is plain]

    @property
    def dim(self) -> int | None:
        """Return the dimension that the call works along, where it names one."""
        return next((int(d) for d in _every(Dim, self.args)), None)

    def call(self, name: str, *tensors: Tensor) -> Any:
        """Call a function by name on distributed, then plain tensors, and return its result."""
        function, count = function_of(name), len(self.operands(plain=False))
        filling = {False: iter(tensors[:count]), True: iter(tensors[count:])}
        args, kwargs = _filled((self.args, dict(self.kwargs)), filling)
        if self.through is not None:
            return self.through(function, *args, **kwargs)
        if writes_in_place(name):
            args = (args[0].clone(), *args[1:])
        result = function(*args, **kwargs)
        if isinstance(result, Iterator):
            return tuple(result)
        return args[0] if writes_in_place(name) else result


def _every(kind: type, *arguments: Any) -> Iterator[Any]:
    for item in arguments:
        if isinstance(item, kind):
            yield item
        elif isinstance(item, (tuple, list)):
            yield from _every(kind, *item)
        elif isinstance(item, dict):
            yield from _every(kind, *item.values())


def _filled(arguments: Any, filling: dict[bool, Iterator[Tensor]]) -> Any:
    """Return the arguments with tensors in the places of operands."""
    if isinstance(arguments, Operand):
        return next(filling[arguments.plain])
    if isinstance(arguments, (tuple, list)):
        return type(arguments)(_filled(item, filling) for item in arguments)
    if isinstance(arguments, dict):
        return {name: _filled(item, filling) for name, item in arguments.items()}
    return arguments


def function_of(name: str) -> Any:
    """Return the function of a qualified name; for a property, its getter."""
    found = getattr(HOMES[name.rpartition(".")[0]], bare(name))
    return found if callable(found) else found.__get__


def bare(name: str) -> str:
    """Return the last part of a qualified name."""
    return name.rpartition(".")[2]


@lru_cache
def names() -> dict[Any, list[str]]:
    """Return the qualified names of all functions in `HOMES`, properties included."""
    found: dict[Any, list[str]] = {}
    for home, owner in HOMES.items():
        attributes = (a for a in dir(owner) if not a.startswith(LISTWISE))
        for name in (f"{home}.{attribute}" for attribute in attributes):
            attribute = getattr(owner, bare(name), None)
            if callable(attribute) or hasattr(attribute, "__get__"):
                found.setdefault(function_of(name), []).append(name)
    return found


def with_rules() -> list[str]:
    """Return the qualified names of all functions that have a rule."""
    return [name for function in RULES for name in names().get(function, [])]


def writes_in_place(name: str) -> bool:
    """Return whether the function of this name writes to its first argument."""
    short = bare(name)
    return short[2:-2] in _IN_PLACE if short.startswith("__") else short.endswith("_")


def is_random(name: str) -> bool:
    """Return whether a function draws numbers: the same on any grid, but not serial torch's."""
    return name in _RANDOM or bare(name).removesuffix("_") in _RANDOM


def samples_of(name: str) -> tuple[Sample, ...]:
    """Return the sample calls of a function, which may be listed by another of its names.

    A special entry goes before a general one; one by bare name is of functions with a rule only.
    """
    function = function_of(name)
    for alias in [name, *names()[function]]:
        short = bare(alias)
        for key in (alias, short, short.removesuffix("_")) if function in RULES else (alias,):
            if key in SAMPLES:
                return SAMPLES[key]
    return ()


# The table

X = Operand((3, 4, 5, 7))
SEQUENCE, VOLUME = Operand((3, 4, 9)), Operand((3, 4, 5, 7, 6))
UNIT = Operand(X.shape, _unit)
ABOVE = Operand(X.shape, _above)
INTEGERS = Operand(X.shape, _integers)
BOOLEANS = Operand(X.shape, _booleans)
COMPLEX = Operand(X.shape, _complex)
NUMBER, WHOLE_NUMBER = Operand((), _unit), Operand((), _integers)
CHANNELS = Operand((4,), plain=True)
POSITIVE_CHANNELS = Operand((4,), _unit, plain=True)
LABELS = Operand((3, 5, 7), _integers)
ROWS, COLUMNS = Operand((5, 7)), Operand((7, 4))
BATCHES = Operand((3, 5, 7)), Operand((3, 7, 4))
BIAS = Operand((6,), plain=True)
MATRICES = Operand((3, 4, 4), _regular)
HALVES, STATE = Operand((3, 2, 5, 7)), Operand((5, 3))
SEQUENCES, BEGUN = Operand((4, 5, 7)), Operand((1, 5, 3))
VECTOR = Operand((7,))
SIGNS, LABEL_ROW = Operand(X.shape, _signs), Operand((5,), _integers)
LABEL_VECTOR = Operand((9,), _integers)
GAPS = Operand(X.shape, _with_gaps)
PAIRS = Operand((3, 4, 5, 2))
COUNTS = Operand((5,), _integers, plain=True)
POSITIONS = Operand((6,), _integers, plain=True)
PERMUTED = Operand((3,), _different, plain=True)
SLICES = Operand((3, 6, 5, 7))
QUANTILES = Operand((2,), _unit, plain=True)
BOUNDARIES, SORTED = Operand((4,), _ascending, plain=True), Operand((3, 7), _ascending)
DIM = Dim(1)

PLANES = {1: SEQUENCE, 2: X, 3: VOLUME}

Table = dict[str, tuple[Sample, ...]]


def of(*args: Any, through: Callable[..., Any] | None = None, **kwargs: Any) -> Sample:
    return Sample(args, MappingProxyType(kwargs), through)


def _each(words: str, *samples: Sample) -> Table:
    return dict.fromkeys(words.split(), samples)


def _dunders(words: str, *samples: Sample) -> Table:
    return {f"__{word}__": samples for word in words.split()}


def _of_any_rank(name: str, make: Callable[[int, Operand], tuple[Sample, ...]]) -> Table:
    """Return the 1-, 2- and 3-dimensional forms of a function; {} stands for the number."""
    return {name.format(n): make(n, plane) for n, plane in PLANES.items()}


def _undifferentiated(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a function, for which serial torch lacks gradients of some argument, without them."""
    args = tuple(a.detach().clone() if isinstance(a, Tensor) else a for a in args)
    return function(*args, **kwargs)


def _spectral(function: Any, x: Tensor, *args: Any, window: Any = None, **named: Any) -> Tensor:
    window = torch.ones(8, dtype=torch.float64) if window is None else window
    return function(torch.complex(x, x.sin()), *args, window=window, **named)


def _counted(function: Any, x: Tensor, p: Tensor) -> Tensor:
    return function(2 + x.detach(), p.detach())


def _with_constant_target(function: Any, x: Tensor, target: Tensor) -> Any:
    return function(x, target.detach(), reduction="sum")


def _symmetric(function: Any, x: Tensor) -> Any:
    return function(x + x.mT)


def _singular_vectors(function: Any, x: Tensor) -> Tensor:
    """Return U S^(1/2) V^T, as singular vectors are only unique up to their signs."""
    u, values, v = function(x)
    return u * values.unsqueeze(-2).sqrt() @ (v.mT if function is not torch.linalg.svd else v)


def _eigenvectors(function: Any, x: Tensor) -> Tensor:
    """Return a function of the matrix from eigenvectors, which are only unique up to a factor."""
    values, vectors = function(x)
    return vectors * values.sin().unsqueeze(-2) @ torch.linalg.inv(vectors)


def _lu_solved(function: Any, b: Tensor, x: Tensor) -> Tensor:
    return function(b, *torch.linalg.lu_factor(x))


def _lu_solved_first(function: Any, b: Tensor, x: Tensor) -> Tensor:
    return function(*torch.linalg.lu_factor(x), b)


def _lu_unpacked(function: Any, x: Tensor) -> Any:
    return function(*torch.linalg.lu_factor(x))


def _ldl_solved(function: Any, b: Tensor, x: Tensor) -> Tensor:
    factors, pivots = torch.linalg.ldl_factor((x + x.mT).detach())
    return function(factors, pivots, b.detach())


def _convolution(n: int, plane: Operand) -> tuple[Sample, ...]:
    weight = Operand((6, 4, *(3,) * n), plain=True)
    return (of(plane, weight, Operand((6,), plain=True), padding=1), of(plane, weight, stride=2))


def _transposed(n: int, plane: Operand) -> tuple[Sample, ...]:
    weight = Operand((4, 6, *(3,) * n), plain=True)
    return (of(plane, weight, Operand((6,), plain=True), stride=2, padding=1),)


def _unpooled(n: int, plane: Operand) -> tuple[Sample, ...]:
    pool: Any = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[n - 1]

    def through(function: Any, x: Tensor) -> Any:
        values, indices = pool(x, 2, return_indices=True)
        return function(values, indices, 2, output_size=x.shape[2:])

    return (of(plane, through=through), of(plane, Operand(plane.shape, _in_place), 1))


def _backward(function: Any, x: Tensor) -> Tensor | None:
    function(x.sin().sum())
    gradient, x.grad = x.grad, None
    return gradient


def _backward_method(_: Any, x: Tensor) -> Tensor | None:
    return _backward(lambda loss: loss.backward(), x)


def _hooked(function: Any, x: Tensor) -> Tensor:
    y = x.sin()
    function(y, lambda gradient: 2 * gradient)
    return y


def _hooked_leaf(function: Any, x: Tensor) -> Any:
    found: list[Any] = []
    function(x, lambda leaf: found.append(leaf.grad))
    x.sin().sum().backward()
    x.grad = None
    return found[0]


def _retained(function: Any, x: Tensor) -> Tensor | None:
    y = x.sin()
    function(y)
    y.exp().sum().backward()
    x.grad = None
    return y.grad


def _gates(rows: int) -> tuple[Operand, ...]:
    """Return the weights and biases of a recurrent layer of 7 features and a state of 3."""
    return tuple(Operand(shape, plain=True) for shape in ((rows, 7), (rows, 3), (rows,), (rows,)))


def _assigned(_: Any, x: Tensor, *arguments: Any) -> Tensor:
    x = x.clone()
    x.__setitem__(*arguments)
    return x


def _of_a_copy(function: Any, x: Tensor, *args: Any) -> Tensor:
    x = x.clone()
    function(x, *args)
    return x


def _asserted(function: Any, x: Tensor, message: str) -> Tensor:
    function((x == x).all(), message)
    return x


_IN_PLACE = "iadd isub imul itruediv ifloordiv imod ipow iand ior ixor ilshift irshift idiv".split()

_POINTWISE: Table = {
    **_each(
        """
        abs absolute acos angle arccos arcsin arcsinh arctan arctanh asin asinh atan atanh bfloat16
        bool byte ceil celu char clone conj conj_physical cos cosh cpu data deg2rad detach digamma
        double elu entr erf erfc erfcx erfinv exp exp2 expit expm1 fix float floor frac gelu
        half hardshrink hardsigmoid hardswish hardtanh i0 i0e i1 i1e int isfinite isinf isnan
        isneginf isposinf isreal leaky_relu lgamma log log10 log1p log2 log_ndtr logical_not logit
        logsigmoid long mish nan_to_num ndtr ndtri neg negative ones_like positive psi rad2deg
        reciprocal relu relu6 resolve_conj resolve_neg round rsqrt selu sgn short sigmoid sign
        signbit silu sin sinc sinh softplus softshrink softsign sqrt square tan tanh tanhshrink
        trunc type zero zeros_like contiguous is_contiguous cdouble cfloat gammaln
        """,
        of(UNIT),
    ),
    **_each("acosh arccosh", of(ABOVE)),
    **_each("_standard_gamma_grad", of(ABOVE, ABOVE, through=_undifferentiated)),
    **_each(
        "_dirichlet_grad", of(UNIT, ABOVE, Operand(X.shape, _large), through=_undifferentiated)
    ),
    **_each("real imag", of(COMPLEX)),
    **_each(
        """
        add atan2 arctan2 copy copysign div divide eq float_power fmax fmin fmod ge
        greater greater_equal gt hypot isclose le less less_equal logaddexp logaddexp2 logical_and
        logical_or logical_xor lt maximum minimum mul multiply ne not_equal pow remainder rsub sub
        subtract true_divide xlog1py xlogy
        """,
        of(UNIT, UNIT),
    ),
    **_each("acosh_ arccosh_", of(ABOVE, through=_undifferentiated)),
    **_each("arcsinh_ arctanh_ asinh_ atanh_", of(UNIT, through=_undifferentiated)),
    **_each(
        "floor_divide __floordiv__ __rfloordiv__ __ifloordiv__ heaviside igamma igammac nextafter",
        of(UNIT, UNIT, through=_undifferentiated),
    ),
    **_each("zeta", of(ABOVE, UNIT, through=_undifferentiated)),
    **_each(
        "bitwise_and bitwise_left_shift bitwise_or bitwise_right_shift bitwise_xor gcd lcm",
        of(INTEGERS, INTEGERS),
    ),
    **_each("bitwise_not", of(INTEGERS)),
    **_each("addcdiv addcmul lerp", of(UNIT, UNIT, UNIT)),
    **_each("clamp clip", of(X, -0.5, 0.5)),
    **_each("clamp_max clamp_min", of(X, 0.3), of(X, X)),
    **_each("fill full_like", of(X, 2.5)),
    **_each("ldexp", of(X, INTEGERS)),
    **_each("masked_fill", of(X, BOOLEANS, 2.5)),
    **_each("mvlgamma multigammaln", of(ABOVE, 1)),
    **_each("complex polar", of(UNIT, UNIT)),
    **_each("chalf", of(UNIT, through=lambda function, x: function(x).to(torch.complex64))),
    **_each(
        """
        airy_ai bessel_j0 bessel_j1 bessel_y0 bessel_y1 modified_bessel_i0 modified_bessel_i1
        modified_bessel_k0 modified_bessel_k1 scaled_modified_bessel_k0 scaled_modified_bessel_k1
        spherical_bessel_j0
        """,
        of(UNIT, through=_undifferentiated),
    ),
    **_each(
        """
        chebyshev_polynomial_t chebyshev_polynomial_u chebyshev_polynomial_v chebyshev_polynomial_w
        gammainc gammaincc hermite_polynomial_h hermite_polynomial_he laguerre_polynomial_l
        legendre_polynomial_p shifted_chebyshev_polynomial_t shifted_chebyshev_polynomial_u
        shifted_chebyshev_polynomial_v shifted_chebyshev_polynomial_w
        """,
        of(UNIT, ABOVE, through=_undifferentiated),
    ),
    **_each("polygamma", of(1, UNIT)),
    **_each("torch.Tensor.polygamma polygamma_", of(UNIT, 1)),
    **_each("prelu", of(X, CHANNELS)),
    **_each("threshold", of(X, 0.1, 2.5)),
    **_each("to", of(X, torch.float32)),
    **_each("type_as", of(X, Operand(X.shape, _single))),
    **_each("where", of(BOOLEANS, X, X)),
    **_each("torch.Tensor.where", of(X, BOOLEANS, X)),
    **_each("new_zeros new_ones", of(X, (3, 4, 5, 2)), of(X, 2)),
    **_each("new", of(X, through=lambda function, x: function(x, 3, 4, 5, 2).zero_())),
    **_each("new_full", of(X, (3, 4, 5, 2), 2.5)),
    **_each("new_empty", of(X, through=lambda function, x: function(x, 3, 4, 5, 2).zero_())),
    **_each("torch.embedding", of(Operand((5, 3), plain=True), INTEGERS)),
    **_each("new_tensor", of(X, ((1, 2), (3, 4)))),
    **_each("embedding", of(INTEGERS, Operand((5, 3), plain=True), 1)),
    **_each("empty_like", of(X, through=lambda function, x: function(x).zero_())),
    **_dunders(
        """
        add radd iadd sub rsub isub mul rmul imul truediv rtruediv itruediv mod
        rmod imod pow rpow ipow eq ne lt le gt ge
        """,
        of(UNIT, UNIT),
    ),
    **_dunders(
        "and rand iand or ror ior xor rxor ixor lshift rlshift ilshift rshift rrshift irshift",
        of(INTEGERS, INTEGERS),
    ),
    **_dunders("invert", of(INTEGERS)),
}

_REDUCTIONS: Table = {
    **_each("sum mean var std var_mean std_mean", of(X), of(X, DIM), of(X, (0, 2))),
    **_each("amax amin", of(X, DIM), of(X, (0, 2))),
    **_each("max min", of(X), of(X, DIM), of(X, X)),
    **_each("prod argmax argmin", of(X), of(X, DIM)),
    **_each("all any", of(BOOLEANS), of(BOOLEANS, DIM)),
    **_each("logsumexp", of(X, DIM), of(X, (0, 2))),
    **_each("norm vector_norm", of(X), of(X, 3, DIM)),
    **_each("normalize", of(X)),
    **_each("cosine_similarity", of(X, X)),
    **_each(
        """
        softmax log_softmax softmin cumsum cumprod cummax cummin logcumsumexp sort argsort glu
        """,
        of(X, DIM),
    ),
    **_each("topk", of(X, 2, DIM)),
    **_each("count_nonzero", of(INTEGERS), of(INTEGERS, DIM)),
    **_each("nansum nanmean", of(GAPS), of(GAPS, DIM), of(GAPS, (0, 2), keepdim=True)),
    **_each("histc", of(X, 4, -1, 1)),
    **_each("histogram", of(X, 5, through=_undifferentiated)),
    **_each(
        "torch.histogram",
        of(X, 4, range=(-1, 1), density=True, through=_undifferentiated),
        of(X, BOUNDARIES, through=_undifferentiated),
    ),
    **_each(
        "bincount",
        of(LABEL_VECTOR),
        of(LABEL_VECTOR, Operand((9,), _unit), 7, through=_undifferentiated),
    ),
    **_each("median nanmedian", of(X), of(X, DIM)),
    **_each("mode", of(INTEGERS, DIM)),
    **_each("kthvalue", of(X, 2, DIM)),
    **_each("quantile nanquantile", of(X, 0.3), of(X, QUANTILES, 1, keepdim=True)),
    **_each("aminmax", of(X), of(X, dim=1, keepdim=True)),
    **_each("dist", of(X, X), of(X, X, 3)),
    **_each("diff", of(X, 2), of(X, 1, DIM, Operand((3, 2, 5, 7)))),
    **_each(
        "torch.gradient",
        of(X),
        of(X, spacing=0.5, dim=2),
        of(X, dim=(1, 3), spacing=[2.0, 3.0], edge_order=2),
    ),
    **_each("trapezoid trapz", of(X, dx=0.5, dim=1), of(X, VECTOR), of(X, X, dim=2)),
    **_each("cumulative_trapezoid", of(X, dx=0.5, dim=1), of(X, VECTOR)),
    **_each("frexp", of(X, through=_undifferentiated)),
    **_each("renorm", of(X, 2, DIM, 3.0)),
    **_each("pairwise_distance", of(ROWS, ROWS), of(X, X, 1.0, keepdim=True)),
    **_each("cdist", of(X, Operand((3, 4, 6, 7)))),
    **_each("pdist", of(ROWS)),
    **_each("isin", of(INTEGERS, Operand((2,), _integers, plain=True))),
    **_each("bucketize", of(X, BOUNDARIES)),
    **_each("searchsorted", of(BOUNDARIES, X), of(SORTED, SORTED, right=True)),
}

_PRODUCTS: Table = {
    **_each("matmul __matmul__", of(X, Operand((3, 4, 7, 6))), of(X, Operand((7, 6), plain=True))),
    **_each("__rmatmul__", of(COLUMNS, ROWS)),
    **_each("mm", of(ROWS, COLUMNS)),
    **_each("bmm", of(*BATCHES)),
    **_each("mv", of(ROWS, Operand((7,)))),
    **_each(
        "addmm", of(Operand((5, 4)), ROWS, COLUMNS, beta=2, alpha=3), of(NUMBER, ROWS, COLUMNS)
    ),
    **_each("addmv", of(Operand((5,)), ROWS, Operand((7,)), alpha=0.5)),
    **_each("baddbmm", of(Operand((3, 5, 4)), *BATCHES)),
    **_each("addbmm", of(Operand((5, 4)), *BATCHES, beta=0)),
    **_each("dot", of(Operand((7,)), Operand((7,)))),
    **_each("outer ger", of(Operand((5,)), Operand((7,)))),
    **_each("addr", of(Operand((5, 7)), Operand((5,)), VECTOR, beta=2, alpha=3)),
    **_each("addmm_", of(Operand((5, 4)), ROWS, COLUMNS, beta=2, alpha=3)),
    **_each("einsum", of("bchw,ck->bkhw", X, Operand((4, 6), plain=True))),
    **_each("linear", of(X, Operand((6, 7), plain=True), Operand((6,), plain=True))),
    **_each(
        "scaled_dot_product_attention",
        of(X, X, X),
        of(X, HALVES, HALVES, enable_gqa=True),
    ),
    **_each("lstm_cell", of(ROWS, [STATE, STATE], *_gates(12))),
    **_each("gru_cell", of(ROWS, STATE, *_gates(9))),
    **_each("rnn_tanh_cell rnn_relu_cell", of(ROWS, STATE, *_gates(3))),
    **_each("lstm", of(SEQUENCES, [BEGUN, BEGUN], [*_gates(12)], True, 1, 0.0, True, False, False)),
    **_each("gru", of(SEQUENCES, BEGUN, [*_gates(9)], True, 1, 0.0, True, False, False)),
    **_each(
        "rnn_tanh rnn_relu", of(SEQUENCES, BEGUN, [*_gates(3)], True, 1, 0.0, True, False, False)
    ),
    **_each("bilinear", of(ROWS, Operand((5, 4)), Operand((6, 7, 4), plain=True), BIAS)),
}

_LINEAR_ALGEBRA: Table = {
    **_each(
        """
        cond cholesky_inverse det eigvals inv inverse inv_ex lu lu_factor
        lu_factor_ex logdet matrix_exp pinv pinverse qr slogdet svdvals tensorinv
        """,
        of(MATRICES),
    ),
    **_each("tensorinv", of(Operand((2, 3, 6)), 2)),
    **_each("cholesky cholesky_ex eigh eigvalsh", of(MATRICES, through=_symmetric)),
    **_each("svd", of(MATRICES, through=_singular_vectors)),
    **_each("eig", of(MATRICES, through=_eigenvectors)),
    **_each("matrix_rank ldl_factor ldl_factor_ex", of(MATRICES, through=_undifferentiated)),
    **_each("matrix_power", of(MATRICES, 3)),
    **_each(
        "solve solve_ex",
        of(MATRICES, Operand((3, 4, 2))),
        of(MATRICES, Operand((3, 4))),
        of(MATRICES, Operand((4,), plain=True)),
    ),
    **_each("solve_triangular", of(MATRICES, Operand((3, 4, 2)), upper=True)),
    **_each("triangular_solve", of(Operand((3, 4, 2)), MATRICES)),
    **_each("cholesky_solve", of(Operand((3, 4, 2)), MATRICES)),
    **_each("torch.lu_solve lu_solve", of(Operand((3, 4, 2)), MATRICES, through=_lu_solved)),
    **_each("torch.linalg.lu_solve", of(Operand((3, 4, 2)), MATRICES, through=_lu_solved_first)),
    **_each("ldl_solve", of(Operand((3, 4, 2)), MATRICES, through=_ldl_solved)),
    **_each("lu_unpack", of(MATRICES, through=_lu_unpacked)),
    **_each("householder_product orgqr", of(MATRICES, Operand((3, 4), _unit))),
    **_each("ormqr", of(MATRICES, Operand((3, 4), _unit), Operand((3, 4, 2)))),
    **_each("torch.linalg.norm", of(X), of(X, 3, DIM), of(X, "fro", (1, 2)), of(ROWS, "nuc")),
    **_each("matrix_norm", of(X), of(X, "nuc", (0, 2))),
    **_each("nuclear_norm", of(ROWS), of(X, (0, 2))),
    **_each("tensorsolve", of(Operand((2, 3, 6)), Operand((2, 3)))),
    **_each("multi_dot", of([ROWS, COLUMNS, Operand((4, 3), plain=True)])),
    **_each("chain_matmul", of(ROWS, COLUMNS, Operand((4, 3)))),
    **_each("vecdot", of(X, X, dim=1), of(COMPLEX, COMPLEX)),
    **_each("vdot", of(Operand((7,), _complex), Operand((7,), _complex))),
    **_each("cross", of(X, X, dim=0)),
    **_each("inner", of(ROWS, Operand((4, 7)))),
    **_each("tensordot", of(X, Operand((7, 5, 2)), ((2, 3), (1, 0))), of(ROWS, COLUMNS, 1)),
    **_each("kron", of(ROWS, Operand((2, 3)))),
    **_each("vander", of(ROWS), of(ROWS, N=3)),
    **_each("cov", of(ROWS), of(ROWS, correction=0, aweights=Operand((7,), _unit, plain=True))),
    **_each("corrcoef", of(ROWS)),
}

_FOURIER: Table = {
    **_each("fft ifft hfft ihfft rfft irfft", of(UNIT, None, DIM), of(X, 4)),
    **_each("fft2 ifft2 hfft2 ihfft2 rfft2 irfft2", of(X)),
    **_each("fftn ifftn hfftn ihfftn rfftn irfftn", of(X, (3, 4)), of(X, None, (0, 2))),
    **_each("fftshift ifftshift", of(X), of(X, DIM)),
    **_each(
        "stft",
        of(Operand((3, 21)), 8, window=Operand((8,), _unit, plain=True), return_complex=True),
    ),
    **_each(
        "istft",
        of(Operand((3, 5, 7)), 8, window=Operand((8,), _unit, plain=True), through=_spectral),
        of(Operand((5, 7)), 8, hop_length=3, through=_spectral),
    ),
}

_SHAPES: Table = {
    **_each("flatten", of(X, 1)),
    **_each("reshape view", of(X, (3, 20, 7))),
    **_each("reshape_as view_as", of(X, Operand((3, 20, 7)))),
    **_each("unflatten", of(X, DIM, (2, 2))),
    **_each("squeeze", of(Operand((3, 1, 5, 7)), DIM)),
    **_each("squeeze_", of(Operand((3, 1, 5, 7)), DIM, through=_of_a_copy)),
    **_each("unsqueeze_", of(X, 1, through=_of_a_copy)),
    **_each("transpose_ swapaxes_ swapdims_", of(X, 1, 3, through=_of_a_copy)),
    **_each("t_", of(ROWS, through=_of_a_copy)),
    **_each("unsqueeze", of(X, 1)),
    **_each("permute", of(X, (0, 2, 3, 1))),
    **_each("transpose swapaxes movedim moveaxis", of(X, 1, 3)),
    **_each("mT", of(X)),
    **_each("t T", of(ROWS)),
    **_each("expand", of(Operand((3, 1, 5, 7)), (3, 4, 5, 7))),
    **_each("flip", of(X, (1, 3))),
    **_each("fliplr flipud __iter__", of(X)),
    **_each("roll", of(X, 2, DIM)),
    **_each("repeat tile", of(X, (1, 2, 1, 2))),
    **_each(
        "__getitem__", of(X, (..., slice(1, None, 2), slice(2, None))), of(X, (slice(None), DIM))
    ),
    **_each(
        "__setitem__",
        of(X, (..., slice(1, None, 2), 2), 2.5, through=_assigned),
        of(X, 0, Operand((4, 5, 7)), through=_assigned),
    ),
    **_each("narrow", of(X, DIM, 1, 2)),
    **_each("select", of(X, DIM, 2)),
    **_each("index_select", of(X, DIM, Operand((6,), _integers, plain=True))),
    **_each("gather", of(X, DIM, INTEGERS)),
    **_each("take_along_dim", of(X, INTEGERS, DIM)),
    **_each("scatter scatter_add", of(X, DIM, INTEGERS, X)),
    **_each("scatter_reduce", of(X, DIM, INTEGERS, X, "sum")),
    **_each(
        "grid_sample",
        of(X, Operand((3, 6, 4, 2), _unit), align_corners=False),
        of(X, Operand((3, 2, 5, 2)), "nearest", "border", True),
        of(VOLUME, Operand((3, 2, 3, 4, 3)), padding_mode="reflection", align_corners=True),
    ),
    **_each(
        "affine_grid",
        of(Operand((3, 2, 3)), (3, 4, 5, 7), align_corners=False),
        of(Operand((3, 3, 4)), (3, 4, 2, 5, 3), align_corners=True),
    ),
    **_each(
        "multi_head_attention_forward",
        of(
            *(Operand((5, 3, 8)), Operand((4, 3, 8)), Operand((4, 3, 8)), 8, 2),
            *(Operand((24, 8), plain=True), Operand((24,), plain=True), None, None, False, 0.0),
            *(Operand((8, 8), plain=True), Operand((8,), plain=True)),
        ),
    ),
    **_each("one_hot", of(INTEGERS, 5), of(INTEGERS)),
    **_each("split chunk", of(X, 3, DIM)),
    **_each("unbind", of(X, DIM)),
    **_each("cat concat concatenate", of([X, X], DIM)),
    **_each("stack", of([X, X], 1)),
    **_each("pad", of(X, (1, 2, 0, 1)), of(X, (1, 2, 0, 1), "reflect")),
    **_each("pixel_shuffle", of(X, 2)),
    **_each("swapdims", of(X, 1, 3)),
    **_each("broadcast_to", of(Operand((3, 1, 5, 7)), (3, 4, 5, 7))),
    **_each("expand_as", of(Operand((3, 1, 5, 7)), X)),
    **_each("sum_to_size", of(X, (4, 1, 7))),
    **_each("ravel __reversed__ to_dense", of(X)),
    **_each("to_dense", of(X, torch.float32)),
    **_each("H", of(ROWS), of(Operand((5, 7), _complex))),
    **_each("mH adjoint", of(X), of(COMPLEX)),
    **_each("atleast_1d atleast_2d atleast_3d", of(X), of(ROWS, Operand((7,)), NUMBER)),
    **_each("rot90", of(X), of(X, -1, (1, 3)), of(X, 2, (0, 2))),
    **_each("channel_shuffle", of(X, 2)),
    **_each("native_channel_shuffle", of(X, 2, through=_undifferentiated)),
    **_each("repeat_interleave", of(X, 2, DIM), of(X, 3), of(ROWS, COUNTS, 0)),
    **_each("constant_pad_nd", of(X, (1, 2, 0, 1), 2.5)),
    **_each("msort", of(X)),
    **_each("unravel_index", of(INTEGERS, (2, 3))),
    **_each("tensor_split", of(X, 3, 3), of(X, (1, 3), DIM)),
    **_each("hsplit", of(X, 2), of(Operand((6,)), (1, 4))),
    **_each("vsplit", of(X, 3)),
    **_each("dsplit", of(X, (1, 3))),
    **_each("split_with_sizes unsafe_split_with_sizes", of(X, (2, 5), 3)),
    **_each("unsafe_split unsafe_chunk", of(X, 3, DIM)),
    **_each("broadcast_tensors", of(ROWS, Operand((3, 1, 7)), Operand((7,), plain=True))),
    **_each("hstack vstack dstack row_stack column_stack", of([X, X]), of([VECTOR, VECTOR])),
    **_each("block_diag", of(ROWS, COLUMNS, VECTOR)),
    **_each("meshgrid", of(VECTOR, Operand((5,)), Operand((4,)), indexing="xy")),
    **_each("cartesian_prod", of(VECTOR, Operand((5,)))),
    **_each("combinations", of(VECTOR, 3)),
    **_each("tril triu", of(X), of(X, -2), of(ROWS, 1)),
    **_each("diagonal", of(X), of(X, 1, 3, 1)),
    **_each("torch.linalg.diagonal", of(X)),
    **_each("diag_embed", of(X), of(X, -1, 0, 2)),
    **_each("diag", of(ROWS), of(VECTOR, 1)),
    **_each("diagflat", of(ROWS)),
    **_each("trace", of(ROWS)),
    **_each("fill_diagonal_", of(Operand((9, 4)), 2.5), of(Operand((9, 4)), 2.5, wrap=True)),
    **_each("torch.Tensor.unfold", of(X, 3, 3, 2), of(X, 1, 2, 1)),
    **_each("view_as_real", of(COMPLEX)),
    **_each("view_as_complex", of(PAIRS)),
    **_each("select_scatter", of(X, Operand((3, 5, 7)), DIM, 2)),
    **_each("slice_scatter", of(X, Operand((3, 4, 5, 3)), 3, 1, 7, 2)),
    **_each("diagonal_scatter", of(X, Operand((3, 5, 4)), 0, 1, 3)),
    **_each("index_fill", of(X, DIM, POSITIONS, 2.5), of(X, DIM, POSITIONS, NUMBER)),
    **_each("index_add", of(X, DIM, POSITIONS, SLICES, alpha=2)),
    **_each("index_copy", of(X, 2, PERMUTED, Operand((3, 4, 3, 7)))),
    **_each(
        "index_put",
        of(X, (BOOLEANS,), NUMBER),
        of(Operand((4, 5, 7)), (COUNTS, COUNTS), Operand((5, 7)), accumulate=True),
    ),
    **_each("put", of(X, PERMUTED, Operand((3,))), of(X, POSITIONS, Operand((6,)), True)),
    **_each("masked_scatter", of(X, BOOLEANS, X), of(X, Operand((7,), _booleans), X)),
    **_each("index_reduce", of(X, DIM, POSITIONS, SLICES, "amax")),
    **_each("take", of(X, INTEGERS)),
    **_each("nonzero argwhere", of(BOOLEANS)),
    **_each("nonzero_static", of(BOOLEANS, size=9)),
    **_each("unique unique_consecutive", of(INTEGERS), of(INTEGERS, return_counts=True, dim=1)),
    **_each("masked_select", of(X, BOOLEANS), of(X, Operand((5, 1), _booleans, plain=True))),
    **_each("alias_copy", of(X)),
    **_each("detach_copy", of(X, through=_undifferentiated)),
    **_each("diagonal_copy", of(X, 1, 3, 1)),
    **_each("expand_copy", of(Operand((3, 1, 5, 7)), (3, 4, 5, 7))),
    **_each("narrow_copy", of(X, DIM, 1, 2)),
    **_each("permute_copy", of(X, (0, 2, 3, 1))),
    **_each("select_copy", of(X, DIM, 2)),
    **_each("slice_copy", of(X, 3, 1, None, 2)),
    **_each("split_copy", of(X, 3, DIM)),
    **_each("split_with_sizes_copy", of(X, (2, 5), 3)),
    **_each("squeeze_copy", of(Operand((3, 1, 5, 7)), DIM)),
    **_each("t_copy", of(ROWS)),
    **_each("transpose_copy", of(X, 1, 3)),
    **_each("unbind_copy", of(X, DIM)),
    **_each("unfold_copy", of(X, 3, 3, 2)),
    **_each("unsqueeze_copy", of(X, 1)),
    **_each("view_copy", of(X, (3, 20, 7))),
    **_each("view_as_real_copy", of(COMPLEX)),
    **_each("view_as_complex_copy", of(PAIRS, through=_undifferentiated)),
    **_each("pixel_unshuffle", of(Operand((3, 4, 6, 10)), 2)),
}

_PLANES: Table = {
    **_of_any_rank("conv{}d", _convolution),
    **_of_any_rank("conv_transpose{}d", _transposed),
    **_of_any_rank("max_pool{}d", lambda n, x: (of(x, 3, 2, 1),)),
    **_of_any_rank("max_pool{}d_with_indices", lambda n, x: (of(x, 3, 2, 1),)),
    **_of_any_rank("max_unpool{}d", _unpooled),
    **_of_any_rank("avg_pool{}d", lambda n, x: (of(x, 3, 2, 1),)),
    **_of_any_rank("lp_pool{}d", lambda n, x: (of(Operand(x.shape, _unit), 2, 3, 2),)),
    **_of_any_rank("adaptive_avg_pool{}d", lambda n, x: (of(x, 1), of(x, 3))),
    **_of_any_rank("adaptive_max_pool{}d", lambda n, x: (of(x, 1), of(x, 3))),
    **_of_any_rank("adaptive_max_pool{}d_with_indices", lambda n, x: (of(x, 3),)),
    **_each("unfold", of(X, 3, padding=1)),
    **_each("fold", of(Operand((3, 16, 20)), (5, 6), 2)),
    **_each("interpolate", of(X, scale_factor=2), of(X, (9, 4), mode="bilinear")),
    **_each("upsample", of(X, scale_factor=2)),
}

_NORMS: Table = {
    **_each(
        "batch_norm",
        of(X, None, None, CHANNELS, CHANNELS, True),
        of(
            *(X, CHANNELS, POSITIVE_CHANNELS),
            through=lambda function, x, *running: function(x, *(r.detach() for r in running)),
        ),
    ),
    **_each("torch.batch_norm", of(X, CHANNELS, CHANNELS, None, None, True, 0.1, 1e-5, False)),
    **_each("torch.instance_norm", of(X, CHANNELS, CHANNELS, None, None, True, 0.1, 1e-5, False)),
    **_each("group_norm", of(X, 2, CHANNELS, CHANNELS)),
    **_each("instance_norm", of(X, weight=CHANNELS, bias=CHANNELS)),
    **_each("layer_norm rms_norm", of(X, (5, 7), Operand((5, 7), plain=True))),
    **_each("local_response_norm", of(X, 3)),
}

_LOSSES: Table = {
    **_each("mse_loss l1_loss smooth_l1_loss huber_loss", of(X, X), of(X, X, reduction="none")),
    **_each("binary_cross_entropy kl_div", of(UNIT, UNIT)),
    **_each("binary_cross_entropy_with_logits", of(X, UNIT)),
    **_each("cross_entropy nll_loss", of(X, LABELS)),
    **_each("gaussian_nll_loss", of(X, X, UNIT)),
    **_each("torch.kl_div", of(UNIT, UNIT)),
    **_each("torch.binary_cross_entropy_with_logits", of(X, UNIT), of(X, UNIT, None, None, 2)),
    **_each("cosine_embedding_loss", of(ROWS, ROWS, Operand((5,), _signs), 0.1)),
    **_each("torch.nn.functional.hinge_embedding_loss", of(X, SIGNS, reduction="none")),
    **_each("hinge_embedding_loss", of(X, SIGNS)),
    **_each("margin_ranking_loss", of(X, X, SIGNS, 0.5)),
    **_each("poisson_nll_loss", of(X, ABOVE), of(UNIT, ABOVE, False, True)),
    **_each("torch.poisson_nll_loss", of(X, ABOVE, True, True, 1e-8, 1)),
    **_each("soft_margin_loss", of(X, SIGNS, through=_with_constant_target)),
    **_each("multilabel_soft_margin_loss", of(X, UNIT, Operand((7,), _unit, plain=True))),
    **_each("multi_margin_loss", of(ROWS, LABEL_ROW, 2), of(VECTOR, WHOLE_NUMBER)),
    **_each(
        "multilabel_margin_loss",
        of(ROWS, Operand((5, 7), _label_sets), reduction="none"),
        of(VECTOR, Operand((7,), _label_sets)),
    ),
    **_each("triplet_margin_loss", of(X, X, X), of(ROWS, ROWS, ROWS, 2.0, 1, swap=True)),
    **_each("torch.triplet_margin_loss", of(X, X, X, 2.0)),
    **_each("triplet_margin_with_distance_loss", of(X, X, X), of(ROWS, ROWS, ROWS, swap=True)),
}


def _pickled(function: Any, x: Tensor, protocol: int) -> Tensor:
    """Return a value times the plain one that its pickle gives."""
    make, arguments = function(x, protocol)[:2]
    made: Tensor = make(*arguments)
    return x * made.detach()


_TO_PYTHON: Table = {
    **_each("equal", of(X, X), of(INTEGERS, INTEGERS)),
    **_each("allclose", of(X, X), of(X, X, 0.1, 100.0)),
    **_each("is_same_size", of(X, ROWS)),
    **_each("is_nonzero", of(NUMBER)),
    **_each("_is_all_true _is_any_true", of(BOOLEANS)),
    **_each("_assert_async", of(NUMBER, "is 0", through=_asserted)),
    **_each("is_conj is_neg", of(COMPLEX)),
    **_each("stride", of(X, through=lambda f, x: x * sum(f(x)))),
    **_dunders("reduce_ex", of(NUMBER, 2, through=_pickled)),
    **_each("item", of(NUMBER)),
    **_each("tolist numpy __array__", of(INTEGERS)),
    **_dunders("contains", of(INTEGERS, 2)),
    **_dunders("float complex bool", of(NUMBER)),
    **_dunders("int index", of(WHOLE_NUMBER)),
    **_dunders("format", of(WHOLE_NUMBER, "")),
}

_RANDOM: Table = {
    **_each("torch.dropout torch.alpha_dropout torch.feature_alpha_dropout", of(X, 0.5, True)),
    **_each("torch.feature_dropout", of(X, 0.5, True)),
    **_each("exponential cauchy log_normal", of(X)),
    **_each("geometric", of(X, 0.3)),
    **_each("rrelu", of(X, training=True)),
    **_each("gumbel_softmax", of(X, 0.5), of(X, hard=True, dim=1)),
    **_each("dropout dropout2d alpha_dropout feature_alpha_dropout", of(X)),
    **_each("dropout1d", of(SEQUENCE)),
    **_each("dropout3d", of(VOLUME)),
    **_each("rand_like randn_like normal uniform kaiming_uniform", of(X)),
    **_each("randint_like", of(X, 5)),
    **_each("bernoulli", of(UNIT)),
    **_each("random", of(X), of(X, 7), of(X, -3, 2**40)),
    **_each("torch.normal", of(X, UNIT), of(ROWS, Operand((7,), _unit, plain=True)), of(X, 0.5)),
    **_each("poisson _standard_gamma _sample_dirichlet", of(ABOVE)),
    **_each("multinomial", of(Operand((5, 7), _unit), 3), of(Operand((7,), _unit), 9, True)),
    **_each("binomial", of(Operand(X.shape, _signs), UNIT, through=_counted)),
}

_AUTOGRAD: Table = {
    **_each("torch.autograd.backward", of(X, through=_backward)),
    **_each("torch.autograd.grad", of(X, through=lambda grad, x: grad(x.sin().sum(), x))),
    **_each("register_hook", of(X, through=_hooked)),
    **_each("register_post_accumulate_grad_hook", of(X, through=_hooked_leaf)),
    **_each("retain_grad", of(X, through=_retained)),
    **_each("retains_grad", of(X)),
    **_each("__deepcopy__", of(X, {})),
}

_COMPOSED: Table = {
    **_each("torch.Tensor.backward torch.Tensor.grad", of(X, through=_backward_method)),
    **_each("torch.Tensor.__div__ torch.Tensor.__idiv__", of(UNIT, UNIT)),
    **_each("torch.Tensor.__nonzero__", of(NUMBER)),
    **_each("torch.Tensor.__long__", of(WHOLE_NUMBER)),
}
"""Functions without a rule of their own, which torch or DistTensor composes of others."""

SAMPLES: Table = {
    **_POINTWISE,
    **_REDUCTIONS,
    **_PRODUCTS,
    **_LINEAR_ALGEBRA,
    **_FOURIER,
    **_SHAPES,
    **_PLANES,
    **_NORMS,
    **_LOSSES,
    **_TO_PYTHON,
    **_RANDOM,
    **_each("torch.nn.init.constant_", of(X, 2.5)),
    **_AUTOGRAD,
    **_COMPOSED,
}
