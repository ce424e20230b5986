"""The `grad_fn` of a DistTensor: the autograd node of its shard."""

from __future__ import annotations

from typing import Any

from distconv.tensor.dispatch import refuse


class ShardNode:
    """The autograd node of a shard, as `DistTensor.grad_fn` shows it: hooks are refused.

    A hook of the node would get this rank's part of the gradient, not the serial one. A node that
    calls hooks itself, with serial gradients, has a list of them as its attribute `serial_hooks`.
    The attribute `function` of a node is the user's Function for which it stands.
    """

    __slots__ = ("_node",)

    def __init__(self, node: Any) -> None:
        self._node = node

    def name(self) -> str:
        """Return the name that the node has in serial torch."""
        function = getattr(self._node, "function", None)
        shown: str = self._node.name() if function is None else f"{function.__name__}Backward"
        return shown

    def __getattr__(self, name: str) -> Any:
        if name == "register_hook" and hasattr(self._node, "serial_hooks"):
            return self._node.serial_hooks.append
        if name in ("register_hook", "register_prehook"):
            refuse(
                f"grad_fn.{name}",
                "the hook, of a node or by register_backward_hook of a module, would see this "
                "rank's part of the gradients",
                way_out="Use register_full_backward_hook of the module, or a forward hook that "
                "calls register_hook on the module's output",
            )
        return getattr(self._node, name)

    def __eq__(self, other: object) -> bool:
        return self._node == (other._node if isinstance(other, ShardNode) else other)

    def __hash__(self) -> int:
        return hash(self._node)

    def __repr__(self) -> str:
        return repr(self._node)
