"""The samples of torch's own operator database give the serial results, or are refused."""

from __future__ import annotations

import random
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from mpi4py import MPI
from torch import Tensor
from torch.utils import _pytree as pytree

import distconv as dc
from tests.support.serial import agrees, random_grid, random_layout
from tests.support.strategies import TIMES, derivable
from tests.support.verdicts import first_report

BY_DAY = 24
"""Operators by day, others for each seed; at night there are all."""
SAMPLES = 4 if TIMES == 1 else 16
"""The most samples of an operator."""
VANISHING = 1e-4
"""Smaller gradients are rounding errors, as a norm over one element has them."""
REFUSED = set(
    """
    _chunk_cat _native_batch_norm_legit _segment_reduce _softmax_backward_data _unsafe_masked_index
    _unsafe_masked_index_put_accumulate _upsample_bilinear2d_aa as_strided as_strided_copy
    as_strided_scatter gather geqrf gradient grid_sampler_2d grid_sampler_3d hash_tensor histogramdd
    index_add index_copy index_fill index_reduce index_select linalg.lstsq linalg.matrix_rank
    linalg.norm linalg.vector_norm linspace logspace masked.norm max_pool2d_with_indices_backward
    native_batch_norm native_group_norm native_layer_norm nn.functional.ctc_loss
    nn.functional.embedding nn.functional.embedding_bag nn.functional.fractional_max_pool2d
    nn.functional.fractional_max_pool3d nn.functional.linear_cross_entropy
    nn.functional.pairwise_distance nn.functional.prelu norm scatter scatter_add scatter_reduce
    searchsorted slice tensor_split torch.ops.aten._safe_softmax.default
    """.split()
)
"""Operators of which some samples are refused on partitioned tensors."""
RANDOM = """
    attention bernoulli cauchy dropout empty exponential geometric lowrank multinomial normal rand
    rrelu uniform
""".split()
"""Parts of the names of operators that draw numbers, or leave memory as it is."""


def _split(sample: Any) -> tuple[list[Tensor], Callable[..., list[Tensor]]]:
    """Return the tensors in a sample, and the call of its operator on such tensors."""
    operator, call = sample
    leaves, spec = pytree.tree_flatten(call)
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

    def function(*tensors: Tensor) -> list[Tensor]:
        given = dict(zip(places, tensors, strict=True))
        input, args, named = pytree.tree_unflatten(
            [given.get(i, leaf) for i, leaf in enumerate(leaves)], spec
        )
        return [y for y in pytree.tree_leaves(operator(input, *args, **named)) if _is_tensor(y)]

    return [leaves[i].detach().clone() for i in places], function


def _is_tensor(x: Any) -> bool:
    return isinstance(x, Tensor)


def _is_out_of_reach(x: Tensor) -> bool:
    return x.layout != torch.strided or x.dtype == torch.complex32


def _outcome(sample: Any, grid: dc.ProcessGrid, rng: random.Random) -> bool | str | None:
    """Compare one sample; return whether it is refused, a report of a fault, or None if skipped."""
    tensors, function = _split(sample)
    try:
        leaves = [t.clone().requires_grad_(t.is_floating_point()) for t in tensors]
        results = function(*leaves)
    except Exception:
        return None
    if not tensors or not results or any(map(_is_out_of_reach, (*tensors, *results))):
        return None
    # Whether a tensor without elements has a gradient is not alike in torch's own kernels.
    fixed = not derivable(results) or not all(t.numel() for t in tensors)
    cut = [i for i in range(len(tensors)) if i == 0 or rng.random() < 0.5]
    order = [*cut, *(i for i in range(len(tensors)) if i not in cut)]

    def call(*operands: Tensor) -> list[Tensor]:
        by_place = dict(zip(order, operands, strict=True))
        return function(
            *(by_place[i].detach() if fixed else by_place[i] for i in range(len(order)))
        )

    inputs, plain = [tensors[i] for i in cut], [tensors[i] for i in order[len(cut) :]]
    layouts = [random_layout(rng, grid, x.shape) for x in inputs]
    report, refused = None, False
    try:
        agrees(call, inputs, plain, grid, random.Random(0), layouts, 1e-8, VANISHING)
    except dc.UnsupportedOperation:
        refused = True
    except Exception:
        report = (
            f"{[(tuple(x.shape), y) for x, y in zip(inputs, layouts, strict=True)]} on {grid}\n"
        )
        report += traceback.format_exc()
    report = first_report(report)
    everywhere = MPI.COMM_WORLD.allgather(refused)
    if report is None and len(set(everywhere)) > 1:
        report = f"refused on some ranks: {everywhere}"
    return refused if report is None else report


@pytest.mark.nightly
@pytest.mark.parallel([2, 4])
@pytest.mark.filterwarnings("ignore")
def test_torchs_own_samples_equal_serial_or_are_refused(request: pytest.FixtureRequest) -> None:
    # Imports numpy's testing tools and takes seconds, so not when tests are collected.
    invocations = pytest.importorskip("torch.testing._internal.common_methods_invocations")
    # The import forbids programs to choose settings of cuDNN, for all later tests.
    settings = torch.backends.disable_global_flags.__globals__
    settings["__allow_nonbracketed_mutation_flag"] = True
    rng = random.Random(request.config.getoption("--hypothesis-seed") or 0)
    database = [op for op in invocations.op_db if not any(part in op.name for part in RANDOM)]
    chosen = database if TIMES > 1 else rng.sample(database, BY_DAY)
    faults, refused = [], set()
    for operator in chosen:
        types = operator.supported_dtypes("cpu")
        dtype = torch.float64 if torch.float64 in types else torch.int64
        if dtype not in types:
            continue
        torch.manual_seed(0)
        samples = list(operator.sample_inputs("cpu", dtype))
        chosen_samples = rng.sample(samples, min(SAMPLES, len(samples)))
        # Some are drawn in the order of a set of strings, another one in each process.
        calls = [(sample.input, sample.args, sample.kwargs) for sample in chosen_samples]
        for sample in MPI.COMM_WORLD.bcast(calls):
            found = _outcome((operator.op, sample), random_grid(rng), rng)
            if isinstance(found, str):
                faults.append(f"{operator.name}: {found}")
            elif found:
                refused.add(operator.name)
    assert not faults, f"{len(faults)} faults:\n" + "\n".join(faults)
    assert refused <= REFUSED, f"add to REFUSED, or support: {sorted(refused - REFUSED)}"
