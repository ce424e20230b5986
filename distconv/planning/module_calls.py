"""The calls of a module and of the modules within it, watched from outside."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import nn


def is_layer(module: nn.Module) -> bool:
    """Return whether a module has no modules within."""
    return next(module.children(), None) is None


class ModuleCalls:
    """Hooks on a module and all within it; a subclass overrides `entered` and `left`.

    Attributes
    ----------
    stack: the names and modules of the calls under way, outermost first.
    """

    def __init__(self, module: nn.Module):
        self.stack: list[tuple[str, nn.Module]] = []
        self._module = module
        self._paths = {part: path or type(part).__name__ for path, part in module.named_modules()}
        self._count: Counter[nn.Module] = Counter()
        self._hooks = [
            hook
            for part in self._paths
            for hook in (
                part.register_forward_pre_hook(self._enter),
                part.register_forward_hook(self._leave),
            )
        ]

    def entered(self, module: nn.Module) -> None:
        """Take note that a call begins, which is the last of `stack`; to be overridden."""

    def left(self, name: str, module: nn.Module, output: Any) -> None:
        """Take note that a call has returned, and is no longer on `stack`; to be overridden."""

    @property
    def where(self) -> tuple[str, nn.Module]:
        """Return the innermost call under way, or, after an exception, the one that has raised."""
        return self.stack[-1] if self.stack else (self._paths[self._module], self._module)

    def remove(self) -> None:
        """Take the hooks away."""
        for hook in self._hooks:
            hook.remove()

    def _enter(self, module: nn.Module, _: Any) -> None:
        self._count[module] += 1
        again = f" (call {self._count[module]})" if self._count[module] > 1 else ""
        self.stack.append((self._paths[module] + again, module))
        self.entered(module)

    def _leave(self, module: nn.Module, _: Any, output: Any) -> None:
        # Calls whose exception has been caught on the way are still there.
        while self.stack[-1][1] is not module:
            self.stack.pop()
        name, _ = self.stack.pop()
        self.left(name, module, output)
