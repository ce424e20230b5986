"""The norm of all gradients of a model, sharded parameters included."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from distconv.model.norms import tensor_norms
from distconv.tensor.nested import as_list, shards_of


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale all gradients down to a norm of at most `max_norm`, in few messages.

    This is torch.nn.utils.clip_grad_norm_ for models with sharded parameters. All ranks of the grid
    call it together, after `backward()`. One message carries the norms of all sharded parameters
    that are cut over the same axes; torch's own function sends one for each, and returns a
    DistTensor.

    Parameters
    ----------
    parameters: parameters; those without a gradient are ignored.
    max_norm, norm_type, error_if_nonfinite: as torch's; orders are positive.

    Returns
    -------
    The norm of all gradients before they are scaled, a tensor of one number, the same on all ranks.

    Raises
    ------
    ValueError
        Where `norm_type` is not positive.
    RuntimeError
        Where `error_if_nonfinite` is set and the norm is not finite.
    """
    norm_type = float(norm_type)
    if not norm_type > 0:
        raise ValueError(
            f"clip_grad_norm_: norm_type={norm_type} is not positive; choose 2.0, 1.0 or inf, say"
        )
    gradients = [p.grad for p in as_list(parameters) if p.grad is not None]
    with torch.no_grad():
        norms = tensor_norms(gradients, norm_type)
        if not norms:
            return torch.tensor(0.0)
        total = torch.linalg.vector_norm(torch.stack(norms), norm_type)
        if error_if_nonfinite and not total.isfinite():
            raise RuntimeError(
                f"clip_grad_norm_: the norm of order {norm_type} of all gradients is {total}; "
                "pass error_if_nonfinite=False to scale them all the same"
            )
        factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
        for block in shards_of(gradients):
            block.mul_(factor)
    return total
