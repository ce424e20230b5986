"""JAX, whose compiler cuts a program over devices: here as many parts of the CPU of one process.

A network of torch is traced, and its layers are computed by functions of JAX.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn

from benchmarks.measuring.network import Network
from benchmarks.peers.peer import Step, Task
from distconv.grid.ranks import world

_RANKS = world().size
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={_RANKS}"

import jax  # noqa: E402  after the number of devices is said
import jax.numpy as jnp  # noqa: E402
from jax import lax  # noqa: E402
from jax.sharding import NamedSharding, PartitionSpec  # noqa: E402

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_platforms", "cpu")

NAME = f"JAX {jax.__version__}"


def compared(network: Network) -> Network:
    """Return the network for the sample on which gradients are compared: volumes of half the side.

    The float64 step of whole ones takes minutes.
    """
    samples, channels, *spatial = network.shape
    if len(spatial) < 3:
        return network
    return network._replace(shape=(samples, channels, *(n // 2 for n in spatial)))


def step(task: Task, ranks: int) -> Step:
    """Return the step of a task with the first spatial dimension cut, on rank 0 alone."""
    mesh = jax.make_mesh((ranks,), ("rows",))
    cut = NamedSharding(mesh, PartitionSpec(None, "rows"))
    # The compiler's kernels for CPUs have channels last.
    x, y = (jax.device_put(jnp.asarray(t.movedim(1, -1).numpy()), cut) for t in (task.x, task.y))
    whole = NamedSharding(mesh, PartitionSpec())
    parameters = {
        name: jax.device_put(jnp.asarray(p.detach().numpy()), whole)
        for name, p in task.module.named_parameters()
    }
    network = _translated(task.module)

    @jax.jit
    def gradients(parameters: Any, x: Any, y: Any) -> Any:
        return jax.grad(lambda p: ((network(p, x) - y) ** 2).mean())(parameters)

    made: dict[str, Any] = {}

    def run() -> None:
        made.update(jax.block_until_ready(gradients(parameters, x, y)))

    def found() -> list[Tensor]:
        return [torch.tensor(jax.device_get(made[name])) for name in parameters]

    return Step(run, found, ranks=1)


def _translated(module: nn.Module) -> Callable[[Any, Any], Any]:
    """Return a function of parameters and input that computes what the module does in training."""
    traced = fx.symbolic_trace(module)
    functions: dict[Any, Any] = {
        torch.cat: lambda xs, _: jnp.concatenate(xs, -1),
        operator.add: operator.add,
        "relu": jax.nn.relu,
    }

    def network(parameters: Any, x: Any) -> Any:
        values: dict[fx.Node, Any] = {}
        for node in traced.graph.nodes:
            args = fx.map_arg(node.args, values.__getitem__)
            if node.op == "placeholder":
                values[node] = x
            elif node.op == "call_module":
                prefix = f"{node.target}."
                own = {k[len(prefix) :]: p for k, p in parameters.items() if k.startswith(prefix)}
                values[node] = _layer(traced.get_submodule(node.target), own, *args)
            elif node.op == "output":
                return args[0]
            else:
                values[node] = functions[node.target](*args)
        raise AssertionError("a graph without output")

    return network


def _layer(part: Any, own: dict[str, Any], x: Any) -> Any:
    """Return what a layer makes of `x`, with channels last, by its own parameters."""
    space = x.ndim - 2
    if isinstance(part, nn.Identity):
        return x
    if isinstance(part, nn.ReLU):
        return jax.nn.relu(x)
    if isinstance(part, (nn.MaxPool2d, nn.MaxPool3d)):
        window = 1, *(part.kernel_size,) * space, 1
        return lax.reduce_window(x, -jnp.inf, lax.max, window, window, "VALID")
    if isinstance(part, (nn.BatchNorm2d, nn.GroupNorm)):
        groups = part.num_groups if isinstance(part, nn.GroupNorm) else x.shape[-1]
        grouped = x.reshape(*x.shape[:-1], groups, -1)
        samples = () if isinstance(part, nn.GroupNorm) else (0,)
        axes = *samples, *range(1, x.ndim - 1), x.ndim
        mean, variance = grouped.mean(axes, keepdims=True), grouped.var(axes, keepdims=True)
        normal = ((grouped - mean) / jnp.sqrt(variance + part.eps)).reshape(x.shape)
        return normal * own["weight"] + own["bias"]
    steps: dict[str, Any]
    if isinstance(part, (nn.ConvTranspose2d, nn.ConvTranspose3d)):
        weight = jnp.flip(own["weight"].swapaxes(0, 1), tuple(range(2, x.ndim)))
        steps = {"window_strides": (1,) * space, "lhs_dilation": part.stride}
        sizes: Any = zip(part.kernel_size, part.padding, strict=True)
        ends: Any = [k - 1 - p for k, p in sizes]
    elif isinstance(part, (nn.Conv2d, nn.Conv3d)):
        weight, steps, ends = own["weight"], {"window_strides": part.stride}, part.padding
    else:
        raise NotImplementedError(f"{type(part).__name__} is not translated")
    names = "DHW"[-space:]
    steps["dimension_numbers"] = f"N{names}C", f"OI{names}", f"N{names}C"
    result = lax.conv_general_dilated(x, weight, padding=[(n, n) for n in ends], **steps)
    return result + own["bias"] if "bias" in own else result
