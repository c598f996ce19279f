"""The kernels for TPUs in Pallas's interpreter, which finds races, and which programs hold them."""

import dataclasses
import functools
import types

import jax
import jax.experimental.pallas.tpu as pltpu
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.extend.core import jaxprs_in_params

from bench.specs import (
    SCAN_KERNEL_SPECS,
    SCAN_SPECS,
    SSD_KERNEL_SPECS,
    SSD_SPECS,
    ScanSpec,
    SSDSpec,
    scan_inputs,
    ssd_inputs,
)
from mamba_jax import cast_params, init_cache, step
from mamba_jax.models import lm, mamba1, mamba2
from mamba_jax.ops import scan as scan_op
from mamba_jax.ops import ssd as ssd_op
from mamba_jax.ops.reference import selective_scan_ref, ssd_ref
from mamba_jax.ops.scan import selective_scan
from mamba_jax.ops.ssd import ssd
from mamba_jax.pallas_kernels.tpu import mamba1_step, mamba2_step
from mamba_jax.pallas_kernels.tpu import selective_scan as scan_kernel
from mamba_jax.pallas_kernels.tpu import ssd as ssd_kernel
from tests.ops.cases import OPS, end_of_float32, error, in_dtype, piece
from tests.tiny import tiny_params
from tests.tolerances import OP_ATOL

RACES = pltpu.InterpretParams(detect_races=True)


@pytest.fixture(autouse=True)
def no_races():
    yield
    found = interpret_pallas_call.races
    assert found is None or not found.races_found


@pytest.fixture
def interpreted(monkeypatch):
    """A CPU that interprets the kernels for TPUs of both scans."""
    for op, kernel, name in ((ssd_op, ssd_kernel, "ssd"), (scan_op, scan_kernel, "selective_scan")):
        monkeypatch.setattr(kernel, name, functools.partial(getattr(kernel, name), interpret=RACES))
        monkeypatch.setattr(op.gpu, "declines", lambda *_: "what GPUs take")


def check(got, reference, inputs, dtype, lengths=None):
    """Every row up to its length; a row of no position keeps its state."""
    y, state = got
    assert y.dtype == inputs["x"].dtype
    assert state.dtype == jnp.float32
    for row, length in enumerate(lengths or (y.shape[1],) * y.shape[0]):
        if length == 0:
            assert error(state[row], inputs["initial_state"][row]) == 0.0
            continue
        want, want_state = reference(**piece(inputs, 0, length, slice(row, row + 1)))
        assert error(y[row, :length], want[0]) < OP_ATOL[dtype] * max(1.0, np.abs(want).max())
        assert error(state[row], want_state[0]) < OP_ATOL[dtype] * max(1.0, np.abs(want_state).max())


def named(specs, *names):
    return [pytest.param(spec, id=spec.name) for spec in specs if not names or spec.name in names]


@pytest.mark.parametrize("spec", named(SSD_SPECS))
def test_u87_ssd_equals_the_recurrence(spec, interpreted):
    """Sizes that are no powers of two, groups, one position, 4096 of them."""
    inputs = ssd_inputs(spec)
    check(ssd(**inputs, chunk_size=48, implementation="pallas"), ssd_ref, in_dtype(inputs, "float32"), "float32")


@pytest.mark.parametrize("spec", named(SSD_KERNEL_SPECS))
def test_ssd_in_bfloat16(spec, interpreted):
    inputs = in_dtype(ssd_inputs(spec), "bfloat16")
    check(ssd(**inputs, chunk_size=64, implementation="pallas"), ssd_ref, inputs, "bfloat16")


def test_ssd_in_blocks_of_heads_and_ragged_rows(interpreted):
    spec = SSDSpec(name="blocks", b=2, l=130, h=32, p=128, g=2, n=16, chunks=(64,), gate=True, initial_state=True)
    inputs, lengths = in_dtype(ssd_inputs(spec), "float32"), (0, 129)
    got = ssd(**inputs, chunk_size=64, lengths=jnp.array(lengths), implementation="pallas")
    check(got, ssd_ref, inputs, "float32", lengths)


@pytest.mark.parametrize("spec", named(SCAN_SPECS))
def test_u87_selective_scan_equals_the_recurrence(spec, interpreted):
    inputs = in_dtype(scan_inputs(spec), "float32")
    got = selective_scan(**inputs, chunk_size=48, implementation="pallas")
    check(got, selective_scan_ref, inputs, "float32")


def test_selective_scan_in_bfloat16(interpreted):
    inputs = in_dtype(scan_inputs(SCAN_KERNEL_SPECS[0]), "bfloat16")
    check(selective_scan(**inputs, chunk_size=16, implementation="pallas"), selective_scan_ref, inputs, "bfloat16")


def test_selective_scan_in_blocks_of_channels_and_ragged_rows(interpreted):
    spec = ScanSpec(name="blocks", b=3, l=140, d=1024, chunks=(16,), initial_state=True)
    inputs, lengths = in_dtype(scan_inputs(spec), "float32"), (0, 140, 37)
    got = selective_scan(**inputs, chunk_size=16, lengths=jnp.array(lengths), implementation="pallas")
    check(got, selective_scan_ref, inputs, "float32", lengths)


def test_padding_may_hold_anything(interpreted):
    """What lies beyond a row's length reaches nothing, NaN in dt included."""
    inputs = scan_inputs(ScanSpec(name="short", l=24, d=128, chunks=(16,), initial_state=True))
    inputs["dt"][:, 10:] = np.nan
    _, state = selective_scan(**inputs, chunk_size=16, lengths=jnp.array([10]), implementation="pallas")
    assert error(state, selective_scan_ref(**piece(inputs, 0, 10))[1]) < OP_ATOL["float32"]


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_steps_at_the_end_of_float32(op, interpreted):
    """Steps above 2^60 enter SSD in two factors, as in XLA's op."""
    (spec,) = (spec for spec in op.specs if spec.name == "full")
    inputs = end_of_float32(op.inputs(dataclasses.replace(spec, b=1, l=140)))
    check(op.scan(**inputs, chunk_size=16, implementation="pallas"), op.reference, inputs, "float32")


STEPS = {
    "mamba1": {"d_inner": 256, "d_state": 16, "dt_rank": 16},
    "mamba1-blocks": {"d_inner": 1152, "d_state": 8, "dt_rank": 8, "conv_bias": False, "bcdt_norm_eps": 1e-5},
    "mamba2": {"d_inner": 256, "d_state": 64, "headdim": 64},
    "mamba2-blocks": {"d_inner": 1152, "d_state": 128, "headdim": 64, "ngroups": 3, "norm_before_gate": True},
    "mamba2-odd": {
        "d_inner": 240,
        "d_state": 96,
        "headdim": 80,
        "ngroups": 3,
        "D_has_hdim": True,
        "gated_norm": False,
        "conv_bias": False,
    },
}


def step_inputs(name, dtype, batch):
    params = tiny_params(name.partition("-")[0], dtype, **(STEPS[name] | {"n_layer": 1}))
    rng = np.random.default_rng(0)

    def normal(like):
        return jnp.asarray(rng.normal(size=like.shape), jnp.float32).astype(like.dtype)

    cache = jax.tree.map(normal, init_cache(params.config, batch, params.dtype))
    projected = normal(jnp.zeros((batch, params.config.in_proj_width), params.dtype))
    return params, projected, cache.conv[0], cache.ssm[0]


@pytest.mark.parametrize(("name", "dtype"), [(name, "float32" if "-" in name else "bfloat16") for name in STEPS])
def test_a_step_is_xlas(name, dtype):
    params, *inputs = step_inputs(name, dtype, 2)
    kernel, model = (mamba1_step, mamba1) if name.startswith("mamba1") else (mamba2_step, mamba2)
    assert kernel.declines(params.layers[0], params.config, *inputs[1:]) is None
    got = kernel.mix(params.layers[0], params.config, *inputs, interpret=RACES)
    mix = jax.jit(model._mix, static_argnums=1)
    plain = mix(params.layers[0], params.config, *inputs)
    exact = [x.astype(jnp.float32) for x in inputs]
    truth = mix(cast_params(params, "float32").layers[0], params.config, *exact)
    for value, other, exactly in zip(got, plain, truth, strict=True):
        assert value.dtype == other.dtype
        want = np.asarray(exactly, np.float64).reshape(value.shape)
        distances = [np.linalg.norm(np.asarray(x, np.float64).reshape(want.shape) - want) for x in (value, other)]
        assert distances[0] <= 1.1 * distances[1] + 1e-6 * np.linalg.norm(want)


@pytest.mark.parametrize("name", ["mamba1", "mamba2"])
def test_a_step_of_no_size_keeps_the_state_whatever_its_rate(name):
    params, *inputs = step_inputs(name, "float32", 1)
    layer = params.layers[0]
    layer = dataclasses.replace(layer, A_log=layer.A_log + 1e3, dt_bias=layer.dt_bias - 1e4)
    kernel = mamba1_step if name == "mamba1" else mamba2_step
    _, _, state = kernel.mix(layer, params.config, *inputs, interpret=RACES)
    assert error(state, inputs[2]) == 0.0


def ssd_case(dtype="bfloat16"):
    return functools.partial(ssd, chunk_size=64, dt_softplus=True), in_dtype(ssd_inputs(SSD_KERNEL_SPECS[0]), dtype)


def cases():
    """Each op with arguments that both kernels take, and a whole step of each family."""
    yield ssd_case()
    yield functools.partial(selective_scan, chunk_size=16, dt_softplus=True), scan_inputs(SCAN_KERNEL_SPECS[0])
    for kind in ("mamba1", "mamba2"):
        sizes = {"d_model": 256, "d_inner": 256, "d_state": 64, "headdim": 64, "dt_rank": 16}
        fits = {name: size for name, size in sizes.items() if name != ("headdim" if kind == "mamba1" else "dt_rank")}
        params = tiny_params(kind, "bfloat16", n_layer=1, **fits)
        cache = init_cache(params.config, 1, params.dtype)
        yield lm.decode_step, {"params": params, "tokens": jnp.zeros(1, jnp.int32), "cache": cache}


def arrays_of(inputs):
    """What is no option of an op's arguments."""
    return {name: value for name, value in inputs.items() if not isinstance(value, bool | tuple | None)}


@pytest.mark.parametrize("case", range(4))
def test_exports_hold_each_platforms_kernel_load_and_run_on_a_cpu(case):
    pytest.importorskip("flatbuffers", reason="exports are written with flatbuffers: pip install -e '.[test]'")
    op, inputs = list(cases())[case]
    arrays, held, results = arrays_of(inputs), {}, {}
    leaves, tree = jax.tree.flatten(arrays)
    run = jax.jit(lambda *leaves: jax.tree.leaves(op(**jax.tree.unflatten(tree, leaves))))
    for platforms in ("cpu",), ("cuda",), ("tpu",), ("cpu", "cuda", "tpu"):
        loaded = export.deserialize(export.export(run, platforms=platforms)(*leaves).serialize())
        held[platforms] = [name in loaded.mlir_module() for name in ("mosaic_gpu", "tpu_custom_call")]
        if "cpu" in platforms:
            results[platforms] = loaded.call(*map(jnp.asarray, leaves))
    assert list(held.values()) == [[False, False], [True, False], [False, True], [True, True]]
    want = jax.tree.leaves(op(**arrays, implementation="xla"))
    for got in results.values():
        for one, other in zip(got, want, strict=True):
            np.testing.assert_allclose(np.asarray(one, np.float32), np.asarray(other, np.float32), rtol=1e-2, atol=1e-2)


def equations(jaxpr):
    """All equations of a program, those of its kernels included."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from equations(inner)


@pytest.mark.parametrize("case", range(4))
def test_decays_are_float32_in_kernels_for_bfloat16(case, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    op, inputs = list(cases())[case]
    arrays = in_dtype(arrays_of(inputs), "bfloat16")
    program = jax.make_jaxpr(lambda arrays: op(**arrays, implementation="pallas"))(arrays)
    kernels = [one for one in equations(program.jaxpr) if one.primitive.name == "pallas_call"]
    exponentials = [
        one for kernel in kernels for one in equations(kernel.params["jaxpr"]) if one.primitive.name == "exp"
    ]
    assert exponentials
    assert {one.outvars[0].aval.dtype.name for one in exponentials} == {"float32"}


def lowered(op, arrays, platform):
    return jax.jit(lambda arrays: op(**arrays)).trace(arrays).lower(lowering_platforms=(platform,)).as_text()


def test_u88_what_does_not_fit_vmem_is_known_before_the_call():
    small = ssd_inputs(SSDSpec(name="fits", l=300, h=4, p=64, n=16, chunks=(256,)))
    large = ssd_inputs(SSDSpec(name="large", l=8, h=1, p=1024, n=1024, chunks=(256,)))
    wider = small | {name: np.tile(small[name], 4) for name in "BC"}
    for inputs, held in ((small, True), (wider, True), (large, False)):
        arrays = arrays_of(inputs)
        text = lowered(functools.partial(ssd, chunk_size=256, dt_softplus=True), arrays, "tpu")
        assert ("tpu_custom_call" in text) == held
    assert "bytes of VMEM" in ssd_kernel.declines(large["x"], large["B"])
    y, _ = ssd(**large, chunk_size=256)  # XLA serves it
    assert error(y, ssd_ref(**large)[0]) < OP_ATOL["float32"] * np.abs(y).max()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"dtype": "float16"}, "x of dtype float16"),
        ({"headdim": 12}, "headdim 12"),
        ({"segment_ids": True}, "segment_ids"),
    ],
)
def test_what_the_ssd_kernel_does_not_take(change, said, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    spec = dataclasses.replace(SSD_KERNEL_SPECS[0], p=change.get("headdim", 64))
    inputs = in_dtype(ssd_inputs(spec), change.get("dtype", "float32"))
    ids = jnp.zeros((1, spec.l), jnp.int32) if "segment_ids" in change else None
    with pytest.raises(NotImplementedError, match=f"implementation: got 'pallas', .*{said}"):
        ssd(**inputs, chunk_size=64, segment_ids=ids, implementation="pallas")
    op = functools.partial(ssd, chunk_size=64, dt_softplus=True, segment_ids=ids)
    arrays = arrays_of(inputs)
    assert "tpu_custom_call" not in lowered(op, arrays, "tpu")


@pytest.mark.parametrize(
    ("backend", "capability", "said"),
    [
        ("gpu", "gfx950", "a GPU of compute capability gfx950"),
        ("gpu", "8.0", "a GPU of compute capability 8.0"),
        ("METAL", "", "a device of platform METAL"),
    ],
)
def test_u89_no_kernel_where_the_device_has_none(backend, capability, said, monkeypatch):
    op, inputs = ssd_case()
    arrays = arrays_of(inputs)
    plain = lowered(functools.partial(op, implementation="xla"), arrays, "cpu").count("stablehlo.custom_call")
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    monkeypatch.setattr(jax, "devices", lambda: [types.SimpleNamespace(compute_capability=capability)])
    for platform in ("cpu", "rocm", "cuda" if backend == "gpu" else "cpu"):
        text = lowered(op, arrays, platform)
        assert "mosaic_gpu" not in text
        assert "tpu_custom_call" not in text
    assert lowered(op, arrays, "cpu").count("stablehlo.custom_call") == plain
    with pytest.raises(NotImplementedError, match=f"implementation: got 'pallas', but the kernel does not take {said}"):
        op(**arrays, implementation="pallas")


def test_u89_a_cpu_runs_what_nothing_is_said_of():
    op, inputs = ssd_case()
    arrays = arrays_of(inputs)
    for got, want in zip(op(**arrays), op(**arrays, implementation="xla"), strict=True):
        np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want, np.float32))


def test_a_batch_beyond_the_kernel_takes_xlas_step(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    params = tiny_params("mamba1", "bfloat16", n_layer=1, d_inner=256)
    with pytest.raises(NotImplementedError, match="17 rows"):
        step(params, np.zeros(17, np.int32), init_cache(params.config, 17, params.dtype), implementation="pallas")
