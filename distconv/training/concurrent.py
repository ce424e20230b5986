"""Reductions of the gradients of several models at once, in any order of backward passes."""

from __future__ import annotations

from types import TracebackType

from torch import nn

from distconv.model.gradient_reduction import required_reduction


class ConcurrentReductions:
    """A context in which the gradients of several models are reduced at the same time.

    The reductions of each model have communicators of their own, like the thread teams of the Cray
    PE ML plug-in, so each rank may call the backward passes in an order of its own:

        both = ConcurrentReductions(generator, critic)
        with both:
            loss_of_generator.backward()
            loss_of_critic.backward()
        # here the gradients are the sums

    Within the context backward passes return before the sums are complete: do not use gradients
    before its end, which waits for all of them. Between GPUs all reductions start at the end, in
    the order of the models. Each model takes part in one backward pass. Forward passes, and
    backward passes of models that cut samples, must come in one order on all ranks, as always.

    Raises ValueError if a model is not parallelized, or two are parts of one.

    Parameters
    ----------
    models: parallelized modules. All ranks make the context together, with the models in one order.
    """

    def __init__(self, *models: nn.Module):
        self._reductions = [required_reduction("ConcurrentReductions", model) for model in models]
        if len({id(reduction) for reduction in self._reductions}) < len(models):
            raise ValueError(
                "ConcurrentReductions: two of the models are parts of one parallelized module, "
                "whose gradients travel together; call parallelize for each of them"
            )
        for number, reduction in enumerate(self._reductions):
            reduction.travel_apart(number)

    def __enter__(self) -> None:
        for reduction in self._reductions:
            reduction.hold()
        for reduction in self._reductions:
            reduction.grid.journal.any_order += 1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for reduction in self._reductions:
            reduction.grid.journal.any_order -= 1
        # After an error, too: other ranks may have started reductions that this one has not.
        for reduction in self._reductions:
            reduction.start_held()
        for reduction in self._reductions:
            reduction.settle()
