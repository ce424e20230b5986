"""The base class of autograd functions on shards, which saves the overhead of `Function.apply`."""

from __future__ import annotations

from torch.autograd import Function

from distconv.torch_private import compiled_apply


class ShardFunction(Function):
    """A torch.autograd.Function for shards, to which torch.func is never applied.

    Its `apply` leaves out the search for wrappers of torch.func, which costs `Function.apply` time
    in Python.
    """

    apply = compiled_apply
