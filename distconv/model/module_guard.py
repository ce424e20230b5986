"""Checks of each call of a parallelized module: inputs are DistTensors, and the ranks agree."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from operator import attrgetter, is_, truth
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook

from distconv.comm.checksums import unequal
from distconv.grid.journal import DivergenceError
from distconv.grid.words import differences
from distconv.model.consistency import checked_state
from distconv.model.gradient_reduction import GradientReduction, reduction_of
from distconv.tensor.base import tensors_in
from distconv.tensor.dispatch import SerialTrace, enter_call, innermost_call
from distconv.tensor.dist_tensor import DistTensor
from distconv.tensor.ownership import is_owned
from distconv.tensor.recording import check_untraced
from distconv.torch_private import (
    before_data_parallel,
    before_fully_shard,
    in_data_parallel,
    is_flat_parameter,
    parts_and_parameters,
    run_eagerly,
)

# Errors for torch's wrappers that average or shard gradients, around parallelized modules.
#
# Such a wrapper divides the summed gradients by its number of ranks, or partitions the parameters:
# the gradients would no longer be the serial ones.


_WRAPPERS = frozenset(
    "DistributedDataParallel DataParallel FullyShardedDataParallel FSDPModule DDP "
    "ReplicateModule".split()
)
_SHARDED = frozenset(("DTensor",))
"""Names of torch's classes, which need not be imported then: of wrappers of modules, of which
`replicate` makes the last two, and of sharded parameters."""

_WAY_OUT = (
    "parallelize sums the gradients over all ranks itself: call parallelize(module, grid) with "
    "the unwrapped module. The grid's sample axis divides the mini-batch, as data parallelism "
    'does, and shard="zero3" shards the weights over it, as fully_shard does'
)


def check_unwrapped(module: nn.Module) -> None:
    """Raise TypeError if torch's data parallelism or sharding wraps `module` or a submodule."""
    for name, part in module.named_modules():
        wrapper = _among(type(part), _WRAPPERS)
        if wrapper:
            raise TypeError(
                f"parallelize: {f'the part {name}' if name else 'the module'} is wrapped by "
                f"{wrapper}, which would reduce the gradients again. {_WAY_OUT}"
            )
    for name, p in module.named_parameters():
        # A flat parameter of FSDP is a plain Parameter with a mark.
        kind = _among(type(p), _SHARDED) or ("FlatParameter" if is_flat_parameter(p) else "")
        if kind:
            raise TypeError(
                f"parallelize: the parameter {name} is a {kind}, sharded by torch itself. "
                f"{_WAY_OUT}"
            )


def check_no_active_wrapper() -> None:
    """Raise TypeError while the forward pass of a DistributedDataParallel is running."""
    if in_data_parallel():
        raise TypeError(
            "a parallelized module is called by DistributedDataParallel, which would divide its "
            f"gradients by the number of ranks. {_WAY_OUT}"
        )


@cache
def refuse_wrappers_around(parallelized: Callable[[nn.Module], object]) -> None:
    """Make torch's wrappers raise TypeError for a module with a parallelized submodule.

    The wrappers also raise for a module that only holds parameters of a parallelized module, as
    `replicate` makes one. `parallelized(module)` is true for a parallelized module.
    """

    def check(wrapper: nn.Module, _: str, module: nn.Module | None) -> None:
        kind = _among(type(wrapper), _WRAPPERS)
        if not kind or not isinstance(module, nn.Module):
            return
        if any(map(parallelized, module.modules())) or any(map(is_owned, module.parameters())):
            raise TypeError(
                f"{kind} wraps a parallelized module and would reduce its gradients again. "
                f"{_WAY_OUT}"
            )

    register_module_module_registration_hook(check)
    before_data_parallel(check)


def refuse_fully_shard(parallelized: Callable[[nn.Module], object]) -> None:
    """Make `fully_shard` raise TypeError for a module with a parallelized submodule.

    This works in a program that has imported `fully_shard` by now. In other programs, the
    parallelized module raises the error when the module is called. `parallelized(module)` is true
    for a parallelized module.
    """

    def check(module: nn.Module) -> None:
        if any(map(parallelized, module.modules())):
            raise TypeError(
                "fully_shard is called with a parallelized module, whose gradients it would sum "
                f"once more. {_WAY_OUT}"
            )

    before_fully_shard(check)


def _among(kind: type, names: frozenset[str]) -> str:
    """Return the name of a torch class in `names` from which `kind` derives, or ""."""
    for base in kind.__mro__:
        if base.__name__ in names and base.__module__.startswith("torch."):
            return base.__name__
    return ""


class ModuleGuard:
    """The forward hooks of a parallelized module, which check each of its calls."""

    def __init__(self, module: nn.Module, reduction: GradientReduction):
        self._reduction, self._grid = reduction, reduction.grid
        self._parameters = list(module.parameters())
        self._tables: list[dict[str, Any]] = []
        """The dictionaries of parameters and submodules of the module and its submodules."""
        self._entries: list[Any] = []
        """The values in the dictionaries of `_tables` when the structure was last checked."""
        self._parts: list[nn.Module] = []
        """The submodules when the structure was last checked."""
        self._calls = object()
        """The key under which the grid's journal counts the calls of the module."""
        module.register_forward_pre_hook(self._before_forward, with_kwargs=True)
        module.register_forward_hook(self._after_forward, always_call=True)

    def __deepcopy__(self, memo: dict[int, Any]) -> ModuleGuard:
        return self

    def _before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not SerialTrace.under_way:
            self._check_call(module, args, kwargs)

    @run_eagerly
    def _check_call(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        inputs = tensors_in(*args, kwargs)
        grids = [x.grid for x in inputs if isinstance(x, DistTensor)]
        if module is not self._reduction.whole():
            if grids and torch.is_grad_enabled() and reduction_of(module) is None:
                raise RuntimeError(
                    "a copy of a parallelized module is not parallelized: its gradients would not "
                    "be summed over the ranks; call parallelize(copy, grid), or run it under "
                    "torch.no_grad()"
                )
            return
        outermost = enter_call(self, depth=3).outermost
        if not torch.is_grad_enabled():
            if outermost and self._grid.journal.compares and self._is_collective(inputs):
                self._check_equal(module)
                _, *parts = (module, *self._parts) if self._same_structure() else module.modules()
                self._check_agreement(module, parts)
            return
        check_untraced("a parallelized module", inputs)
        check_no_active_wrapper()
        self._check_structure(module)
        self._reduction.prepare()
        if inputs and not grids and self._reduction.buckets:
            raise TypeError(
                "a parallelized module was called on plain tensors only, so its gradient would be "
                "counted once for every rank; pass distconv.distribute_tensor(x, grid), or call "
                "it under torch.no_grad()"
            )
        for grid in grids:
            if not self._fits(grid):
                raise ValueError(
                    f"the module is parallelized on {self._grid}, but its input is on {grid}; use "
                    "one grid for both"
                )
        if outermost and self._grid.journal.compares:
            self._check_equal(module)
            self._check_agreement(module, self._parts)

    def _fits(self, grid: Any) -> bool:
        """Return whether the module accepts inputs on `grid`."""
        if grid is self._grid or grid == self._grid:
            return True
        # With `DistConvDDP`, inputs are on grids of some of the ranks, each with its own samples.
        averages = self._reduction.divisor is not None
        return averages and set(grid.ranks) <= set(self._grid.ranks)

    def _is_collective(self, inputs: Iterable[Tensor]) -> bool:
        """Return whether all ranks of the grid must call the module, as an input is partitioned.

        With inputs that are replicated on every rank, one rank may call the module alone.
        """
        distributed = (x for x in inputs if isinstance(x, DistTensor))
        return any(any(x.cuts) and x.grid == self._grid for x in distributed)

    def _same_structure(self) -> bool:
        entries = [x for table in self._tables for x in table.values()]
        same = len(entries) == len(self._entries) and all(map(is_, entries, self._entries))
        return same and bool(entries)

    def _check_structure(self, module: nn.Module) -> None:
        if self._same_structure():
            return
        check_unwrapped(module)
        if [id(p) for p in module.parameters()] != [id(p) for p in self._parameters]:
            raise RuntimeError(
                "the module has other parameters than when it was parallelized, permanently or "
                "for this call alone (torch.func.functional_call), and their gradients are not "
                "summed over the ranks; call parallelize(distconv.unparallelize(model), grid) "
                "after the last change of its structure, and load states without assign=True, "
                "which replaces parameters"
            )
        # torch takes long to walk through all submodules.
        _, *self._parts = module.modules()  # with the module, it would be freed by gc alone
        self._tables = [t for m in (module, *self._parts) for t in parts_and_parameters(m)]
        self._entries = [x for table in self._tables for x in table.values()]

    def _after_forward(self, module: nn.Module, _: Any, result: Any) -> None:
        if not SerialTrace.under_way:
            self._check_result(module, result)

    @run_eagerly
    def _check_result(self, module: nn.Module, result: Any) -> None:
        if module is not self._reduction.whole():
            return
        call = innermost_call()
        if call is None or call.of is not self or call.failed:
            # After an error torch calls this hook as well, even if `_before_forward` has not run.
            return
        call.leave()
        results = tensors_in(result)
        for x in results:
            if isinstance(x, DistTensor):
                # Reading `shard` completes the outputs here, so that a rank may later read an
                # output alone.
                self._reduction.keep_for((x.shard, x.held))
            elif x.requires_grad:
                raise TypeError(
                    "a parallelized module has returned a plain tensor that requires gradients; "
                    "every rank would count them once. Return a DistTensor from the module, and "
                    "call full_tensor() outside"
                )

    def _check_equal(self, module: nn.Module) -> None:
        """Raise RuntimeError on every rank if parameters or buffers differ. Collective.

        Parameters and buffers are compared in the first 16 calls of the module, and then in every
        64th.
        """
        if not self._grid.journal.is_due(self._calls, self._grid.device):
            return
        found = unequal(checked_state(module), self._grid)
        if found:
            raise RuntimeError(
                f"{found[0]} of the parallelized module is not the same on all ranks: {found[1]}. "
                f"{self._reduction.why_apart}Every rank must run the same optimizer steps, with "
                "the same learning rate, and skip the same steps; call load_state_dict with the "
                "same state on every rank to continue"
            )

    def _check_agreement(self, module: nn.Module, parts: Iterable[nn.Module]) -> None:
        """Raise DivergenceError on every rank if ranks call the module in different states.

        Ranks compare training modes and whether gradients are recorded; if so, also the trained
        parameters and whether gradients are summed. They compare before the module sends any
        message, as training and evaluation send different messages. `parts` are the submodules.
        Collective.
        """
        records, reduction = torch.is_grad_enabled(), self._reduction
        modes = bytes(map(truth, map(attrgetter("training"), (module, *parts))))
        number = crc32(modes, records)
        if records:
            number ^= reduction.layout ^ reduction.enabled
        called = type(module).__name__
        if self._grid.journal.agrees(f"call of the parallelized {called}", number):
            return
        state = {
            name or called: f"in {'training' if part.training else 'evaluation'} mode"
            for name, part in module.named_modules()
        }
        state["the recording of gradients"] = "on" if records else "off"
        if records:
            names = (name for name, _ in module.named_parameters())
            state |= zip(names, map(reduction.kind, self._parameters), strict=True)
            state["no_sync"] = "off" if reduction.enabled else "on"
        found = differences(self._grid.all_gather_object(state))
        more = f"; and {len(found) - 8} more" if len(found) > 8 else ""
        raise DivergenceError(
            f"the ranks call the parallelized {called} differently: {'; '.join(found[:8])}{more}. "
            "Call train() and eval(), freeze and unfreeze parameters, and enter no_grad and "
            "no_sync, identically on every rank"
        )
