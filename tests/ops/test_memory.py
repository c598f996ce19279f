"""Memory that compiled scans need, read from the compiler: nothing runs here."""

import functools

import jax
import jax.numpy as jnp
import pytest

from mamba_jax.ops import ssd as ssd_module
from mamba_jax.ops.scan import selective_scan
from mamba_jax.ops.ssd import ssd

MIB = 1 << 20


def ssd_shapes(length, heads=80, dtype=jnp.bfloat16):
    """A layer of the 2.7B model."""
    make = jax.ShapeDtypeStruct
    return (
        make((1, length, heads, 64), dtype),
        make((1, length, heads), jnp.float32),
        make((heads,), jnp.float32),
        make((1, length, 1, 128), dtype),
        make((1, length, 1, 128), dtype),
    )


def scan_shapes(length, d=1536, n=16):
    make = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    return make((1, length, d)), make((1, length, d)), make((d, n)), make((1, length, n)), make((1, length, n))


def temporaries(f, *shapes):
    return jax.jit(f).lower(*shapes).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("chunk", [128, 256])
def test_ssd_of_a_large_model_stays_below_a_gigabyte(monkeypatch, chunk):
    """With the blocks that GPUs and TPUs get; plain einsums take 5.8 to 11 GB at half this length."""
    monkeypatch.setattr(ssd_module, "_CPU_BLOCK", ssd_module._BLOCK)
    assert temporaries(functools.partial(ssd, chunk_size=chunk), *ssd_shapes(8192)) < 1000 * MIB


def test_ssd_memory_does_not_grow_with_length_times_chunk():
    """Twice the positions may add their own inputs and outputs, not their decay matrices."""
    f = functools.partial(ssd, chunk_size=256)
    short, long = (temporaries(f, *ssd_shapes(length, heads=24)) for length in (2048, 4096))
    per_position = 24 * 64 * 4
    assert long - short < 3 * 2048 * per_position
    assert long < 100 * MIB


@pytest.mark.parametrize("chunk", [64, 2048])
def test_selective_scan_never_holds_a_state_for_every_position(chunk):
    state_everywhere = 2048 * 1536 * 16 * 4
    f = functools.partial(selective_scan, chunk_size=chunk)
    assert temporaries(f, *scan_shapes(2048)) < state_everywhere / 2


@pytest.mark.parametrize(
    ("scan", "shapes", "everything"),
    [
        (selective_scan, scan_shapes(2048, d=256), 2048 * 256 * 16 * 4),
        (ssd, ssd_shapes(4096, heads=8, dtype=jnp.float32), 4096 * 512 * 8 * 4),
    ],
    ids=["states of the selective scan", "decay matrices of the SSD"],
)
def test_gradient_does_not_keep_what_it_can_compute_again(scan, shapes, everything):
    f = functools.partial(scan, chunk_size=512)
    assert temporaries(jax.grad(lambda *a: f(*a)[0].sum(), argnums=(0, 1, 2, 3, 4)), *shapes) < everything
