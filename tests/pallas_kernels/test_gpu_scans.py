"""The kernels of both scans in Pallas's interpreter, and which programs hold them."""

import functools
import math
import multiprocessing
import re
from collections import Counter
from concurrent.futures import ProcessPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

from bench.specs import SCAN_KERNEL_SPECS, SSD_KERNEL_SPECS, ScanSpec, scan_inputs, ssd_inputs
from mamba_jax.ops.reference import selective_scan_ref, ssd_ref
from mamba_jax.ops.scan import selective_scan
from mamba_jax.ops.ssd import ssd
from mamba_jax.pallas_kernels.gpu import selective_scan as scan_kernel
from mamba_jax.pallas_kernels.gpu import ssd as ssd_kernel
from tests.ops.cases import error, in_dtype, piece
from tests.tolerances import OP_ATOL

RACES = InterpretGPUParams(detect_races=True)


@pytest.fixture(scope="module")
def wide():
    """A process of eight threads: in two, an interpreter's four warpgroups can wait for each other for ever."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NPROC", "8")
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            yield pool


def with_wild_padding(inputs, lengths):
    """The inputs and the lengths as an array, with steps at padding that are no numbers or infinite."""
    if lengths is None:
        return inputs, None
    dt = inputs["dt"].copy()
    for row, length in enumerate(lengths):
        dt[row, length::2], dt[row, length + 1 :: 2] = np.nan, np.inf
    return inputs | {"dt": dt}, jnp.array(lengths)


def interpreted_ssd(spec, dtype, lengths):
    """What `ssd` gives with its kernel interpreted; arrays of numpy, which pass between processes."""
    inputs, lengths = with_wild_padding(in_dtype(ssd_inputs(SSD_KERNEL_SPECS[spec]), dtype), lengths)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ssd_kernel, "ssd", functools.partial(ssd_kernel.ssd, interpret=RACES))
        return jax.device_get(ssd(**inputs, chunk_size=64, lengths=lengths, implementation="pallas"))


@pytest.mark.parametrize(
    ("spec", "dtype", "lengths"),
    [(0, "bfloat16", None), (1, "bfloat16", None), (2, "bfloat16", (0, 70))],
    ids=["grouped", "limited", "gated-rows"],
)
def test_ssd_kernel_equals_the_recurrence(wide, spec, dtype, lengths):
    """In whole chunks, more than the ring holds and a part of one; also rows of unequal lengths, one of them empty."""
    got = wide.submit(interpreted_ssd, spec, dtype, lengths).result(timeout=120)
    check(got, ssd_ref, in_dtype(ssd_inputs(SSD_KERNEL_SPECS[spec]), dtype), lengths, OP_ATOL[dtype])


def interpret_scan(monkeypatch):
    kernel = functools.partial(scan_kernel.selective_scan, interpret=RACES)
    monkeypatch.setattr(scan_kernel, "selective_scan", kernel)


@pytest.mark.parametrize(
    ("spec", "dtype", "blocks", "lengths"),
    [(0, "float32", 1, None), (1, "bfloat16", 1000, (0, 23))],
    ids=["gated", "rows"],
)
def test_scan_kernel_equals_the_recurrence(spec, dtype, blocks, lengths, monkeypatch):
    """In stretches of 32 positions, the last in part; with 4 numbers of a state in a thread, or 2."""
    interpret_scan(monkeypatch)
    monkeypatch.setattr(scan_kernel, "_POSITIONS", 32)
    monkeypatch.setattr(scan_kernel, "_BLOCKS", blocks)
    inputs = in_dtype(scan_inputs(SCAN_KERNEL_SPECS[spec]), dtype)
    wild, row_lengths = with_wild_padding(inputs, lengths)
    got = selective_scan(**wild, chunk_size=16, lengths=row_lengths, implementation="pallas")
    check(got, selective_scan_ref, inputs, lengths, OP_ATOL[dtype])


def check(got, reference, inputs, lengths, atol):
    """Every row up to its length; a row of no position keeps its state."""
    y, state = got
    assert y.dtype == inputs["x"].dtype
    assert state.dtype == jnp.float32
    for row, length in enumerate(lengths or (y.shape[1],) * y.shape[0]):
        if length == 0:
            assert error(state[row], inputs["initial_state"][row]) == 0.0
            continue
        want, want_state = reference(**piece(inputs, 0, length, slice(row, row + 1)))
        assert error(y[row, :length], want[0]) < atol * max(1.0, np.abs(want).max())
        assert error(state[row], want_state[0]) < atol * max(1.0, np.abs(want_state).max())


def _cases(dtype):
    """Each op with arguments that its kernel takes."""
    inputs = in_dtype(ssd_inputs(SSD_KERNEL_SPECS[0]), dtype)
    yield functools.partial(ssd, chunk_size=64, dt_softplus=True), inputs
    yield functools.partial(selective_scan, chunk_size=16, dt_softplus=True), scan_inputs(SCAN_KERNEL_SPECS[0])


def _lowered(op, inputs, platform):
    arrays = {k: jnp.asarray(v) for k, v in inputs.items() if hasattr(v, "shape")}
    return jax.jit(op).trace(**arrays).lower(lowering_platforms=(platform,))


@pytest.mark.parametrize("case", [0, 1])
def test_programs_for_cuda_hold_the_kernel(case):
    op, inputs = list(_cases("bfloat16"))[case]
    assert "mosaic_gpu" in _lowered(op, inputs, "cuda").as_text()
    assert "mosaic_gpu" not in _lowered(functools.partial(op, implementation="xla"), inputs, "cuda").as_text()


@pytest.mark.parametrize("case", [0, 1])
def test_programs_for_a_cpu_are_those_without_kernels(case):
    """The same instructions once XLA has dropped the branch not taken; names and line numbers differ."""
    op, inputs = list(_cases("bfloat16"))[case]
    programs = [
        _lowered(functools.partial(op, implementation=name), inputs, "cpu").compile().as_text()
        for name in (None, "xla")
    ]
    default, xla = (Counter(re.findall(r" = (\S+ [a-z-]+)\(", program)) for program in programs)
    assert len(xla) > 10
    assert default == xla


@pytest.mark.parametrize(
    ("dtype", "change", "message"),
    [
        ("float32", {}, "float32"),
        ("float16", {}, "float16"),  # whose range states leave
        ("bfloat16", {"segment_ids": jnp.zeros((1, 150), jnp.int32)}, "segment_ids"),
    ],
)
def test_what_the_ssd_kernel_does_not_take(dtype, change, message, at_a_gpu):
    inputs = in_dtype(ssd_inputs(SSD_KERNEL_SPECS[0]), dtype)
    with pytest.raises(NotImplementedError, match=message):
        ssd(**inputs, chunk_size=64, implementation="pallas", **change)


def test_what_the_scan_kernel_does_not_take(at_a_gpu):
    inputs = scan_inputs(ScanSpec(name="narrow", l=8, d=40, chunks=(8,)))
    with pytest.raises(NotImplementedError, match="40 channels"):
        selective_scan(**inputs, chunk_size=8, implementation="pallas")
    with pytest.raises(ValueError, match="implementation: got 'triton'"):
        selective_scan(**inputs, chunk_size=8, implementation="triton")


def test_gradient_of_the_kernel_is_the_op_s(monkeypatch):
    interpret_scan(monkeypatch)
    spec = ScanSpec(name="short", l=16, d=256, chunks=(16,), initial_state=True)
    inputs = scan_inputs(spec)

    def loss(x, A, implementation):
        y, state = selective_scan(**inputs | {"x": x, "A": A}, chunk_size=16, implementation=implementation)
        return (y**2).sum() + state.sum()

    got, want = (jax.grad(loss, argnums=(0, 1))(inputs["x"], inputs["A"], name) for name in ("pallas", "xla"))
    assert error(got[0], want[0]) < 1e-3 * np.abs(want[0]).max()
    assert error(got[1], want[1]) < 1e-3 * np.abs(want[1]).max()


def test_softplus_of_any_size():
    x = np.linspace(-80.0, 80.0, 1001, dtype=np.float32)
    want = np.log1p(np.exp(-np.abs(x.astype(np.float64)))) + np.maximum(x, 0.0)
    np.testing.assert_allclose(scan_kernel._softplus(jnp.asarray(x)), want, rtol=3e-6)
    assert math.isfinite(float(scan_kernel._softplus(jnp.float32(89.0))))
