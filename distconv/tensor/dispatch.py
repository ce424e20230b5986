"""The registry of rules, which say what torch functions do with DistTensors.

A function without a rule is refused by `UnsupportedOperation`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import torch

from distconv import torch_private
from distconv.tensor.base import DistTensorBase

Rule = TypeVar("Rule", bound=Callable[..., Any])


RULES: dict[Callable[..., Any], Callable[..., Any]] = {}
"""The rule of each torch function on DistTensors: a function of the same arguments."""


def implements(*functions: Callable[..., Any]) -> Callable[[Rule], Rule]:
    """Register the decorated rule as the implementation of torch functions for DistTensors.

    The rule is called on every rank of the grid with the arguments of the torch function. At least
    one argument is or contains a DistTensor. The rule decides from global metadata alone whether it
    supports the arguments; if not, it raises `UnsupportedOperation` before any message.
    """

    def register(rule: Rule) -> Rule:
        for function in functions:
            RULES[function] = rule
        return rule

    return register


class UnsupportedOperation(NotImplementedError):
    """An operator, or an argument of it, that is not supported on these layouts.

    It is raised on every rank before any message is sent. The message names the operator, the
    layouts, and the way out.
    """


def refuse(operator: str, reason: str, *operands: Any, way_out: str) -> NoReturn:
    """Raise `UnsupportedOperation` with the reason, the layouts of the operands and the way out.

    `operator` is the name of the function that is refused.
    """
    tensors = [x for x in operands if isinstance(x, DistTensorBase)]
    where = "; ".join(f"{tuple(x.shape)} {x.layout} on {x.grid}" for x in tensors)
    raise UnsupportedOperation(f"{operator}: {reason} [{where}]. {way_out}")


_SAVE = (
    "Save x.full_tensor(), or every rank its x.to_local(); of sharded parameters and their "
    "optimizers distconv.full_state_dict(...)"
)


_PARAMETRIZE = (
    "Apply parametrizations, such as weight_norm or spectral_norm, before parallelize, or after "
    "distconv.unparallelize(model)"
)


SERIAL = (
    "Do that with plain tensors and the serial module: the one before parallelize, or "
    "distconv.unparallelize(copy.deepcopy(model)); in place of torch.func's transforms use "
    "torch.autograd.grad, and loops"
)
"""Advice for tools that take a module apart."""


WAYS_OUT: dict[Any, str] = {
    torch_private.is_view: f"torch.export and others look beneath torch's functions. {SERIAL}",
    torch.Tensor.untyped_storage: "The memory belongs to x.to_local(), this rank's part. A summary "
    f"of a module, such as torchinfo's, takes input_size=. {SERIAL}",
    **{
        function: "Ask x.to_local(), this rank's part, how it lies in memory, or x.full_tensor()"
        for function in (torch.Tensor.storage_offset, torch.Tensor.data_ptr)
    },
    torch_private.make_dual: "Use torch.autograd.grad; forward-mode derivatives are not supported",
    torch.Tensor.__reduce_ex__: _SAVE,
    torch_private.compatible_types: "Convert a module before parallelize",
    torch.norm_except_dim: _PARAMETRIZE,
    torch.nn.functional.normalize: f"Use the returned tensor. {_PARAMETRIZE}",
    torch.ops.aten.set_.source_Tensor: _PARAMETRIZE,
    torch.ops.aten.alias.default: (
        "Pass x.full_tensor() to what makes tensors of another type, such as MONAI's MetaTensor"
    ),
    torch.eye: "Copy it from a plain one: x.copy_(torch.eye(n, m))",
}
"""The way out for some functions."""


def way_out_of(function: Any) -> str:
    """Return the advice that the error about `function`, which has no rule, gives to the user."""
    if isinstance(function, (torch.ScriptMethod, torch.ScriptFunction)):
        return "Use the module or function as it was before torch.jit.script or torch.jit.trace"
    return WAYS_OUT.get(
        function,
        "Compute it on the whole tensor, x.full_tensor(), or, where it treats every element alone, "
        "on x.to_local()",
    )


UNCHECKED = {torch.autograd.grad, torch.autograd.backward, torch.Tensor.__deepcopy__}
"""Functions whose plain tensors are not operands, are copied before, or are checked one by one."""


ALIASES = {"axis": "dim", "keepdims": "keepdim"}
"""numpy's names of arguments, which torch accepts."""


_PROPERTIES = (
    *("dtype", "device", "ndim", "itemsize", "nbytes"),
    *("is_cpu", "is_cuda", "is_ipu", "is_maia", "is_meta", "is_mkldnn", "is_mps", "is_mtia"),
    *("is_nested", "is_quantized", "is_sparse", "is_sparse_csr", "is_vulkan", "is_xla", "is_xpu"),
)


_QUESTIONS = (
    *("numel", "is_floating_point", "is_complex", "is_signed"),
    *("is_inference", "is_distributed"),
)


METADATA: set[Any] = {
    *(getattr(torch.Tensor, name).__get__ for name in _PROPERTIES),
    *(getattr(torch.Tensor, name) for name in ("size", "dim", "ndimension", "nelement")),
    *(getattr(torch.Tensor, name) for name in ("element_size", "get_device")),
    *(getattr(kind, name) for kind in (torch, torch.Tensor) for name in _QUESTIONS),
}
