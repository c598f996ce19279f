"""Which implementation of an op a program holds: the one of XLA, or a kernel for NVIDIA GPUs from `pallas_kernels`.

A kernel stands beside the XLA op in a program and is chosen when the program is lowered for its platform, so a program
exported for CUDA from a CPU holds it. What a kernel does not take is known from shapes, dtypes and options alone, while
the program is traced.
"""

from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
from jax.custom_batching import custom_vmap

Implementation = Literal["xla", "pallas"]

# Whether None takes kernels; benchmarks that compare the two turn it off.
KERNELS_BY_DEFAULT = True


def check_implementation(implementation: Implementation | None) -> None:
    """Raise a `ValueError` unless `implementation` is None or one of the names."""
    if implementation is not None and implementation not in get_args(Implementation):
        wanted = " or ".join(map(repr, get_args(Implementation)))
        raise ValueError(f"implementation: got {implementation!r}, wanted None, {wanted}")


def dispatch(
    implementation: Implementation | None,
    *,
    xla: Callable[..., Any],
    pallas: Callable[..., Any],
    declined: str | None,
    hopper_only: bool = False,
) -> Callable[..., Any]:
    """Choose between an XLA op and its kernel.

    Args:
        implementation: "xla" takes the XLA op; "pallas" takes the kernel or raises; None takes the XLA op, or with
            KERNELS_BY_DEFAULT the kernel in programs for CUDA if it takes the arguments, which lie on one device, and
            the GPU at hand can run it.
        xla: the op for any platform. Gradients, also the kernel's, are its gradients.
        pallas: the kernel, of the same arguments and results: pytrees of arrays.
        declined: why the kernel does not take these arguments; None if it does.
        hopper_only: the kernel runs on compute capability 9 only, and not on newer GPUs.

    Returns:
        The function to call with the op's arrays. It raises a `NotImplementedError` if implementation is "pallas" and
        the kernel does not take the arguments, or no GPU at hand can run it.

    Raises:
        ValueError: if implementation is no such name.
    """
    check_implementation(implementation)
    if implementation == "xla" or (implementation is None and not KERNELS_BY_DEFAULT):
        return xla
    declined = declined or _device_lacks(hopper_only)
    kernel = with_gradient(pallas, xla)

    def choose(*args: Any) -> Any:
        why = declined or ("arrays on a mesh of several devices" if _on_mesh(args) else None)
        if implementation == "pallas":
            if why is not None:
                raise NotImplementedError(f"implementation: got 'pallas', but the kernel does not take {why}")
            return kernel(*args)
        return xla(*args) if why is not None else jax.lax.platform_dependent(*args, cuda=kernel, default=xla)

    return choose


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


def _on_mesh(args: Any) -> bool:
    """Whether XLA is to split these arrays over devices, which it cannot do with a kernel; inside a `shard_map` not."""
    meshes = {jax.typeof(leaf).sharding.mesh for leaf in jax.tree.leaves(args)}
    return any(
        size > 1 and kind != jax.sharding.AxisType.Manual
        for mesh in meshes
        for size, kind in zip(mesh.axis_sizes, mesh.axis_types, strict=True)
    )
