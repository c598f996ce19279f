"""Published model sizes, for benchmarks with random weights: speed does not depend on their values."""

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from mamba_jax import MambaConfig, Params, init_params, load
from mamba_jax.ops.dispatch import Implementation
from mamba_jax.planning import decode_implementation, make_plan
from mamba_jax.programs import BLOCK, Spec, lower_program, model_of, program, program_weights

_SIZES = {"130m": (768, 24), "370m": (1024, 48), "780m": (1536, 48), "1.3b": (2048, 48), "2.7b": (2560, 64)}
_SIZES_1 = {"130m": (768, 24), "370m": (1024, 48), "790m": (1536, 48), "1.4b": (2048, 48), "2.8b": (2560, 64)}


def _mamba1(d_model: int, n_layer: int) -> MambaConfig:
    return MambaConfig(
        layer="mamba1",
        vocab_size=50277,
        pad_vocab_size_multiple=8,
        d_model=d_model,
        n_layer=n_layer,
        d_inner=2 * d_model,
        d_state=16,
        dt_rank=d_model // 16,
    )


def _mamba2(d_model: int, n_layer: int) -> MambaConfig:
    return MambaConfig(
        layer="mamba2",
        vocab_size=50277,
        pad_vocab_size_multiple=16,
        d_model=d_model,
        n_layer=n_layer,
        d_inner=2 * d_model,
        d_state=128,
        headdim=64,
    )


PUBLISHED = {f"mamba1-{name}": _mamba1(*size) for name, size in _SIZES_1.items()} | {
    f"mamba2-{name}": _mamba2(*size) for name, size in _SIZES.items()
}


def random_params(name: str, dtype: DTypeLike) -> Params:
    """Random weights of a published size."""
    return init_params(PUBLISHED[name], jax.random.key(0), dtype)


# For runs of seconds on a CPU.
SMALL = {
    "mamba1-small": dataclasses.replace(_mamba1(128, 2), vocab_size=1000),
    "mamba2-small": dataclasses.replace(_mamba2(128, 2), vocab_size=1000),
}


def load_model(name: str, dtype: str) -> Params:
    """Random weights of a published size or a small one, or the checkpoint of a folder, as programs take them.

    Raises:
        ValueError: if there is none of this name.
    """
    if config := (PUBLISHED | SMALL).get(name):
        return init_params(config, jax.random.key(0), dtype)
    if not Path(name).is_dir():
        raise ValueError(f"model: got {name!r}, wanted a folder or one of {', '.join((*PUBLISHED, *SMALL))}")
    kind: Any = dtype
    return program_weights(load(name, dtype=kind))


def published(name: str) -> str:
    """The size whose figures in the papers stand beside a model's: its own, or the smallest."""
    return name if name in PUBLISHED else "mamba2-130m"


def beside(names: Iterable[str]) -> str:
    """The remark on models that the papers do not have; empty if there is none."""
    others = [Path(name).name for name in names if name not in PUBLISHED]
    return f" Beside {', '.join(others)} stand the paper's figures of 130M: not comparable." if others else ""


def random_ids(params: Params, length: int, seed: int = 0) -> list[int]:
    """Token ids drawn alike."""
    return np.random.default_rng(seed).integers(0, params.config.vocab_size, length).tolist()


def planned_chunk(params: Params, length: int) -> int:
    """The chunk size that the first segment of a text of this length is read with."""
    chunk = make_plan(model_of(params), 1, length).segments[0].chunk_size
    return chunk if isinstance(chunk, int) else chunk[0]


def decode_spec(params: Params, batch: int = 1, implementation: Implementation | None = None) -> Spec:
    """The program that `generate` decodes greedily with."""
    by = decode_implementation(model_of(params), batch, implementation)
    return Spec("decode", batch, BLOCK, implementation=by)


class Prefill:
    """A compiled program that reads one segment, called again and again on the state that it left.

    It is compiled here, whatever the process has, so that what it is traced from may be changed for a while.
    """

    def __init__(self, params: Params, length: int, chunk_size: int, implementation: Implementation = "xla") -> None:
        self.params = params
        spec = Spec("prefill", 1, length, chunk_size, implementation=implementation)
        self.compiled = lower_program(params, spec).compile()
        self.tokens = jnp.asarray([random_ids(params, length)], jnp.int32)
        self.lengths = jnp.asarray([length], jnp.int32)
        self.state = program(params, Spec("init", 1))()

    def __call__(self) -> jax.Array:
        """Logits (1, v) after the segment, in a state that is not the first one from the second call on."""
        *self.state, _ = self.compiled(self.params, self.tokens, self.lengths, *self.state)
        return self.state[1]
