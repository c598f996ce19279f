"""Which implementation of an op a program holds: the one of XLA, or a kernel from `pallas_kernels`.

Kernels, one for NVIDIA GPUs and one for TPUs, stand beside the XLA op in a program and are chosen when the program is
lowered for its platform, so a program exported for CUDA or TPU from a CPU holds its kernel. What a kernel does not take
is known from shapes, dtypes and options alone, while the program is traced.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import mlir

Implementation = Literal["xla", "pallas"]

# The platforms ("cuda", "tpu") on which None takes kernels. TPU not before they have run on one: compiled for TPUs and
# interpreted they have been.
KERNELS_BY_DEFAULT = frozenset({"cuda"})

ON_MESH = "arrays on a mesh of several devices"  # XLA cannot split a kernel


class Kernel(NamedTuple):
    """A platform's kernel for an op, of the same arguments and results: pytrees of arrays."""

    run: Callable[..., Any]
    declined: str | None  # why it does not take these arguments; None if it does


def check_implementation(implementation: Implementation | None) -> None:
    """Raise a `ValueError` unless `implementation` is None or one of the names."""
    if implementation is not None and (
        not isinstance(implementation, str) or implementation not in get_args(Implementation)
    ):
        wanted = " or ".join(map(repr, get_args(Implementation)))
        raise ValueError(f"implementation: got {implementation!r:.80}, wanted None, {wanted}")


def dispatch(
    implementation: Implementation | None,
    *,
    xla: Callable[..., Any],
    cuda: Kernel,
    tpu: Kernel,
    hopper_only: bool = False,
    over_devices: bool = False,
) -> Callable[..., Any]:
    """Choose between an XLA op and its kernels.

    Args:
        implementation: "xla" takes the XLA op; "pallas" takes the platform's kernel or raises; None takes the XLA op,
            or on the platforms of KERNELS_BY_DEFAULT the kernel if it takes the arguments, which lie on one device, and
            the GPU at hand can run it.
        xla: the op for any platform. Gradients, also a kernel's, are its gradients.
        cuda: the kernel for NVIDIA GPUs.
        tpu: the kernel for TPUs.
        hopper_only: the kernel for GPUs runs on compute capability 9 only, and not on newer ones.
        over_devices: the kernels take arrays on a mesh of several devices.

    Returns:
        The function to call with the op's arrays. It raises a `NotImplementedError` if implementation is "pallas" and
        no kernel takes the arguments, or that of the device at hand does not.

    Raises:
        ValueError: if implementation is no such name.
    """
    check_implementation(implementation)
    if implementation == "xla" or (implementation is None and not KERNELS_BY_DEFAULT):
        return xla
    declined = {
        platform: declined_on(platform, cuda.declined, tpu.declined, hopper_only=hopper_only)
        for platform in ("cuda", "tpu")
    }
    taken = [
        (platform, kernel.run)
        for platform, kernel in (("cuda", cuda), ("tpu", tpu))
        if declined[platform] is None and (implementation == "pallas" or platform in KERNELS_BY_DEFAULT)
    ]
    kernels = {platform: with_gradient(only_for(platform, run), xla) for platform, run in taken}

    # A CPU has no kernel, but interprets any.
    declined["cpu"] = None if kernels else " nor ".join(str(why) for why in declined.values())

    def choose(*args: Any) -> Any:
        split = not over_devices and on_mesh(args)
        if implementation is None:
            return xla(*args) if split or not kernels else jax.lax.platform_dependent(*args, **kernels, default=xla)
        at_hand = lowered_for(jax.default_backend())
        why = declined[at_hand] if at_hand in declined else declined_on(at_hand, None, None)
        why = why or (ON_MESH if split else None)
        if why is not None:
            raise NotImplementedError(f"implementation: got 'pallas', but the kernel does not take {why}")
        interpreted = with_gradient(taken[0][1], xla)
        return jax.lax.platform_dependent(*args, **kernels, cpu=interpreted)

    return choose


def declined_on(platform: str, cuda: str | None, tpu: str | None, *, hopper_only: bool = False) -> str | None:
    """Why no kernel runs on a platform; None if its kernel does.

    Args:
        platform: of a device or backend.
        cuda: why the kernel for NVIDIA GPUs does not take the arguments; None if it does.
        tpu: why that for TPUs does not.
        hopper_only: as in `dispatch`.
    """
    declined = {"cuda": cuda or _device_lacks(hopper_only), "tpu": tpu}
    return declined.get(lowered_for(platform), f"a device of platform {platform}")


def only_for(platform: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel, which stands in a program for several platforms too: JAX lowers it for its own alone.

    For the others NaN, which `platform_dependent` never asks for: JAX lowers each choice for all platforms.
    """

    def run(*args: Any) -> Any:
        traced, shapes = jax.make_jaxpr(kernel, return_shape=True)(*args)
        out = _kernel.bind(*jax.tree.leaves(args), kernel=traced, platform=platform)
        return jax.tree.unflatten(jax.tree.structure(shapes), out)

    return run


def _lower(ctx: mlir.LoweringRuleContext, *args: Any, kernel: Any, platform: str, at: str | None) -> Any:
    def nothing(*_: Any) -> Any:
        return [jnp.full(out.shape, jnp.nan, out.dtype) for out in kernel.out_avals]

    return mlir.lower_fun(jaxpr_as_fun(kernel) if platform == at else nothing, multiple_results=True)(ctx, *args)


_kernel = Primitive("kernel")
_kernel.multiple_results = True
_kernel.def_impl(lambda *args, kernel, platform: jaxpr_as_fun(kernel)(*args))
_kernel.def_abstract_eval(lambda *args, kernel, platform: kernel.out_avals)
mlir.register_lowering(_kernel, partial(_lower, at=None))
mlir.register_lowering(_kernel, partial(_lower, at="cuda"), platform="cuda")
mlir.register_lowering(_kernel, partial(_lower, at="tpu"), platform="tpu")


def with_gradient(pallas: Callable[..., Any], xla: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel, with the XLA op's gradient; under `vmap` it is the XLA op altogether."""

    @custom_vmap
    def forward(*args: Any) -> Any:
        return pallas(*args)

    @forward.def_vmap
    def forward_vmap(axis_size: int, in_batched: Any, *args: Any) -> Any:
        axes = jax.tree.map(lambda batched: 0 if batched else None, in_batched)
        out = jax.vmap(xla, in_axes=axes, axis_size=axis_size)(*args)
        return out, jax.tree.map(lambda _: True, out)

    @jax.custom_vjp
    def op(*args: Any) -> Any:
        return forward(*args)

    def op_forward(*args: Any) -> tuple[Any, Any]:
        return forward(*args), args

    def op_backward(args: Any, cotangents: Any) -> Any:
        return jax.vjp(xla, *args)[1](cotangents)

    op.defvjp(op_forward, op_backward)
    return op


def lowered_for(platform: str) -> str:
    """The platform of a device or backend by the name that programs are lowered for."""
    return {"gpu": "cuda"}.get(platform, platform)


def _device_lacks(hopper_only: bool) -> str | None:
    """What the GPU at hand lacks to run a kernel; None if it can, or if there is none to ask, as in an export."""
    if jax.default_backend() != "gpu":
        return None
    capability = getattr(jax.devices()[0], "compute_capability", "")
    major = int(capability.split(".")[0]) if capability[:1].isdigit() else 0
    if major < 9 or (hopper_only and major > 9):
        wanted = "9" if hopper_only else "9 or more"
        return f"a GPU of compute capability {capability or 'unknown'} (wanted: {wanted})"
    return None


def device_axis(
    implementation: Implementation | None, parts: tuple[int, ...], args: Any
) -> tuple[jax.sharding.AbstractMesh, str] | None:
    """Where each device can run a kernel for heads or channels of its own.

    Args:
        implementation: as in `dispatch`; only what is asked for, "pallas", is divided.
        parts: numbers of heads, groups or channels.
        args: arrays.

    Returns:
        The mesh of the arrays and its one axis of several devices, whose size divides all parts; None if there is none.
    """
    meshes = _meshes(args) if implementation == "pallas" else set()
    if len(meshes) != 1:
        return None
    (mesh,) = meshes
    axes = [name for name, size in mesh.shape.items() if size > 1]
    return (mesh, axes[0]) if len(axes) == 1 and all(part % mesh.shape[axes[0]] == 0 for part in parts) else None


def over_devices(
    op: Callable[..., Any],
    over: tuple[jax.sharding.AbstractMesh, str],
    inputs: tuple[Any, ...],
    outputs: tuple[int | None, ...],
) -> Callable[..., Any]:
    """Let each device run an op for its part.

    Args:
        op: any, which may hold kernels.
        over: what `device_axis` gave.
        inputs: of each argument of the op, which of its axes is divided; None of one that every device gets whole; of a
            tuple of arrays a tuple.
        outputs: of each result.

    Returns:
        The function to call with whole arrays.
    """
    mesh, name = over

    def specs(divided: Any) -> Any:
        if isinstance(divided, tuple):
            return tuple(map(specs, divided))
        return jax.P() if divided is None else jax.P(*(None,) * divided, name)

    return jax.shard_map(op, mesh=mesh, in_specs=specs(inputs), out_specs=specs(outputs), check_vma=False)


def on_mesh(args: Any) -> bool:
    """Whether XLA is to split these arrays over devices, which it cannot do with a kernel; inside a `shard_map` not."""
    return bool(_meshes(args))


def _meshes(args: Any) -> set[Any]:
    """Meshes over whose devices XLA is to split these arrays."""
    return {
        mesh
        for mesh in {jax.typeof(leaf).sharding.mesh for leaf in jax.tree.leaves(args)}
        for size, kind in zip(mesh.axis_sizes, mesh.axis_types, strict=True)
        if size > 1 and kind != jax.sharding.AxisType.Manual
    }
