"""The weights of a model as one frozen pytree; every array keeps the orientation (out, in) that checkpoints have."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PRNGKeyArray

from mamba_jax.arguments import FLOAT_DTYPES, describe, float_dtype
from mamba_jax.config import MambaConfig


@struct.dataclass
class Mamba1Layer:
    """One Mamba-1 layer. dt_bias, A_log and D are float32 whatever the model's dtype."""

    norm: Float[Array, "m"]
    norm_bias: Float[Array, "m"] | None
    in_proj: Float[Array, "2*d m"]
    in_proj_bias: Float[Array, "2*d"] | None
    conv: Float[Array, "d w"]
    conv_bias: Float[Array, "d"] | None
    x_proj: Float[Array, "r+2*n d"]
    dt_proj: Float[Array, "d r"]
    dt_bias: Float[Array, "d"]
    A_log: Float[Array, "d n"]
    D: Float[Array, "d"]
    out_proj: Float[Array, "m d"]
    out_proj_bias: Float[Array, "m"] | None


@struct.dataclass
class Mamba2Layer:
    """One Mamba-2 layer. dt_bias, A_log and D are float32 whatever the model's dtype."""

    norm: Float[Array, "m"]
    norm_bias: Float[Array, "m"] | None
    in_proj: Float[Array, "2*d+2*g*n+h m"]
    in_proj_bias: Float[Array, "2*d+2*g*n+h"] | None
    conv: Float[Array, "d+2*g*n w"]
    conv_bias: Float[Array, "d+2*g*n"] | None
    dt_bias: Float[Array, "h"]
    A_log: Float[Array, "h"]
    D: Float[Array, "h"] | Float[Array, "h p"]
    gated_norm: Float[Array, "d"] | None
    out_proj: Float[Array, "m d"]
    out_proj_bias: Float[Array, "m"] | None


Layer = Mamba1Layer | Mamba2Layer
FLOAT32_FIELDS = frozenset({"dt_bias", "A_log", "D"})
MAX_A_LOG = 88.0  # A = -exp(A_log) reads larger ones as this: an infinite A would make NaN of a step of 0
_SHOWN = 10  # weights that an error lists before it counts the rest


@dataclasses.dataclass(frozen=True)
class TextInfo:
    """What a checkpoint says about text: static, and no part of any program.

    Attributes:
        tokenizer: folder (or hub id) that holds the tokenizer, if the checkpoint came with one.
        eos_token_ids: ids that end a generation unless the caller names others.
        bos_token_id: id that begins a text, if the checkpoint names one.
        pad_token_id: id used for padding, if the checkpoint names one; only written back by `save`.
    """

    tokenizer: str | None = None
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    pad_token_id: int | None = None


@struct.dataclass
class Params:
    """A model: weights as leaves, architecture and text information as static fields."""

    embedding: Float[Array, "v m"]
    layers: tuple[Layer, ...]
    norm_f: Float[Array, "m"]
    norm_f_bias: Float[Array, "m"] | None
    lm_head: Float[Array, "v m"] | None  # None: tied to the embedding
    config: MambaConfig = struct.field(pytree_node=False)
    text: TextInfo = struct.field(pytree_node=False, default=TextInfo())

    @property
    def dtype(self) -> jnp.dtype:
        """Dtype of the weights and of the activations between layers."""
        return self.embedding.dtype

    def __repr__(self) -> str:
        leaves = jax.tree.leaves(self)
        count = sum(getattr(leaf, "size", 0) for leaf in leaves)
        return f"Params({len(leaves)} weights, {count:,} parameters, {self.config}, {self.text})"


def layer_shapes(config: MambaConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of one layer's weights by field name; fields the architecture does not have are left out."""
    c, m, d = config, config.d_model, config.d_inner
    shapes: dict[str, tuple[int, ...]] = {
        "norm": (m,),
        "in_proj": (c.in_proj_width, m),
        "conv": (c.conv_channels, c.d_conv),
        "out_proj": (m, d),
    }
    if c.block_norm == "layer":
        shapes["norm_bias"] = (m,)
    if c.conv_bias:
        shapes["conv_bias"] = (c.conv_channels,)
    if c.proj_bias:
        shapes |= {"in_proj_bias": (c.in_proj_width,), "out_proj_bias": (m,)}
    if c.layer == "mamba1":
        shapes |= {
            "x_proj": (c.dt_rank + 2 * c.d_state, d),
            "dt_proj": (d, c.dt_rank),
            "dt_bias": (d,),
            "A_log": (d, c.d_state),
            "D": (d,),
        }
    else:
        shapes |= {
            "dt_bias": (c.nheads,),
            "A_log": (c.nheads,),
            "D": (c.nheads, c.headdim) if c.D_has_hdim else (c.nheads,),
        }
        if c.gated_norm:
            shapes["gated_norm"] = (d,)
    return shapes


def build_params(
    config: MambaConfig,
    dtype: DTypeLike,
    make: Callable[[str, tuple[int, ...], jnp.dtype], Any],
    text: TextInfo = TextInfo(),
) -> Params:
    """Build a `Params` by calling `make(path, shape, dtype)` for each weight; paths read "layers.3.in_proj".

    Raises:
        ValueError: if weights may not have that dtype.
    """
    dtype, c = float_dtype("dtype", dtype), config
    cls = Mamba1Layer if c.layer == "mamba1" else Mamba2Layer
    names = [field.name for field in dataclasses.fields(cls)]

    def layer(i: int) -> Layer:
        shapes = layer_shapes(c)
        leaves: dict[str, Any] = {
            name: make(f"layers.{i}.{name}", shapes[name], jnp.dtype("float32") if name in FLOAT32_FIELDS else dtype)
            if name in shapes
            else None
            for name in names
        }
        return cls(**leaves)

    v, m = c.padded_vocab_size, c.d_model
    return Params(
        embedding=make("embedding", (v, m), dtype),
        layers=tuple(layer(i) for i in range(c.n_layer)),
        norm_f=make("norm_f", (m,), dtype),
        norm_f_bias=make("norm_f_bias", (m,), dtype) if c.block_norm == "layer" else None,
        lm_head=None if c.tie_embeddings else make("lm_head", (v, m), dtype),
        config=config,
        text=text,
    )


def param_shapes(config: MambaConfig, dtype: DTypeLike = jnp.float32) -> Params:
    """The model as `jax.ShapeDtypeStruct` leaves: for ahead-of-time compilation and for checking a checkpoint."""
    return build_params(config, dtype, lambda _, shape, dt: jax.ShapeDtypeStruct(shape, dt))


@functools.lru_cache(maxsize=64)
def _wanted(config: MambaConfig, dtype: np.dtype) -> tuple[Any, list[tuple[tuple[int, ...], np.dtype]], list[str]]:
    """Structure of the weights of an architecture; of each leaf its shape and dtype, and its path."""
    with_paths, structure = jax.tree_util.tree_flatten_with_path(param_shapes(config, dtype))
    paths = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in with_paths]
    return structure, [(leaf.shape, leaf.dtype) for _, leaf in with_paths], paths


def check_params(params: Params) -> None:
    """Raise a `ValueError` unless the weights are those of `params.config`; it names every one that is not.

    All are to be of the embedding's dtype but A_log, D and dt_bias, which are float32.
    """
    if not isinstance(params, Params):
        raise ValueError(f"params: got a {type(params).__name__}, wanted what mamba_jax.load or init_params gives")
    dtype = getattr(params.embedding, "dtype", None)
    if not isinstance(dtype, np.dtype) or dtype.name not in FLOAT_DTYPES:
        raise ValueError(f"params.embedding: got {describe(params.embedding)}, wanted {' or '.join(FLOAT_DTYPES)}")
    structure, wanted, paths = _wanted(params.config, dtype)
    leaves, found = jax.tree.flatten(dataclasses.replace(params, text=TextInfo()))
    if found == structure and [(getattr(x, "shape", None), getattr(x, "dtype", None)) for x in leaves] == wanted:
        return
    with_paths = jax.tree_util.tree_leaves_with_path(params)
    got = {jax.tree_util.keystr(path, simple=True, separator="."): describe(leaf) for path, leaf in with_paths}
    due = {path: f"{dt}{list(shape)}" for path, (shape, dt) in zip(paths, wanted, strict=True)}
    wrong = [
        f"{path}: got {got.get(path, 'nothing')}, wanted {due.get(path, 'nothing')}"
        for path in due | got
        if got.get(path) != due.get(path)
    ] or [f"{type(params.layers).__name__} of layers"]
    rest = f"; and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
    raise ValueError(
        f"params: not the weights of params.config: {'; '.join(wrong[:_SHOWN])}{rest} (mamba_jax.cast_params changes "
        "dtypes)"
    )


def check_axes(params: Params) -> None:
    """Raise a `ValueError` if the embedding lies on a mesh with Explicit axes, whose rules no operation here keeps."""
    mesh = jax.typeof(params.embedding).sharding.mesh
    if jax.sharding.AxisType.Explicit in mesh.axis_types:
        raise ValueError(
            f"params.embedding: got weights on a mesh with Explicit axes {mesh.axis_names}, wanted Auto axes, as "
            "jax.sharding.Mesh(devices, names) or jax.make_mesh(..., axis_types=(jax.sharding.AxisType.Auto,)) has them"
        )


def check_placement(params: Params) -> None:
    """Raise a `ValueError` unless all weights are JAX arrays on the same devices; it names one that is not."""
    check_axes(params)
    leaves = jax.tree.leaves(params)
    plain = all(issubclass(kind, jax.Array) for kind in {type(leaf) for leaf in leaves})
    devices = params.embedding.sharding.device_set if plain else set()
    if plain and all(sharding.device_set == devices for sharding in {leaf.sharding for leaf in leaves}):
        return
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        name = f"params.{jax.tree_util.keystr(path, simple=True, separator='.')}"
        if not isinstance(leaf, jax.Array):
            raise ValueError(f"{name}: got {describe(leaf)} in a {type(leaf).__name__}, wanted it in a jax.Array")
        if leaf.sharding.device_set != devices:
            got, wanted = (sorted(map(str, each)) for each in (leaf.sharding.device_set, devices))
            raise ValueError(f"{name}: got it on {got}, wanted it where the embedding is, on {wanted}")


def cast_params(params: Params, dtype: DTypeLike) -> Params:
    """The model with weights of another dtype; A_log, D and dt_bias stay float32.

    Raises:
        ValueError: if weights may not have that dtype.
    """
    dtype = float_dtype("dtype", dtype)

    def cast(path: tuple[Any, ...], leaf: Array) -> Array:
        return jnp.asarray(leaf, jnp.float32 if path[-1].name in FLOAT32_FIELDS else dtype)

    return jax.tree_util.tree_map_with_path(cast, params)


def init_params(config: MambaConfig, key: PRNGKeyArray, dtype: DTypeLike = jnp.float32) -> Params:
    """Random weights as mamba_ssm initialises them: A in [1, 16] (or 1..d_state), dt in [1e-3, 1e-1], scaled out_proj.

    Args:
        config: the architecture.
        key: a `jax.random.key`.
        dtype: of the weights; A_log, D and dt_bias are float32 always.

    Returns:
        The model.

    Raises:
        ValueError: if the key is none, or weights may not have that dtype.
    """
    raw = isinstance(key, jax.Array | np.ndarray) and key.dtype == jnp.uint32 and key.ndim == 1
    typed = isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key) and key.ndim == 0
    if not raw and not typed:
        raise ValueError(f"key: got {describe(key)}, wanted a single key, as jax.random.key(0) makes one")
    count = 0

    def make(path: str, shape: tuple[int, ...], dt: jnp.dtype) -> Array:
        nonlocal count
        count += 1
        sub, name = jax.random.fold_in(key, count), path.rsplit(".", 1)[-1]
        return _init_leaf(config, sub, name, shape).astype(dt)

    return build_params(config, dtype, make)


def _init_leaf(config: MambaConfig, key: PRNGKeyArray, name: str, shape: tuple[int, ...]) -> Array:
    if name in ("embedding", "lm_head"):
        return 0.02 * jax.random.normal(key, shape)
    if name in ("norm", "norm_f", "gated_norm", "D"):
        return jnp.ones(shape)
    if name.endswith("_bias") and name not in ("dt_bias", "conv_bias"):
        return jnp.zeros(shape)
    if name == "A_log":
        mamba1 = jnp.broadcast_to(jnp.arange(1.0, shape[-1] + 1.0), shape)
        return jnp.log(mamba1 if len(shape) == 2 else jax.random.uniform(key, shape, minval=1.0, maxval=16.0))
    if name == "dt_bias":
        dt = jnp.exp(jax.random.uniform(key, shape, minval=math.log(1e-3), maxval=math.log(1e-1)))
        return dt + jnp.log(-jnp.expm1(-jnp.maximum(dt, 1e-4)))  # inverse of softplus
    if name == "dt_proj":
        bound = shape[1] ** -0.5
    elif name in ("conv", "conv_bias"):
        bound = config.d_conv**-0.5  # torch's Conv1d: one input channel a group
    else:
        bound = shape[-1] ** -0.5  # torch's Linear
    weight = jax.random.uniform(key, shape, minval=-bound, maxval=bound)
    return weight / math.sqrt(config.n_layer) if name == "out_proj" else weight
