"""Refusal of torch's wrappers that average or shard gradients, around parallelized modules.

Such a wrapper divides the summed gradients by its number of ranks, or cuts the parameters: the
gradients would no longer be the serial ones.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from distconv.tensor.ownership import is_owned
from distconv.torch_private import before_data_parallel, in_data_parallel, is_flat_parameter

_WRAPPERS = frozenset(
    "DistributedDataParallel DataParallel FullyShardedDataParallel FSDPModule DDP "
    "ReplicateModule".split()
)
_SHARDED = frozenset(("DTensor",))
"""Names of torch's wrappers, so that these need not be imported. `replicate` makes the last two."""

_WAY_OUT = (
    "parallelize adds up the gradients over all ranks itself: use parallelize(module, grid) of the "
    "plain module alone. The grid's sample axis divides the mini-batch, as data parallelism does, "
    "and shard_parameters=True keeps a block of the weights on each rank"
)


def check_unwrapped(module: nn.Module) -> None:
    """Raise TypeError if torch's data parallelism or sharding wraps a part of `module`."""
    for name, part in module.named_modules():
        wrapper = _among(type(part), _WRAPPERS)
        if wrapper:
            raise TypeError(
                f"parallelize: {f'the part {name}' if name else 'the module'} is wrapped by "
                f"{wrapper}, which would change the gradients once more. {_WAY_OUT}"
            )
    for name, p in module.named_parameters():
        # FSDP marks its parameters, and makes Parameters of them.
        kind = _among(type(p), _SHARDED) or ("FlatParameter" if is_flat_parameter(p) else "")
        if kind:
            raise TypeError(
                f"parallelize: the parameter {name} is a {kind}, cut by torch's own sharding. "
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
    """Let torch's wrappers raise TypeError if they get a module with a parallelized submodule.

    A module that only holds parameters of a parallelized one, as `replicate` makes it, is refused
    as well. `parallelized(module)` is true for a parallelized module.
    """

    def check(wrapper: nn.Module, _: str, module: nn.Module | None) -> None:
        kind = _among(type(wrapper), _WRAPPERS)
        if not kind or not isinstance(module, nn.Module):
            return
        if any(map(parallelized, module.modules())) or any(map(is_owned, module.parameters())):
            raise TypeError(
                f"{kind} is put around a parallelized module, whose gradients it would change once "
                f"more. {_WAY_OUT}"
            )

    register_module_module_registration_hook(check)
    before_data_parallel(check)


def _among(kind: type, names: frozenset[str]) -> str:
    """Return the name of a torch class in `names` from which `kind` derives, or ""."""
    for base in kind.__mro__:
        if base.__name__ in names and base.__module__.startswith("torch."):
            return base.__name__
    return ""
