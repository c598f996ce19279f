"""Weights spread over several devices; run in a process of its own, since the number of devices is fixed at start."""

import os
import subprocess
import sys

_SCRIPT = """
import dataclasses, functools
import jax, numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
from mamba_jax import forward, generate, init_cache, prefill, score, step
from mamba_jax import ops
from mamba_jax.ops import dispatch
from mamba_jax.pallas_kernels.tpu import mamba2_step, ssd
from tests.tiny import tiny_params

params = tiny_params("mamba2", n_layer=1)
mesh = Mesh(np.array(jax.devices()), ("x",))
assert mesh.size == 2
prompts, options = [[1, 2, 3], [5]], {"max_new_tokens": 6, "temperature": 1.0}
want, total = generate(params, prompts, **options), score(params, [1, 2, 3]).total
for divide in (lambda x: x.shape[0] % 2 == 0, lambda x: x.ndim == 2 and x.shape[0] % 2 == 0, lambda x: False):
    spread = jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh, P("x") if divide(x) else P())), params)
    got = generate(spread, prompts, **options)
    assert [row.tokens for row in got] == [row.tokens for row in want]
    assert abs(score(spread, [1, 2, 3]).total - total) < 1e-4
second = jax.device_put(params, jax.devices()[1])
assert [row.tokens for row in generate(second, prompts, **options)] == [row.tokens for row in want]

calls = {
    "forward": lambda params: forward(params, [[1]]),
    "prefill": lambda params: prefill(params, [[1]]),
    "step": lambda params: step(params, [1], init_cache(params.config, 1, "float32")),
    "generate": lambda params: generate(params, [1]),
    "score": lambda params: score(params, [1, 2]),
}
# XLA can't split a kernel: what lies on several devices takes its own operations.
dispatch.KERNELS_BY_DEFAULT = frozenset({"cuda", "tpu"})
kernels = {"d_model": 256, "d_inner": 256, "d_state": 64, "headdim": 64, "n_layer": 1}
taken = tiny_params("mamba2", "bfloat16", **kernels)
spread = jax.device_put(taken, NamedSharding(mesh, P()))
for model, held in ((taken, True), (spread, False)):
    for ids, read in ((np.ones((1, 64), np.int32), forward), (np.ones(1, np.int32), step)):
        rest = () if read is forward else (init_cache(taken.config, 1, "bfloat16"),)
        lowered = jax.jit(read).trace(model, ids, *rest).lower(lowering_platforms=("cuda",))
        assert ("mosaic_gpu" in lowered.as_text()) == held, (held, read)

# What is asked for, each device runs for its own heads.
for kernel, name in ((ssd, "ssd"), (mamba2_step, "mix")):
    setattr(kernel, name, functools.partial(getattr(kernel, name), interpret=True))
ops.ssd.gpu.declines = lambda *_: "what GPUs take"
model = tiny_params("mamba2", headdim=8, n_layer=1)
spread = jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh, P("x") if x.shape[0] % 2 == 0 else P())), model)
got = want = None
for read in (
    lambda params, cache, how: prefill(params, [[1, 2, 3]] * 2, lengths=[3, 2], implementation=how),
    lambda params, cache, how: step(params, [1, 2], cache, implementation=how),
):
    want = read(model, want and want[1], "xla")
    got = read(spread, got and got[1], "pallas")
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)
first = spread.replace(config=dataclasses.replace(model.config, norm_before_gate=True))
try:
    step(first, [1, 2], want[1], implementation="pallas")
except NotImplementedError as error:
    assert "arrays on a mesh of several devices" in str(error), error
else:
    raise AssertionError("pallas")

explicit = jax.device_put(params, NamedSharding(jax.make_mesh((2,), ("x",), axis_types=(AxisType.Explicit,)), P()))
apart = params.replace(embedding=second.embedding)
for name, call in calls.items():
    for wrong, message in ((explicit, "wanted Auto axes"), (apart, "params.layers.0.norm: got it on ['cpu:0']")):
        if wrong is apart and name not in ("generate", "score"):
            continue
        try:
            call(wrong)
        except ValueError as error:
            assert message in str(error), (name, error)
        else:
            raise AssertionError(name)
"""


def test_weights_over_two_devices_and_on_the_second_give_the_same_tokens():
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.getcwd()}
    result = subprocess.run(
        [sys.executable, "-c", _SCRIPT], env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
