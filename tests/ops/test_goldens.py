"""The golden cases that mamba_ssm's Triton and CUDA kernels were run on, against their float64 results."""

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from mamba_jax.ops.scan import selective_scan
from mamba_jax.ops.ssd import ssd
from tests.ops.cases import STATIC, error
from tests.tolerances import OP_ATOL

pytestmark = pytest.mark.reference
SSD = ["base", "gateD", "init", "limit", "long", "ragged", "seqidx", "short"]
SCAN = ["base", "long", "nogate", "ragged", "short", "state8"]
# The file has no metadata; softplus was on in every case, and this is the one interval that gives ssd.limit's results.
LIMITS = {"limit": (0.02, 0.1)}


@pytest.fixture(scope="module")
def goldens(reference_dir):
    return load_file(reference_dir / "kernel_goldens.safetensors")


def case(goldens, prefix):
    return {k.removeprefix(prefix): v for k, v in goldens.items() if k.startswith(prefix)}


def test_every_case_of_the_file_is_tested(goldens):
    cases = {tuple(k.split(".")[:2]) for k in goldens}
    assert cases == {("ssd", n) for n in SSD} | {("scan", n) for n in SCAN}


@pytest.mark.parametrize("chunk", [16, 64, 256])
@pytest.mark.parametrize("name", SSD)
def test_ssd(goldens, name, chunk):
    c = case(goldens, f"ssd.{name}.")
    y, state = jax.jit(ssd, static_argnames=STATIC)(
        *(c[k] for k in ("x", "dt", "A", "B", "C")),
        chunk_size=chunk,
        D=c.get("D"),
        z=c.get("z"),
        dt_bias=c.get("dt_bias"),
        dt_softplus=True,
        dt_limit=LIMITS.get(name, (0.0, float("inf"))),
        initial_state=c.get("initial_state"),
        segment_ids=c.get("seq_idx"),
    )
    assert error(y, c["y"]) < OP_ATOL["float32"]
    assert error(state, c["final_state"]) < OP_ATOL["float32"]


@pytest.mark.parametrize("chunk", [16, 2048])
@pytest.mark.parametrize("name", SCAN)
def test_selective_scan(goldens, name, chunk):
    c = case(goldens, f"scan.{name}.")
    c |= {k: np.swapaxes(v, 1, 2) for k, v in c.items() if v.ndim == 3}  # the kernels have positions last
    y, state = jax.jit(selective_scan, static_argnames=STATIC)(
        *(c[k] for k in ("u", "dt", "A", "B", "C")),
        chunk_size=chunk,
        D=c.get("D"),
        z=c.get("z"),
        dt_bias=c.get("dt_bias"),
        dt_softplus=True,
    )
    assert error(y, c["y"]) < OP_ATOL["float32"]
    assert error(state, c["final_state"]) < OP_ATOL["float32"]
