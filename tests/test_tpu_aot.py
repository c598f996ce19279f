"""Programs compiled for TPUs by the TPU compiler, on a machine that has none."""

import dataclasses
import functools
import json
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench.models import PUBLISHED
from bench.tpu_aot import compile_one, compile_two, page
from mamba_jax import MambaConfig, init_cache, tpu
from mamba_jax.cli import main
from mamba_jax.ops.scan import selective_scan
from mamba_jax.ops.ssd import ssd
from mamba_jax.pallas_kernels.tpu import mamba1_step, mamba2_step
from mamba_jax.params import param_shapes
from mamba_jax.programs import Spec, lower_shapes

compiler = pytest.mark.skipif(not tpu.have_compiler(), reason='no TPU compiler: pip install -e ".[tpu-aot]"')
CHIPS = ("v5e:1x1", "v6e:1x1")


@pytest.fixture(autouse=True)
def at_a_tpu(monkeypatch):
    """Kernels are chosen as in a process at a TPU."""
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")


def compiled_for(topology, function, *args, donate=()):
    sharding = jax.sharding.SingleDeviceSharding(tpu.topology_devices(topology)[0])
    args = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), args)
    return jax.jit(function, donate_argnums=donate).lower(*args).compile()


def shape(*dims, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(dims, dtype)


@compiler
@pytest.mark.parametrize("topology", CHIPS)
@pytest.mark.parametrize(
    ("h", "p", "g", "n", "length", "dtype"),
    [
        (24, 64, 1, 128, 512, "bfloat16"),
        (80, 64, 1, 128, 2048, "bfloat16"),
        (80, 64, 1, 128, 200, "float32"),
        (128, 64, 8, 128, 300, "bfloat16"),
        (6, 80, 3, 96, 100, "bfloat16"),  # U87
        (6, 80, 3, 96, 48, "float32"),
        (4, 64, 1, 16, 256, "bfloat16"),  # U88
        (4, 64, 1, 64, 256, "bfloat16"),
        (4, 8, 1, 16, 1, "bfloat16"),
    ],
)
def test_u87_u88_ssd_compiles(topology, h, p, g, n, length, dtype):
    x, maps = shape(1, length, h, p, dtype=dtype), shape(1, length, g, n, dtype=dtype)
    rates = shape(h, dtype=jnp.float32)
    run = functools.partial(ssd, chunk_size=256, dt_softplus=True, implementation="pallas")
    compiled = compiled_for(topology, run, x, shape(1, length, h, dtype=dtype), rates, maps, maps)
    computations, entry = tpu._parse(compiled.as_text())
    (kernel,) = (one for one in computations[entry].values() if "tpu_custom_call" in one.rest)
    _, steps, exponents, *_ = (computations[entry][name].types[0] for name in kernel.operands)
    assert steps.startswith("f32[")
    assert exponents.startswith("f32[")


@compiler
@pytest.mark.parametrize("topology", CHIPS)
@pytest.mark.parametrize(
    ("d", "n", "length", "dtype"),
    [(1536, 16, 512, "bfloat16"), (5120, 16, 2048, "bfloat16"), (5120, 16, 100, "float32"), (80, 6, 100, "bfloat16")],
)
def test_selective_scan_compiles(topology, d, n, length, dtype):
    x, maps = shape(1, length, d, dtype=dtype), shape(1, length, n, dtype=dtype)
    run = functools.partial(selective_scan, chunk_size=16, dt_softplus=True, implementation="pallas")
    compiled = compiled_for(topology, run, x, x, shape(d, n, dtype=jnp.float32), maps, maps)
    assert 'custom_call_target="tpu_custom_call"' in compiled.as_text()


@compiler
@pytest.mark.parametrize(("topology", "batch"), [(CHIPS[0], 1), (CHIPS[1], 1), (CHIPS[1], 16)])
@pytest.mark.parametrize("name", ["mamba1-130m", "mamba1-2.8b", "mamba2-130m", "mamba2-2.7b"])
def test_steps_compile_and_update_the_cache_in_place(topology, batch, name):
    config = dataclasses.replace(PUBLISHED[name], n_layer=1, vocab_size=16)
    layer = param_shapes(config, "bfloat16").layers[0]
    cache = jax.eval_shape(lambda: init_cache(config, batch, "bfloat16"))
    kernel = mamba1_step if config.layer == "mamba1" else mamba2_step

    def run(layer, projected, window, state):
        return kernel.mix(layer, config, projected, window, state)

    projected = shape(batch, config.in_proj_width)
    compiled = compiled_for(topology, run, layer, projected, cache.conv[0], cache.ssm[0], donate=(2, 3))
    assert 'custom_call_target="tpu_custom_call"' in compiled.as_text()
    memory = compiled.memory_analysis()
    leaves = jax.tree.leaves(cache)
    assert memory.alias_size_in_bytes >= sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)
    assert memory.temp_size_in_bytes == 0


def layers_of(name, count=2):
    return dataclasses.replace(PUBLISHED[name], n_layer=count)


@compiler
@pytest.mark.parametrize(
    ("topology", "name"),
    [(CHIPS[0], "mamba2-2.7b"), *((CHIPS[1], name) for name in ("mamba1-2.8b", "mamba2-130m", "mamba2-2.7b"))],
)
def test_a_token_reads_weights_once_and_states_twice(topology, name, monkeypatch):
    monkeypatch.setitem(PUBLISHED, name, layers_of(name))
    monkeypatch.setattr("bench.tpu_aot.MODELS", PUBLISHED)
    row = compile_one(topology, name, "decode", 0, "pallas")
    assert row["kernels"] == 2
    assert row["cache in place"]
    assert row["fits"]
    assert row["bytes / (weights + 2 states)"] < 1.05
    assert row["bound"] == "memory"


@compiler
@pytest.mark.parametrize("name", ["mamba1-130m", "mamba2-2.7b"])
def test_a_prefill_computes_what_the_algorithm_asks_for(name, monkeypatch):
    monkeypatch.setattr("bench.tpu_aot.MODELS", {name: layers_of(name, 1)})
    row = compile_one("v6e:1x1", name, "prefill", 1024, "pallas")
    assert row["kernels"] == 1
    assert row["cache in place"]
    assert row["temporaries"] < 1024 * 4 * PUBLISHED[name].in_proj_width  # nothing of an axis of positions twice
    assert 0.9 < row["FLOPs / algorithm's"] < 1.1


@compiler
def test_no_decay_matrix_or_mask_lies_in_memory_and_decays_are_float32():
    """XLA's op makes the mask on the chip, from nothing (the paper's Table 7), and decays in float32 (Table 8)."""
    config = dataclasses.replace(layers_of("mamba2-130m", 1), vocab_size=16)
    params = tpu.abstract_params(config, "bfloat16", tpu.topology_devices("v6e:1x1")[0])
    compiled = lower_shapes(params, Spec("prefill", 1, 512, 256)).compile()
    computations, _ = tpu._parse(compiled.as_text())
    fused = {tpu._named(one, "calls") for body in computations.values() for one in body.values()}
    for body in (body for name, body in computations.items() if name not in fused):
        for one in body.values():
            squares = [kind for kind in one.types if "256,256]" in kind]
            assert tpu._size(squares) == 0, one
            assert one.kind == "bitcast" or not one.operands or not any("pred" in kind for kind in squares), one
    exponentials = re.findall(r"= (\w+)\[([\d,]*)\]\S* exponential\(", compiled.as_text())
    assert any(dims.endswith("256,256") for _, dims in exponentials)
    assert {kind for kind, _ in exponentials} == {"f32"}
    assert compiled.memory_analysis().temp_size_in_bytes < 512 * 4 * config.in_proj_width


@compiler
@pytest.mark.parametrize(
    ("kind", "length", "implementation"), [("decode", 0, "xla"), ("decode", 0, "pallas"), ("prefill", 128, "pallas")]
)
def test_two_devices_divide_the_heads(kind, length, implementation, monkeypatch):
    monkeypatch.setattr("bench.tpu_aot.MODELS", {"mamba2-130m": layers_of("mamba2-130m")})
    row = compile_two("v6e:2x2", "mamba2-130m", kind, length, implementation)
    whole = tpu.decode_bytes(layers_of("mamba2-130m"), "bfloat16")
    assert row["kernels"] == (2 if implementation == "pallas" else 0)
    assert row["collectives"]["all-reduce"] >= 2
    assert row["arguments a device"] < 0.95 * whole
    assert "all-reduce" in page([], [row])


@compiler
def test_a_topology_that_there_is_not():
    with pytest.raises(ValueError, match="topology: got 'v6e:7x9'"):
        tpu.topology_devices("v6e:7x9")


def test_without_a_compiler_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setattr(tpu, "have_compiler", lambda: False)
    with pytest.raises(ImportError, match=r"mamba-jax\[tpu-aot\]"):
        tpu.topology_devices("v6e:1x1")
    with pytest.raises(ValueError, match="topology: got 'h200:1', wanted one such as v5e:1x1"):
        tpu.topology_devices("h200:1")


@compiler
def test_warming_for_a_tpu_says_what_programs_cost_there(monkeypatch, capsys):
    monkeypatch.undo()
    with pytest.raises(SystemExit) as ended:
        main(["warm", "--platform", "tpu", "--lengths", "1:16", "--max-new-tokens", "0", "--json"])
    assert not ended.value.code
    facts = json.loads(capsys.readouterr().out)
    assert facts["topology"] == "v6e:1x1"
    assert facts["computed"]
    (program,) = facts["programs"]
    assert program["kind"] == "prefill"
    assert program["fits"]
    assert program["hbm_bytes"] / program["seconds"] == pytest.approx(tpu.CHIPS["v6e"].bandwidth)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--platform", "cuda"], "wanted 'tpu'"),
        (["--topology", "v6e:1x1"], "wanted --platform tpu"),
        (["--platform", "tpu", "--cache-dir", "x"], "nothing that is compiled for another machine is kept"),
    ],
)
def test_wrong_use_of_warming_for_a_tpu(options, said, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["warm", *options])
    assert ended.value.code == 2
    assert said in " ".join(capsys.readouterr().err.replace("│", " ").split())


PROGRAM = """HloModule jit_f, is_scheduled=true

%slices (param_0: bf16[100,8], param_1: s32[]) -> bf16[1,8] {
  %param_0 = bf16[100,8]{1,0:T(8,128)(2,1)} parameter(0)
  %param_1 = s32[]{:T(128)S(6)} parameter(1)
  ROOT %row = bf16[1,8]{1,0:T(8,128)} dynamic-slice(%param_0, %param_1), dynamic_slice_sizes={1,8}
}

%same (param: f32[16]) -> f32[16] {
  %param = f32[16]{0:T(128)} parameter(0)
  ROOT %as_it_is = f32[16]{0:T(128)} bitcast(%param)
}

%negative (param: f32[16]) -> f32[16] {
  %param = f32[16]{0:T(128)} parameter(0)
  %handed_on = f32[16]{0:T(128)} fusion(%param), kind=kLoop, calls=%same
  ROOT %less = f32[16]{0:T(128)S(1)} negate(%handed_on)
}

%until (carry: (s32[], f32[16])) -> pred[] {
  %limit = s32[]{:T(128)} constant(5)
  %carry = (s32[]{:T(128)}, f32[16]{0:T(128)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%carry), index=0
  ROOT %less = pred[]{:T(512)} compare(%i, %limit), direction=LT
}

%turn (carry: (s32[], f32[16])) -> (s32[], f32[16]) {
  %carry = (s32[]{:T(128)S(6)}, f32[16]{0:T(128)}) parameter(0)
  %i = s32[]{:T(128)S(6)} get-tuple-element(%carry), index=0
  %x = f32[16]{0:T(128)} get-tuple-element(%carry), index=1
  %next = s32[]{:T(128)S(6)} add(%i, %i)
  %y = f32[16]{0:T(128)} negate(%x)
  ROOT %out = (s32[]{:T(128)S(6)}, f32[16]{0:T(128)}) tuple(%next, %y)
}

ENTRY %main (table: bf16[100,8], i: s32[], x: f32[16]) -> f32[16] {
  %table = bf16[100,8]{1,0:T(8,128)(2,1)} parameter(0)
  %i = s32[]{:T(128)S(6)} parameter(1)
  %x = f32[16]{0:T(128)} parameter(2)
  %row = bf16[1,8]{1,0:T(8,128)S(1)} fusion(%table, %i), kind=kLoop, calls=%slices
  %minus = f32[16]{0:T(128)S(1)} fusion(%x), kind=kLoop, calls=%negative
  %fetch = (f32[16]{0:T(128)S(1)}, f32[16]{0:T(128)}, u32[]{:S(2)}) copy-start(%x)
  %fetched = f32[16]{0:T(128)S(1)} copy-done(%fetch)
  %sum = f32[16]{0:T(128)} all-reduce(%fetched), to_apply=%turn
  %start = (s32[]{:T(128)S(6)}, f32[16]{0:T(128)}) tuple(%i, %sum)
  %loop = (s32[]{:T(128)S(6)}, f32[16]{0:T(128)}) while(%start), condition=%until, body=%turn
  ROOT %end = f32[16]{0:T(128)} get-tuple-element(%loop), index=1
}
"""


def test_traffic_of_a_program():
    # A row of the table; x read through two fusions, and fetched; a sum written; five turns that read and write x.
    assert tpu.memory_traffic(PROGRAM) == 16 + 64 + 64 + 64 + 5 * 128
    assert tpu.memory_traffic(PROGRAM.replace("direction=LT", "direction=NE")) == 128  # a turn of a loop without end
    assert tpu.collectives(PROGRAM) == {"all-reduce": 1}


def test_bytes_of_a_token():
    config = MambaConfig(
        layer="mamba2", vocab_size=16, pad_vocab_size_multiple=8, d_model=8, n_layer=1, d_inner=16, d_state=4, headdim=8
    )
    leaves = jax.tree.leaves(param_shapes(config, "bfloat16"))
    weights = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    states = 2 * 8 * 4 * 4 + 3 * (16 + 8) * 2
    assert tpu.decode_bytes(config, "bfloat16") == weights + 2 * states
    untied = dataclasses.replace(config, tie_embeddings=False)
    assert tpu.decode_bytes(untied, "bfloat16") == weights + 2 * states


def test_flops_of_a_prefill():
    config = layers_of("mamba2-130m", 1)
    products = 2 * 768 * (3352 + 1536) + 2 * 4 * 1792
    scan = 2 * (128 * 128 + 24 * 64 * (128 + 256))
    head = 2 * 768 * 50288
    assert tpu.prefill_flops(config, 1, 1024, 128) == 1024 * (products + scan) + head
    assert np.isclose(tpu.prefill_flops(config, 2, 1024, 128), 2 * tpu.prefill_flops(config, 1, 1024, 128))
