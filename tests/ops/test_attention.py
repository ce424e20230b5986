"""nn.MultiheadAttention on distributed tensors equals the serial one, its weights included."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.serial import agrees, random_grid, random_tensor

OPTIONS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "samples first": {"batch_first": True},
    "keys of other features": {"kdim": 6, "vdim": 6},
    "an additional key": {"add_bias_kv": True, "add_zero_attn": True},
    "without bias": {"bias": False, "batch_first": True},
}


@pytest.mark.parallel([1, 2, 3])
@pytest.mark.parametrize("weights", [True, False])
@pytest.mark.parametrize("name", OPTIONS)
def test_multi_head_attention_equals_serial(name: str, weights: bool) -> None:
    rng = random.Random(name)
    torch.manual_seed(0)
    module = nn.MultiheadAttention(8, 2, **OPTIONS[name]).double()
    names = [n for n, _ in module.named_parameters()]
    first = OPTIONS[name].get("batch_first", False)
    query = random_tensor(rng, (3, 5, 8) if first else (5, 3, 8))
    features = OPTIONS[name].get("kdim", 8)
    key = random_tensor(rng, (3, 4, features) if first else (4, 3, features))
    padding = torch.tensor([[False, True, False, False]] * 3)
    mask = random_tensor(rng, (5, 4)) > 1

    def function(q: Tensor, k: Tensor, *parameters: Tensor) -> Any:
        state = dict(zip(names, parameters, strict=True))
        options = {"need_weights": weights, "attn_mask": mask, "key_padding_mask": padding}
        result = torch.func.functional_call(module, state, (q, k, k), options)
        return tuple(r for r in result if r is not None)

    parameters = [p.detach() for p in module.parameters()]
    for _ in range(3):
        agrees(function, [query, key], parameters, random_grid(rng), rng)
