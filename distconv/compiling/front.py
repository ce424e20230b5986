"""The front end of `compile`: Dynamo traces the serial program and guards the values that it reads.

Dynamo, the front end of torch.compile, runs the program on stand-ins: plain tensors of the global
shapes, without memory, which replace the DistTensors. Dynamo returns a graph of torch's functions,
with guards for every Python value that the program has read. If the guards of a graph hold in a
call, the graph is traced or replayed on the call's DistTensors (`replay`). A call of which Dynamo
cannot make a single graph runs uncompiled.
"""

from __future__ import annotations

import os
import random
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import cache, lru_cache, partial, update_wrapper
from itertools import zip_longest
from random import Random
from types import FunctionType, MethodType
from typing import Any, Generic, NamedTuple, NoReturn, ParamSpec, TypeVar, overload
from weakref import WeakMethod, ref
from zlib import crc32

import torch
from torch import Tensor, fx, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from distconv.compiling.replay import ReplayCase, is_expanded, key_of
from distconv.grid.interface import Grid
from distconv.grid.journal import DivergenceError
from distconv.grid.words import by_ranks, user_line
from distconv.model.gradient_reduction import GradientReduction, reductions_used
from distconv.model.layouts import redistributed_node
from distconv.tensor.base import replaced, shards_of, tensors_in
from distconv.tensor.dispatch import SerialTrace, UnsupportedOperation
from distconv.tensor.dist_tensor import DistTensor
from distconv.torch_private import guard_exactly, is_fake, unknown_in_graph

Given = ParamSpec("Given")
Result = TypeVar("Result")

MOST_CASES = 16
"""The most cases of a compiled program, such as layouts of its arguments, that are replayed."""

_OPTIMIZER = """\
compile: the function calls the step of an optimizer ({}, at {}). Compile the computation of the \
loss only, and call the step outside:

    @distconv.compile
    def loss_of(x, y):
        return F.mse_loss(model(x), y)

    loss = loss_of(x, y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()"""


@overload
def compile(program: nn.Module, *, backend: str | None = None) -> Any: ...


@overload
def compile(
    program: Callable[Given, Result], *, backend: str | None = None
) -> Compiled[Given, Result]: ...


def compile(program: Callable[..., Any], *, backend: str | None = None) -> Any:
    """Return `program`, a module or a function, compiled: its calls are traced and replayed.

    The program computes tensors, such as outputs or a loss, from arguments of which at least one is
    a DistTensor, also in lists, tuples and dictionaries. Call the result instead of `program`, on
    all ranks of the grid together. Results have the same bits, and so have gradients after
    `backward()`. Optimizers step outside.

    torch.compile's front end traces the serial program, and guards the Python values that the
    program reads: if a value changes, the program is traced again. The first call with given values
    and layouts runs eagerly, the second is traced, and later calls are replays, forward and
    backward, without Python between the kernels. On GPUs replays are device graphs, messages by
    NCCL included, where the carrier and the program allow it.

    A program that the front end cannot trace as a single graph, because it reads elements of a
    tensor (`loss.item()`) or prints, runs uncompiled, and warns once with the reason.

    For a module the result is a module with the same attributes, parameters, modes and states.
    `torch.compile(program, backend="distconv")` returns the same.

    The result has these attributes of its own:

    - `replays`: the number of replayed calls.
    - `source`: the Python source of the replayed functions, on this rank's blocks.
    - `graph`: the latest graph of the serial program, a `torch.fx.Graph`; None before the first.

    Parameters
    ----------
    program: a function or a module.
    backend: a backend of torch.compile, such as "inductor", which fuses the calls between messages
        into fewer kernels. Compiling takes about a minute, and results are equal to rounding. None
        replays the recorded calls.

    Raises
    ------
    ValueError
        For an unknown backend.
    RuntimeError
        On all ranks, when an optimizer steps within a call.
    DivergenceError
        On all ranks, when ranks replay or compile different programs.

    Examples
    --------
    >>> grid = dc.ProcessGrid(height=2)
    >>> model = dc.parallelize(nn.Conv2d(1, 1, 3, padding=1), grid)
    >>> compiled = dc.compile(model)
    >>> for _ in range(4):
    ...     compiled(dc.distribute_tensor(torch.ones(1, 1, 8, 8), grid)).sum().backward()
    >>> compiled.replays
    2
    """
    if backend is not None and backend not in torch.compiler.list_backends(exclude_tags=()):
        known = ", ".join(map(repr, torch.compiler.list_backends()))
        raise ValueError(
            f"compile: backend={backend!r} is unknown; choose None to replay the calls without "
            f"another compiler, one of {known}, or a backend registered with torch.compile"
        )
    if not isinstance(program, nn.Module):
        return Compiled(program, backend)
    kind: Any = type(program)
    own: Any = type(kind.__name__, (_CompiledModule, kind), {"__module__": kind.__module__})
    own._orig_mod, own._compiled = program, Compiled(program, backend)
    made = own.__new__(own)
    made.__dict__ = program.__dict__
    return made


class Compiled(Generic[Given, Result]):
    """A compiled program, the result of `compile` for a function.

    Attributes
    ----------
    replays: the number of replayed calls.
    """

    def __init__(self, program: Callable[Given, Result], backend: str | None = None) -> None:
        self._program, self._backend = program, backend
        self._graphs: list[_Graph] = []
        self._former: list[_Graph] = []
        self._front: Callable[..., Any] | None = None
        self._made = self._forgotten = 0
        """The number of cases so far, and the number of times that all graphs were discarded."""
        self._watched: dict[int, tuple[Any, list[Any]]] = {}
        """Objects that Dynamo does not guard fully, by id, each with its names or items."""
        self._uncompiled: dict[Any, str] = {}
        """The kinds of calls that run uncompiled, each with the reason."""
        self._warned: set[str] = set()
        self._call: _Call | None = None
        self.replays = 0
        self._name = getattr(program, "__qualname__", type(program).__name__)
        if not isinstance(program, nn.Module):
            update_wrapper(self, program)

    def __reduce__(self) -> Any:
        return Compiled, (self._program, self._backend)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else MethodType(self, instance)

    @property
    def source(self) -> str:
        """Return the Python source of all replayed functions."""
        cases = (case for graph in self._graphs for case in graph.cases.values())
        return "\n\n".join(case.source for case in cases if case.source)

    @property
    def graph(self) -> fx.Graph | None:
        """Return the latest graph of the serial program, or None."""
        return self._graphs[-1].module.graph if self._graphs else None

    def __call__(self, *args: Given.args, **kwargs: Given.kwargs) -> Result:
        """Run the program: replay the call if it belongs to a known case. Collective."""
        if torch.compiler.is_dynamo_compiling():
            return self._program(*args, **kwargs)
        tensors = {id(x): x for x in tensors_in(args, kwargs) if isinstance(x, DistTensor)}
        if not tensors:
            self._warn(_RUNS, "none of its arguments is a DistTensor")
            return self._as_it_is(args, kwargs)
        call = _Call([*tensors.values()], getattr(self._program, "training", None))
        why = self._uncompiled.get(call.kind) or _why_as_it_is(call.tensors)
        if not why:
            slots = {x: _Argument(number) for number, x in enumerate(tensors)}
            try:
                return self._by_front(call, replaced((args, kwargs), slots))
            except _RunUncompiled as reason:
                why = str(reason)
            except Exception as error:
                if call.agreed:
                    raise
                call.stays, why = True, _in_words(error)
        if not call.agreed:
            self._agree(call, _AS_IT_IS, f"it runs uncompiled: {why}")
        if call.stays:
            self._uncompiled[call.kind] = why
        with reductions_used() as reductions:
            result = self._as_it_is(args, kwargs)
        if why and call.grid.rank == 0:
            sharded = "its weights are sharded (shard_parameters=True, shard=)"
            self._warn(_RUNS, sharded if any(r.is_of_shards for r in reductions) else why)
        if call.begins is not None:
            call.begins.begin(call.inputs, reductions, self._made, self._backend)
            self._made += 1
        return result

    def _by_front(self, call: _Call, given: Any) -> Any:
        """Return a call's result by Dynamo's code, which is traced first if no guards hold."""
        if any(map(_differs, self._watched.values())):
            self._former, self._graphs, self._front = self._graphs, [], None
            self._watched.clear()
            self._forgotten += 1
        if self._forgotten > MOST_CASES:
            raise _RunUncompiled("it reads classes or dictionaries that change too often")
        if self._front is None:
            self._front = _front_of(self._program, _weakly(self._compile), _weakly(self._watch))
        before, self._call, drawn = self._call, call, random.getstate()
        try:
            SerialTrace.under_way = True
            result = self._front(*given, call.stand_ins)
        except _RunUncompiled:
            random.setstate(drawn)
            raise
        finally:
            SerialTrace.under_way, self._call = False, before
        if not call.agreed:
            self._agree(call, _NOTHING, "it does not compute with tensors")
        return result

    def _compile(self, module: fx.GraphModule, _: Any) -> Callable[..., Any]:
        """Register a graph that Dynamo has traced; return the function that runs the graph."""
        graph = _Graph(module)
        for former in self._former:
            if graph.is_like(former):  # what has changed was no value that the program reads
                graph.cases, graph.reductions = former.cases, former.reductions
        self._graphs.append(graph)
        return _weakly(self._run, graph)

    def _watch(self, guards: Sequence[Any]) -> list[bool]:
        """Register objects that guards of the latest graph cover only in part; keep all guards."""
        graph = self._graphs[-1]
        for guard in guards:
            graph.why = _why_unsound(guard) or graph.why
            self._watched.update((id(x), (x, _names(x))) for x in _unguarded(guard))
        return [True] * len(guards)

    def _run(self, graph: _Graph, *inputs: Tensor) -> Sequence[Any]:
        """Trace or replay `graph`, whose guards hold in this call. Dynamo's code calls it."""
        SerialTrace.under_way, call = False, self._call
        assert call is not None
        if graph.why:
            call.stays = True
            raise _RunUncompiled(graph.why)
        call.inputs = [call.behind.get(id(x), x) for x in inputs]
        case = graph.cases.get(graph.key(call.inputs))
        if case is None:
            self._agree(call, graph.checksum(call.grid), f"it is traced again, {graph.words}")
            if self._made >= MOST_CASES:
                raise _RunUncompiled(f"it is called in more than {MOST_CASES} cases")
            call.begins = graph
            raise _RunUncompiled
        self._agree(call, case.state, f"case {case.number} of it, {case.words}")
        case.decide(call.grid, self._warn)
        if case.is_left:
            raise _RunUncompiled
        self.replays += case.is_replayed
        try:
            return graph.results(case.run(call.inputs, call.grid), call.inputs)
        except UnsupportedOperation as error:
            if case.is_left:
                raise _RunUncompiled(str(error)) from None
            raise

    def _agree(self, call: _Call, number: int, words: str) -> None:
        """Raise DivergenceError on all ranks unless `number` is equal on all ranks. Collective.

        The error shows the first line of `words` that differs between ranks.
        """
        call.agreed = True
        if not call.grid.journal.agrees(f"call of compiled {self._name}", number):
            everyone = call.grid.all_gather_object(words.splitlines())
            lines = list(zip_longest(*everyone, fillvalue="nothing more"))
            apart = next((x for x in lines if len(set(x)) > 1), lines[0])
            raise DivergenceError(
                f"compile: the ranks differ in a call of {self._name}. {by_ranks(apart, ': ')}. "
                "Call it with the same arguments, modes and variables on every rank"
            )

    def _as_it_is(self, args: Any, kwargs: Any) -> Result:
        with _optimizers_refused():
            return self._program(*args, **kwargs)

    def _warn(self, what: str, why: str) -> None:
        """Warn that the program does `what`, with the reason `why`; once for each `what`."""
        if what not in self._warned:
            self._warned.add(what)
            warnings.warn(f"compile: {self._name} {what}: {why}", stacklevel=4)


def _of_compiled(name: str) -> Any:
    """Return a property of a compiled module that reads the attribute `name` of its `Compiled`."""
    return property(lambda module: getattr(type(module)._compiled, name))


class _CompiledModule:
    """The base class by which a compiled module differs from the original module.

    Each compiled module has a class of its own, derived from this class and the original module's
    class. Both modules share one dictionary of attributes.
    """

    _orig_mod: Any
    _compiled: Any

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's result: replay the call if it belongs to a known case. Collective."""
        return type(self)._compiled(*args, **kwargs)

    replays, source, graph = map(_of_compiled, ("replays", "source", "graph"))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return partial(compile, backend=type(self)._compiled._backend), (self._orig_mod,)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return compile(deepcopy(self._orig_mod, memo), backend=type(self)._compiled._backend)


class _RunUncompiled(Exception):  # noqa: N818
    """An exception that ends a call by Dynamo's code, so that the program then runs uncompiled.

    It is raised before the call has had any effect. Its argument is the reason, for a warning.
    """


_AS_IT_IS, _NOTHING = -1, -2
"""The numbers, compared between ranks, of calls that run uncompiled, and of calls without a graph.
"""

_RUNS = "runs uncompiled"

_PURE = "einops."
"""A library whose cached functions depend on their arguments only; 8 of 126 networks use it."""

_NESTED = tuple, list, set

_LIMIT = "FailOnRecompileLimitHit"
"""The name of Dynamo's error for too many graphs of one program."""


class _Argument(NamedTuple):
    """A placeholder for the DistTensor of this number among the arguments of a call."""

    number: int


class _Call:
    """One call of a compiled program.

    Attributes
    ----------
    tensors: the DistTensors among the arguments, each once.
    stand_ins: plain tensors without memory that replace `tensors` in Dynamo's trace.
    behind: the DistTensor of each stand-in, by the id of the stand-in.
    kind: types and shapes of the tensors, and modes.
    inputs: the inputs of the graph whose guards hold.
    begins: the graph to which this call adds a new case, or None.
    agreed: whether the ranks have compared their graph and case.
    stays: whether further calls of the same kind run uncompiled.
    """

    def __init__(self, tensors: list[DistTensor], training: bool | None) -> None:
        self.tensors, self.grid = tensors, tensors[0].grid
        about = [(x.shape, x.dtype, x.device, x.requires_grad) for x in tensors]
        self.kind = torch.is_grad_enabled(), training, *about
        self.stand_ins = [_stand_in(number, *x) for number, x in enumerate(about)]
        self.behind = dict(zip(map(id, self.stand_ins), tensors, strict=True))
        self.inputs: list[Tensor] = []
        self.begins: _Graph | None = None
        self.agreed = self.stays = False


@lru_cache(256)
def _stand_in(number: int, shape: Any, dtype: Any, device: Any, trained: bool) -> Tensor:
    """Return a plain tensor with the metadata of argument `number`, but memory for one element."""
    with torch.inference_mode(False), torch.no_grad():
        return torch.empty((), dtype=dtype, device=device).expand(shape).requires_grad_(trained)


def entered(x: Tensor) -> Tensor:
    """Return a copy of a stand-in while Dynamo traces; raise an exception without Dynamo.

    The program uses the copy, so its results and attributes never contain the stand-in itself.
    Without Dynamo, the program must not run on stand-ins.
    """
    if is_fake(x):
        return x.clone(memory_format=torch.contiguous_format)
    raise _RunUncompiled("torch.compile is disabled here")


def filled(argument: Any, tensors: Sequence[Tensor]) -> Any:
    """Return a nested argument in which `tensors` replace the placeholders of DistTensors."""
    if type(argument) is _Argument:
        return tensors[argument.number]
    if type(argument) is list:
        return [filled(x, tensors) for x in argument]
    if isinstance(argument, tuple) and argument:
        items = [filled(x, tensors) for x in argument]
        return type(argument)(*items) if hasattr(argument, "_fields") else tuple(items)
    if isinstance(argument, dict):
        named = {key: filled(x, tensors) for key, x in argument.items()}
        return named if type(argument) is dict else type(argument)(named)
    return argument


def _weakly(method: Callable[..., Any], *arguments: Any) -> Callable[..., Any]:
    """Return a function that calls `method` with `arguments` and then its own arguments.

    The function holds weak references to the method's object and to `arguments`, as Dynamo keeps
    the function until the process ends.
    """
    weak, references = WeakMethod(method), list(map(ref, arguments))
    return lambda *args: weak()(*(each() for each in references), *args)  # type: ignore[misc]


def _front_of(program: Any, take: Callable[..., Any], watch: Callable[..., Any]) -> Any:
    """Return a function of (args, kwargs, stand_ins) that runs `program` by Dynamo.

    In `args` and `kwargs`, placeholders take the place of DistTensors; `stand_ins` are their plain
    tensors. Dynamo calls `take` with each new graph, and runs the function that `take` returns. It
    calls `watch` with the graph's guards, and keeps those for which `watch` returns True.
    """

    enter, fill = entered, filled

    def whole(args: Any, kwargs: Any, stand_ins: Sequence[Tensor]) -> Any:
        tensors = [enter(x) for x in stand_ins]
        return program(*fill(args, tensors), **fill(kwargs, tensors))

    _prepare_dynamo()
    # Dynamo keeps graphs, and counts them, by code. It looks up global names of other modules than
    # the first function's by import, which fails for programs that are executed as text.
    names = getattr(program, "__globals__", globals())
    own = FunctionType(whole.__code__.replace(), names, "whole", None, whole.__closure__)
    options: Any = {"guard_filter_fn": watch}
    return torch.compile(own, backend=take, fullgraph=True, dynamic=False, options=options)


@cache
def _prepare_dynamo() -> None:
    for node in (entered, redistributed_node):
        torch.compiler.allow_in_graph(node)
    guard_exactly(lambda: SerialTrace.under_way)


class _Graph:
    """A graph of the serial program, valid while its guards hold.

    Attributes
    ----------
    module: the graph of the serial program.
    cases: the graph's cases, by the layouts of its inputs.
    reductions: the gradient reductions of the parallelized modules that the program calls.
    why: the reason to run the program uncompiled; "" if there is none.
    """

    def __init__(self, module: fx.GraphModule) -> None:
        self.module, self.cases = module, dict[Any, ReplayCase]()
        self.reductions: list[GradientReduction] = []
        graph = module.graph
        for node in graph.nodes:
            if node.target is entered:
                node.replace_all_uses_with(node.args[0])
                graph.erase_node(node)
        unknown = unknown_in_graph(module)
        self.why = f"it uses {unknown}" if unknown else ""
        places = [node for node in graph.nodes if node.op == "placeholder"]
        (end,) = (node for node in graph.nodes if node.op == "output")
        self._returned = list(end.args[0])
        self._given = {x: i for i, x in enumerate(places)}
        graph.lint()
        self._computed = [x for x in self._returned if x not in self._given]
        end.args = (tuple(self._computed),)
        module.recompile()

    def key(self, inputs: Sequence[Tensor]) -> Any:
        """Return the key of the case to which a call with `inputs` belongs."""
        return key_of(inputs), tuple(r.enabled for r in self.reductions)

    def is_like(self, other: _Graph) -> bool:
        """Return whether both graphs have the same code, which refers to no attributes."""
        whole = all(node.op != "get_attr" for node in self.module.graph.nodes)
        return whole and self.module.code == other.module.code

    def begin(
        self,
        inputs: Sequence[Tensor],
        reductions: list[GradientReduction],
        number: int,
        backend: str | None,
    ) -> None:
        """Create case `number` after its first call, which ran uncompiled and used `reductions`."""
        self.reductions = reductions
        self.cases[self.key(inputs)] = ReplayCase(self.module, reductions, number, backend)

    def results(self, computed: Sequence[Any], inputs: Sequence[Tensor]) -> list[Any]:
        """Return the graph's results in order: `computed` tensors, and returned inputs."""
        made = iter(computed)
        return [inputs[self._given[x]] if x in self._given else next(made) for x in self._returned]

    @property
    def words(self) -> str:
        """Return a description of the graph: one line of function names, then the graph's code."""
        names = (node.name for node in self.module.graph.nodes if node.op.startswith("call"))
        return f"with {', '.join(names)}\n{self.module.code}"

    def checksum(self, grid: Grid) -> int:
        """Return a checksum of the graph's code without the name of this rank's device."""
        text = self.module.code
        for name in (repr(grid.device), str(grid.device)):
            text = text.replace(name, "device")
        return crc32(text.encode())


def _why_unsound(guard: Any) -> str:
    """Return the reason why a guard of Dynamo misses changes of its value; "" if there is none."""
    value = guard.value
    if guard.name.endswith(".__wrapped__") and not value.__module__.startswith(_PURE):
        return "it calls a function with functools.cache, which may return old values"
    if value is os.getenv:
        return "it calls os.getenv, whose result is not guarded; read os.environ"
    if isinstance(value, Random) or isinstance(getattr(value, "__self__", None), Random):
        return "it draws from Python's random module; pass the numbers as arguments"
    if type(value).__module__ == "numpy" and hasattr(value, "__array_interface__"):
        return "it reads a NumPy array, which is not guarded; pass a tensor"
    if isinstance(value, partial) and vars(value):
        return "it may read an attribute of a functools.partial, which is not guarded"
    if isinstance(value, type) and issubclass(value, DistTensor):
        return "it mentions DistTensor, but the serial program that is traced has none"
    return ""


def _unguarded(guard: Any) -> list[Any]:
    """Return the objects of a guard whose new attributes or items Dynamo would not notice."""
    value = guard.value
    if isinstance(value, _NESTED):  # a guard keeps the tuple itself, with the lists in it
        return [value] if any(isinstance(x, _NESTED) for x in value) else []
    if isinstance(value, dict):
        return [value] if guard.guard_type == "TYPE_MATCH" or isinstance(value, OrderedDict) else []
    kinds = (value if isinstance(value, type) else type(value)).__mro__
    found = [(x, x) for kind in kinds for x in (kind, type(kind))]
    if guard.guard_type == "TYPE_MATCH" and hasattr(value, "__dict__"):
        found.append((value, type(value)))
    known = "builtins", "torch", "distconv"
    return [x for x, kind in found if kind.__module__.partition(".")[0] not in known]


def _names(x: Any) -> list[Any]:
    """Return items or keys of a container `x`, or names of attributes, for a class with values."""
    if isinstance(x, _NESTED):
        return [len(x), *(z for y in x for z in (_names(y) if isinstance(y, _NESTED) else (y,)))]
    if isinstance(x, dict):
        return [*(OrderedDict if isinstance(x, OrderedDict) else dict).keys(x)]
    return [*vars(x), *vars(x).values()] if isinstance(x, type) else [*vars(x)]


def _differs(watched: tuple[Any, list[Any]]) -> bool:
    """Return whether a watched object has other names or items than when it was registered."""
    now, before = _names(watched[0]), watched[1]
    return len(now) != len(before) or not all(map(_is_same, now, before))


def _is_same(a: Any, b: Any) -> bool:
    # Lengths are new objects in every call.
    return a is b or (type(a) is type(b) is int and a == b)


def _why_as_it_is(tensors: Sequence[DistTensor]) -> str:
    """Return the reason why calls with `tensors` run uncompiled; "" if there is none."""
    if any(x.unmerged is not None for x in tensors):
        return (
            "an argument is a tensor with merged dimensions; reshape it within the compiled "
            "function"
        )
    if any(map(is_expanded, shards_of(tensors))):
        return "an argument is an expanded tensor, whose elements share memory; pass x.contiguous()"
    return ""


def _in_words(error: Exception) -> str:
    """Return the message of an error of Dynamo in one line, with the place in the program."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = lines[0].rstrip(".") if lines else type(error).__name__
    if type(error).__name__ == _LIMIT:
        said = (
            "it reads values that change too often (torch._dynamo.config.recompile_limit); pass "
            "changing numbers as tensors"
        )
    places = [line for line in lines if line.startswith('File "')]
    return f"{said}, at {places[-1].partition(', in ')[0]}" if places else said


@contextmanager
def _optimizers_refused() -> Iterator[None]:
    """Raise RuntimeError when an optimizer steps within the context."""

    def refuse(optimizer: Any, *_: Any) -> NoReturn:
        raise RuntimeError(_OPTIMIZER.format(f"{type(optimizer).__name__}.step", user_line()))

    handle = register_optimizer_step_pre_hook(refuse)
    try:
        yield
    finally:
        handle.remove()
