"""A decode step's kernels in the interpreter against the XLA step, and which of the two a program holds."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

from mamba_jax import cast_params, init_cache, step
from mamba_jax.models import lm
from mamba_jax.ops import dispatch
from mamba_jax.pallas_kernels.gpu.mamba1_step import mamba1_layer_step
from mamba_jax.pallas_kernels.gpu.mamba2_step import mamba2_layer_step
from mamba_jax.pallas_kernels.gpu.matvec import matvec
from tests.tiny import tiny_params

INTERPRET = InterpretGPUParams(detect_races=True)
SIZES = {
    "mamba1": {"d_model": 256, "d_inner": 256, "d_state": 16, "dt_rank": 16},
    "mamba1-no-conv-bias": {"d_model": 256, "d_inner": 256, "d_state": 8, "dt_rank": 16, "conv_bias": False},
    "mamba2": {"d_model": 256, "d_inner": 256, "d_state": 64, "headdim": 64},
    "mamba2-groups-D": {
        "d_model": 256,
        "d_inner": 256,
        "d_state": 128,
        "headdim": 32,
        "ngroups": 2,
        "gated_norm": False,
        "D_has_hdim": True,
        "conv_bias": False,
        "dt_limit": (0.01, 0.2),
    },
}
BATCHES = {"mamba1": 1, "mamba1-no-conv-bias": 1, "mamba2": 2, "mamba2-groups-D": 1}


def model(name, dtype="bfloat16", **changes):
    kind = name.partition("-")[0]
    return tiny_params(kind, dtype, **(SIZES[name] | {"n_layer": 1, "proj_bias": False, "block_norm": "rms"} | changes))


def layer_inputs(params, batch, seed=0):
    rng = np.random.default_rng(seed)

    def normal(like):
        return jnp.asarray(rng.normal(size=like.shape), jnp.float32).astype(like.dtype)

    cache = jax.tree.map(normal, init_cache(params.config, batch, params.dtype))
    residual = normal(jnp.zeros((batch, params.config.d_model)))
    return residual, cache.conv[0], cache.ssm[0]


def in_float32(tree):
    return jax.tree.map(lambda x: np.asarray(x, np.float32), tree)


def distance(got, want):
    return np.linalg.norm(got - want) / np.linalg.norm(want)


@pytest.mark.parametrize(("name", "dtype"), [*((name, "bfloat16") for name in SIZES), ("mamba2", "float16")])
def test_a_layers_step_is_no_farther_from_float32_than_xlas(name, dtype):
    params = model(name, dtype)
    config, layer = params.config, params.layers[0]
    # Also where a step is 0 and its rate infinite.
    hold = {"A_log": layer.A_log.at[0].set(100.0), "dt_bias": layer.dt_bias.at[0].set(-200.0)}
    params = dataclasses.replace(params, layers=(layer := dataclasses.replace(layer, **hold),))
    inputs = layer_inputs(params, BATCHES[name])
    run = mamba1_layer_step if config.layer == "mamba1" else mamba2_layer_step
    got = run(layer, config, *inputs, interpret=INTERPRET)
    xla = functools.partial(lm._step_layer, config=config, implementation="xla")
    plain = xla(layer, residual=inputs[0], conv=inputs[1], ssm=inputs[2])
    exact = cast_params(params, "float32").layers[0]
    truth = xla(exact, residual=inputs[0], conv=inputs[1].astype(jnp.float32), ssm=inputs[2])
    for value, other, want in zip(*map(in_float32, (got, plain, truth)), strict=True):
        assert value.shape == want.shape
        assert distance(value, want) <= 1.1 * distance(other, want) + 1e-6
    assert [x.dtype for x in got] == [x.dtype for x in plain]


@pytest.mark.parametrize("rows", [2, 4])
def test_a_matvec_with_a_norm_is_the_product_of_the_norm(rows):
    rng = np.random.default_rng(0)
    weight = jnp.asarray(rng.normal(size=(12, 512)), jnp.bfloat16)
    x, residual = rng.normal(size=(3, 600)).astype(np.float32), rng.normal(size=(3, 12)).astype(np.float32)
    norm = jnp.asarray(rng.normal(size=512), jnp.bfloat16)
    got, window = matvec(weight, x, norm=norm, eps=1e-5, residual=residual, block_rows=rows, interpret=INTERPRET)
    assert window is None
    x = x[:, :512].astype(np.float64)
    normed = x / np.sqrt((x * x).mean(1, keepdims=True) + 1e-5) * np.asarray(norm, np.float64)
    want = residual + normed @ np.asarray(weight, np.float64).T
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-4)


def lowered(params, platform, batch=1, implementation=None):
    tokens, cache = jnp.zeros(batch, jnp.int32), init_cache(params.config, batch, params.dtype)
    run = jax.jit(functools.partial(lm.decode_step, implementation=implementation))
    return run.trace(params, tokens, cache).lower(lowering_platforms=(platform,))


def decode_text(params, platform, **options):
    return lowered(params, platform, **options).as_text()


@pytest.mark.parametrize(("name", "kernels"), [("mamba1", 5), ("mamba2", 4)])
def test_a_cuda_program_holds_each_kernel_once(name, kernels):
    params = model(name, n_layer=3)
    assert decode_text(params, "cuda").count("@mosaic_gpu") == kernels
    assert "mosaic_gpu" not in decode_text(params, "cuda", implementation="xla")
    assert "mosaic_gpu" not in decode_text(cast_params(params, "float32"), "cuda")
    assert "mosaic_gpu" not in decode_text(params, "cuda", batch=2)


@pytest.mark.parametrize("name", ["mamba1", "mamba2"])
@pytest.mark.parametrize("platform", ["cpu", "rocm", "tpu"])
def test_programs_for_other_platforms_hold_no_kernel(name, platform):
    assert "mosaic_gpu" not in decode_text(model(name), platform)


@pytest.mark.parametrize("name", ["mamba1", "mamba2"])
def test_programs_for_a_cpu_are_those_without_kernels(name):
    texts = [
        lowered(model(name), "cpu", implementation=implementation).compile().as_text()
        for implementation in (None, "xla")
    ]
    # Names and places in the source aside.
    instructions = [
        sorted(
            line.split("(")[0].split(" = ")[1] for line in text.splitlines() if line.startswith("  ") and " = " in line
        )
        for text in texts
    ]
    assert instructions[0] == instructions[1]


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("mamba1", {"d_model": 24}, "a weight of 24 columns"),
        ("mamba1", {"dt_rank": 3}, "dt_rank 3"),
        ("mamba1", {"bcdt_norm_eps": 1e-6}, "norms of B, C and dt"),
        ("mamba2", {"headdim": 2}, "headdim 2"),
        ("mamba2", {"norm_before_gate": True}, "a gated norm before the gate"),
        ("mamba2", {"block_norm": "layer"}, "a LayerNorm"),
        ("mamba2", {"dtype": "float32"}, "weights of dtype float32"),
    ],
)
def test_what_the_kernels_do_not_take_is_xlas_unless_they_are_asked_for(name, changes, said, at_a_gpu):
    params = model(name, **changes)
    assert decode_text(params, "cuda").count("@mosaic_gpu") <= 1  # the head has its own
    cache = init_cache(params.config, 1, params.dtype)
    with pytest.raises(NotImplementedError, match=f"implementation: got 'pallas', .*{said}"):
        step(params, np.zeros(1, np.int32), cache, implementation="pallas")


def test_an_implementation_of_another_name_is_an_error():
    params = model("mamba2")
    with pytest.raises(ValueError, match="implementation: got 'triton', wanted None, 'xla' or 'pallas'"):
        step(params, np.zeros(1, np.int32), init_cache(params.config, 1, params.dtype), implementation="triton")


@pytest.mark.parametrize("name", ["mamba1", "mamba2"])
def test_a_program_holds_kernels_only_where_they_are_wanted(name, monkeypatch):
    monkeypatch.setattr(dispatch, "KERNELS_BY_DEFAULT", frozenset())
    jax.clear_caches()
    assert "mosaic_gpu" not in decode_text(model(name), "cuda")
    assert "mosaic_gpu" in decode_text(model(name), "cuda", implementation="pallas")
    jax.clear_caches()
