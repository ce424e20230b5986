"""Autograd functions on shards, applied without what torch does for functions of any program."""

from __future__ import annotations

from torch.autograd import Function

from distconv.torch_private import compiled_apply


class ShardFunction(Function):
    """A function of autograd that is applied to shards, which torch.func never transforms.

    `Function.apply` looks through the arguments for wrappers of torch.func each time, in Python.
    """

    apply = compiled_apply
