"""Autograd functions on shards, without the overhead of `Function.apply`."""

from __future__ import annotations

from torch.autograd import Function

from distconv.torch_private import compiled_apply


class ShardFunction(Function):
    """An autograd function that is applied to shards, which torch.func never transforms.

    `Function.apply` searches the arguments for wrappers of torch.func each time, in Python.
    """

    apply = compiled_apply
