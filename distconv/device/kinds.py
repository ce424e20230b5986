"""Differences between kinds of devices: names, numerics, thresholds, MPI and process groups.

A kind of device is torch's device type, such as "cpu", "cuda" or "xpu".
"""

from __future__ import annotations

import ctypes
import os
import socket
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from functools import cache, lru_cache, wraps
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity

from distconv.torch_private import set_limit, without_modes

# The kind of accelerator that torch finds, and names that differ between kinds.


KINDS = ("cuda", "xpu")
"""The device types of accelerators that a ProcessGrid accepts on any machine: GPUs of Nvidia, AMD
and Intel."""

_HOSTS = ("cpu", "meta")

_ACTIVITIES = {"cuda": ProfilerActivity.CUDA, "xpu": ProfilerActivity.XPU}

_MASKS = (
    *("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"),
    "ZE_AFFINITY_MASK",
)
"""Environment variables that choose the accelerators visible to a process."""


@cache  # It is called at every operator.
def is_accelerator(device: torch.device) -> bool:
    """Return whether a device is an accelerator: neither the CPU nor the meta device."""
    return device.type not in _HOSTS


def accelerator() -> str | None:
    """Return torch's device type of the accelerator of this machine, such as "cuda", or None.

    An accelerator without a backend of torch.distributed is ignored.
    """
    if not torch.accelerator.is_available():
        return None
    found = torch.accelerator.current_accelerator()
    return found.type if found is not None and backend_of(found.type) else None


@cache
def rehearsed() -> str:
    """Return the kind of accelerator that dry runs simulate: that of this machine, else "cuda"."""
    return accelerator() or KINDS[0]


def backend_of(kind: str) -> str | None:
    """Return torch.distributed's backend for the accelerator `kind`, such as "nccl", or None."""
    distributed = torch.distributed
    if not distributed.is_available():
        return {"cuda": "nccl", "xpu": "xccl"}.get(kind)
    try:
        backend: str = distributed.get_default_backend_for_device(kind)
    except ValueError:
        return None
    return None if backend == "gloo" else backend


def library_of(kind: str) -> str:
    """Return the name of the communication library for the device type `kind`, such as "RCCL"."""
    if kind == "cuda":
        return "RCCL" if torch.version.hip else "NCCL"
    return "oneCCL" if kind == "xpu" else backend_of(kind) or "torch.distributed"


def version_of_library(kind: str) -> str:
    """Return the version of the communication library for the device type `kind`, for messages.

    For NCCL it is the version that this process has loaded, which may differ from the version with
    which torch was built. For other kinds it is the version of torch.
    """
    if kind == "cuda":
        backend = getattr(torch.distributed, "ProcessGroupNCCL", None)
        loaded = getattr(backend, "get_runtime_nccl_version", torch.cuda.nccl.version)
        numbers: Any = loaded()
        return ".".join(map(str, numbers))
    return f"of torch {torch.__version__}"


def identities() -> tuple[str, ...]:
    """Return an identifying text for each accelerator that is visible to this process.

    The text is the same in all processes, so that ranks notice if they share an accelerator.
    """
    kind = accelerator()
    if kind is None:
        return ()
    module: Any = torch.get_device_module(kind)
    numbers = range(torch.accelerator.device_count())
    return tuple(_identity(i, module.get_device_properties(i)) for i in numbers)


def _identity(number: int, properties: Any) -> str:
    """Return the UUID of an accelerator with torch's device `properties`.

    If there is no UUID, return the host name, the variables that choose visible accelerators, and
    the accelerator's index `number`.
    """
    unique = getattr(properties, "uuid", None)
    if unique:
        return str(unique)
    masks = " ".join(f"{name}={os.environ[name]}" for name in _MASKS if name in os.environ)
    return f"{socket.gethostname()} {masks} {number}"


def wait_for_device(device: torch.device) -> None:
    """Make the host wait for all work queued on an accelerator; return at once on a host."""
    if is_accelerator(device):
        torch.accelerator.synchronize(device)


def random_states() -> list[Tensor]:
    """Return the states of torch's random generators of the CPU and, if any, the accelerator."""
    states, kind = [torch.get_rng_state()], accelerator()
    if kind is not None:
        states.append(torch.get_device_module(kind).get_rng_state())
    return states


def set_random_states(states: list[Tensor]) -> None:
    """Set the states of torch's random generators to those that `random_states` returned."""
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.get_device_module(accelerator()).set_rng_state(states[1])


def profiler_activities() -> list[ProfilerActivity]:
    """Return the activities for torch's profiler: those of the CPU and, if any, the accelerator."""
    kind = accelerator()
    here = [_ACTIVITIES[kind]] if kind in _ACTIVITIES else []
    return [ProfilerActivity.CPU, *here]


def built_for_nvidia() -> bool:
    """Return whether torch can use Nvidia's GPUs.

    Examples
    --------
    >>> import distconv.horovod as hvd
    >>> hvd.cuda_built() == (torch.version.cuda is not None)
    True
    """
    return torch.version.cuda is not None


def built_for_amd() -> bool:
    """Return whether torch can use AMD's GPUs.

    Examples
    --------
    >>> import distconv.horovod as hvd
    >>> hvd.rocm_built() == (torch.version.hip is not None)
    True
    """
    return torch.version.hip is not None


# Sizes from which one algorithm is faster than another, measured on each kind of device.
#
# A number measured on one kind of device does not apply to another kind. Sizes that only decide
# between kernels of CPUs are in the files of these kernels.


class Thresholds(NamedTuple):
    """Sizes in elements, for one kind of device.

    Attributes
    ----------
    overlapped, overlapped_transposed: the smallest block for which a convolution or a transposed
        convolution overlaps communication with computation.
    own_batch_norm: the largest block for which torch's own batch norm is used in training, if no
        communication is needed.
    most_indices: the most indices with which one indexed copy of several boxes is faster than a
        copy of each box. The indices of a plan stay in memory, 8 bytes each.
    own_group_norm: whether torch's own group norm is fast and accurate for blocks in channels last.
    gathered_attention: the most elements of keys and values that every rank gathers for attention,
        instead of an exchange of blocks.
    gathered_plane: the most elements of planes that every rank gathers to sample them, instead of
        requesting a box.
    gathered_rows: the most elements in all rows of a partitioned dimension that every rank gathers
        to select rows by new positions, instead of requesting rows.
    """

    overlapped: int
    overlapped_transposed: int
    own_batch_norm: float
    most_indices: int
    own_group_norm: bool
    gathered_attention: int
    gathered_plane: int
    gathered_rows: int


HOST = Thresholds(
    # Assembled, a network of 8 small layers took 0.91 of the time with blocks of 2**14 elements,
    # 0.98 with 2**15 and 1.015 with 2**16.
    overlapped=2**15 + 1,
    # Assembling was measured to be faster with fewer inputs than a quarter of the weights only.
    overlapped_transposed=0,
    # torch takes several times as long for larger blocks with rows last, and adds up too many
    # elements one by one with channels last to be accurate to 1e-5.
    own_batch_norm=2**18,
    # Measured in float32: eight boxes of 16 x 64 x 64 took 5 us by 4,160 indices, and 55 us box by
    # box; those of 64 x 128 x 128 42 us by 33,024 and 87 us; those of 128 x 512 x 512 1.85 ms by
    # 262,656 and 1.28 ms. Contiguous rows take one index each.
    most_indices=2**17,
    # torch takes several times as long, and computes the variance as E[x^2] - E[x]^2.
    own_group_norm=False,
    # `python -m benchmarks attention`, 2 ranks, 8 heads of 32 features: with 2**17 elements an
    # all-to-all took 1.53 of the time of a gather, 0.83 if causal. With 2**19 it took 1.08 and
    # 0.99, and the peak of its memory was 0.86 and 0.37 of the gather's.
    gathered_attention=2**17,
    # `python -m benchmarks warp`, 2 ranks: with 16 channels, asking for boxes took 1.20 of the time
    # of a gather with 2**16 elements, 0.95 with 2**18 and 0.65 with 2**22.
    gathered_plane=2**16,
    # `python -m benchmarks graph`, 2 ranks, 32 features: with new indices in each call, asking for
    # rows took 1.19 of the time of a gather with 2**17 elements, 0.89 with 2**21; with constant
    # indices 0.86 and less from 64 elements on.
    gathered_rows=2**18,
)

ACCELERATOR = Thresholds(
    # One H100, 3x3 convolutions with two neighbours, both passes: 2**26 elements is the smallest
    # block for which overlapping was faster (64 channels x 1024^2: 0.98 of the time).
    overlapped=2**26,
    overlapped_transposed=2**26,
    own_batch_norm=float("inf"),
    # An H100 launches a kernel in 5 to 10 us, and moves this many elements in as much time as it
    # takes to launch eight.
    most_indices=2**22,
    own_group_norm=True,
    # Not measured: torch's fused kernels need whole keys. From here on these take 1 GiB in float32.
    gathered_attention=2**28,
    # Not measured: an H100 moves 4 MiB in about the time that it takes to read bounds.
    gathered_plane=2**20,
    gathered_rows=2**20,
)


def thresholds(accelerator: bool) -> Thresholds:
    """Return the thresholds of accelerators if `accelerator` is true, else those of CPUs."""
    return ACCELERATOR if accelerator else HOST


# torch's settings that change results, and sizes from which libraries return wrong results.


_CHANNELS_LAST = "DISTCONV_CHANNELS_LAST"

_WRONG_VOLUMES = range(90800, 91500)
"""Versions of cuDNN, from 9.8 until 9.15, whose convolutions of a volume of 1.8e9 elements in half
precision were wrong without an error (pytorch/pytorch, issues 163539 and 166643)."""

FEWEST_IN_DOUBT = 2**30
"""The most elements of a block in half precision for which no wrong convolution is known."""


def in_doubt(elements: int) -> bool:
    """Return whether a convolution in half precision may return wrong results without an error.

    `elements` is the number of elements of the block. Libraries count with 32 bits, so results may
    be wrong above 2**31 elements, with some versions of cuDNN above 2**30.
    """
    version = torch.backends.cudnn.version()
    return elements > (FEWEST_IN_DOUBT if version in _WRONG_VOLUMES else 2**31)


def asks_for_channels_last() -> bool | None:
    """Return the environment variable DISTCONV_CHANNELS_LAST as a bool, or None if it is not set.

    Raises ValueError for values other than 1 and 0.
    """
    value = os.environ.get(_CHANNELS_LAST) or None
    if value not in (None, "0", "1"):
        raise ValueError(
            f"{_CHANNELS_LAST}={value!r}; set it to 1 or 0, or unset it, on every rank"
        )
    return None if value is None else value == "1"


def settings() -> dict[str, Any]:
    """Return torch's and distconv's settings that change results, by their full names."""
    cudnn, onednn = torch.backends.cudnn, torch.backends.mkldnn
    return {
        "torch.use_deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "torch.backends.cudnn.enabled": cudnn.enabled,
        "torch.backends.cudnn.benchmark": cudnn.benchmark,
        "torch.backends.cudnn.deterministic": cudnn.deterministic,
        "torch.backends.cudnn.allow_tf32": _takes_tf32(cudnn),
        "torch.backends.cuda.matmul.allow_tf32": _takes_tf32(torch.backends.cuda.matmul),
        "torch.backends.mkldnn.enabled": onednn.enabled,
        "torch.backends.mkldnn.allow_tf32": getattr(onednn, "allow_tf32", None),
        _CHANNELS_LAST: asks_for_channels_last(),
    }


@contextmanager
def ieee_float32() -> Iterator[None]:
    """Make GPUs compute in full float32 within the context, not in TF32 with a 10-bit mantissa."""
    switched = []
    for place in (torch.backends.cudnn, torch.backends.cuda.matmul):
        switch = _switch_of_tf32(place)
        switched.append((*switch, getattr(*switch)))
        setattr(*switch, False if switch[1] == "allow_tf32" else "ieee")
    try:
        yield
    finally:
        for where, name, before in switched:
            setattr(where, name, before)


def _takes_tf32(place: Any) -> bool:
    return getattr(*_switch_of_tf32(place)) in (True, "tf32")


def _switch_of_tf32(place: Any) -> tuple[Any, str]:
    """Return the object and the attribute name by which torch switches TF32 on or off.

    `place` is `torch.backends.cudnn` or `torch.backends.cuda.matmul`. From torch 2.9 on the
    attribute has a new name; once a program has used the new one, reading the old one raises.
    """
    try:
        _ = place.allow_tf32
    except RuntimeError:
        return getattr(place, "conv", place), "fp32_precision"
    return place, "allow_tf32"


# Whether an MPI accepts pointers to the memory of accelerators, by each vendor's query.


_CRAY = "MPICH_GPU_SUPPORT_ENABLED"
"""The environment variable that is 1 if Cray's MPI accepts pointers to the memory of GPUs."""

_QUERIES = {
    "cuda": "MPIX_Query_cuda_support",
    "hip": "MPIX_Query_rocm_support",
    "xpu": "MPIX_Query_ze_support",
}
"""Functions of Open MPI and MPICH that return whether pointers of a kind of GPU are accepted."""

_NUMBERS = {"cuda": 0, "xpu": 1, "hip": 2}
"""The number of each kind of GPU as an argument of MPICH's `MPIX_GPU_query_support`."""


def is_gpu_aware(library: ctypes.CDLL, kind: str) -> bool:
    """Return whether the MPI loaded as `library` accepts pointers to the memory of `kind` GPUs."""
    if os.environ.get(_CRAY):
        return os.environ[_CRAY] == "1"
    vendor = "hip" if kind == "cuda" and torch.version.hip else kind
    query = getattr(library, _QUERIES.get(vendor, ""), None)
    if query is not None:
        return bool(query())
    query = getattr(library, "MPIX_GPU_query_support", None)
    if query is None or vendor not in _NUMBERS:
        return False
    answer = ctypes.c_int(0)
    return query(_NUMBERS[vendor], ctypes.byref(answer)) == 0 and bool(answer.value)


# NCCL by cupy: cupy's bindings, and the addresses of streams.


def bindings() -> Any:
    """Return cupy's module for NCCL; raises ImportError without cupy."""
    from cupy.cuda import nccl

    return nccl


def why_no_cupy(kind: str) -> str | None:
    """Return the reason why cupy's NCCL cannot be used with the accelerator `kind`, or None."""
    if kind != "cuda":
        return f"cupy has no communication library for devices of kind {kind}"
    try:
        nccl = bindings()
    except ImportError as error:
        return f"cupy is missing ({error}); install cupy-cuda13x, or -cuda12x for CUDA 12"
    return None if nccl.available else "cupy finds no NCCL; install nvidia-nccl-cu13, or -cu12"


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which `device` is CUDA's current device, also for cupy."""
    return torch.cuda.device(device)


def address_of(stream: torch.Stream) -> int:
    """Return the address of a stream, which cupy's functions take as an argument."""
    address: int | None = getattr(stream, "native_handle", None)
    if address is None:  # older versions of torch
        ids: Any = {n: getattr(stream, n) for n in ("stream_id", "device_index", "device_type")}
        address = torch.cuda.Stream(**ids).cuda_stream
    return address


# Process groups of torch.distributed between accelerators: construction and errors.


def why_no_backend(kind: str) -> str | None:
    """Return the reason why torch cannot send messages between `kind` accelerators, or None."""
    distributed, backend = torch.distributed, backend_of(kind)
    if backend is None:
        return f"torch.distributed has no backend for {kind}"
    if not distributed.is_backend_available(backend):
        return f"this torch has no {backend.upper()}"
    if not hasattr(distributed, _class_of(backend)):
        return f"torch.distributed supports {backend} only in default groups"
    return None


def warn_where_errors_stay_unknown(kind: str) -> None:
    """Warn if this version of torch reports no errors of process groups between accelerators.

    Python shows the warning once.
    """
    backend = backend_of(kind)
    made = getattr(torch.distributed, _class_of(backend or ""), None)
    if made is not None and not hasattr(made, "get_error"):
        warnings.warn(
            f"ProcessGrid: the groups of {library_of(kind)} of torch {torch.__version__} report "
            "no errors: torch ends the job itself, later and with less information. torch 2.7 or "
            "newer reports errors of NCCL",
            stacklevel=2,
        )


def make_group(store: Any, rank: int, size: int, device: torch.device, limit: timedelta) -> Any:
    """Return a process group between the accelerators of `size` ranks. Collective.

    The ranks connect by the torch.distributed store `store`. A message that takes longer than
    `limit` is an error.
    """
    backend = backend_of(device.type)
    assert backend is not None
    made: Any = getattr(torch.distributed, _class_of(backend))
    options = made.Options(is_high_priority_stream=True)
    set_limit(options, limit)
    return made(store, rank, size, options)


def error_of(group: Any) -> str | None:
    """Return the name of the error that torch has detected in a process group, or None."""
    error: str = group.get_error().name if hasattr(group, "get_error") else "SUCCESS"
    return None if error == "SUCCESS" else error


def _class_of(backend: str) -> str:
    return f"ProcessGroup{backend.upper()}"


# Constant tensors, made once for each device and reused. A new one would be copied from the host; a
# copy to a GPU waits for all work queued on the GPU.

Arguments = ParamSpec("Arguments")
Made = TypeVar("Made")

MOST_CONSTANTS = 256
"""The number of cached results of each function on CPUs; the least recently used is freed first."""


@contextmanager
def for_later_calls() -> Iterator[None]:
    """Turn off dispatch modes and inference mode within the context, which creates cached tensors.

    Later calls may run under other modes. So dispatch modes do not record how the tensors are
    created, and autograd can save the tensors.
    """
    with without_modes(), torch.inference_mode(False):
        yield


def remembered(
    make: Callable[Concatenate[torch.device, Arguments], Made],
) -> Callable[Concatenate[torch.device, Arguments], Made]:
    """Decorate the function `make` to cache the tensors that it returns, which are read-only.

    On CPUs the last `MOST_CONSTANTS` results are kept. On GPUs all results are kept until the
    process ends, as captured graphs may read them. Dispatch modes do not record how the tensors are
    created, so the first recorded step has the same operators as later steps.
    """
    made = for_later_calls()(make)
    last, every = lru_cache(maxsize=MOST_CONSTANTS)(made), cache(made)

    @wraps(make)
    def look_up(device: torch.device, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Made:
        kept = every if is_accelerator(device) else last
        return kept(device, *args, **kwargs)  # type: ignore[arg-type]

    return look_up
