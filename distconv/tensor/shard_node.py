"""The `grad_fn` of a DistTensor: the autograd node of its shard."""

from __future__ import annotations

from typing import Any

from distconv.tensor.dispatch import refuse


class ShardNode:
    """The autograd node of a shard, as `DistTensor.grad_fn` shows it: hooks are refused.

    A hook of the node would get this rank's part of the gradient, not the serial one.
    """

    __slots__ = ("_node",)

    def __init__(self, node: Any) -> None:
        self._node = node

    def __getattr__(self, name: str) -> Any:
        if name in ("register_hook", "register_prehook"):
            refuse(
                f"grad_fn.{name}",
                "the hook, of a node or by register_backward_hook of a module, would see this "
                "rank's part of the gradients",
                way_out="Register a forward hook that calls register_hook on the module's output, "
                "whose hooks see the serial gradient",
            )
        return getattr(self._node, name)

    def __eq__(self, other: object) -> bool:
        return self._node == (other._node if isinstance(other, ShardNode) else other)

    def __hash__(self) -> int:
        return hash(self._node)

    def __repr__(self) -> str:
        return repr(self._node)
