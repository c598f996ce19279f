"""Both scans over two devices, in a process of their own: splitting batch or heads changes no number."""

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import functools
import jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from mamba_jax.ops import scan, ssd
from tests.ops.cases import OPS, STATIC, error

mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
batch = {"x": P("d"), "dt": P("d"), "B": P("d"), "C": P("d"), "z": P("d"), "initial_state": P("d")}
channels = {
    "ssd": dict.fromkeys(("x", "dt", "B", "C", "z"), P(None, None, "d"))
    | dict.fromkeys(("A", "D", "dt_bias"), P("d")) | {"initial_state": P(None, "d")},
    "scan": dict.fromkeys(("x", "dt", "z"), P(None, None, "d"))
    | dict.fromkeys(("A", "D", "dt_bias"), P("d")) | {"initial_state": P(None, None, "d")},
}
for op in OPS:
    inputs = op.inputs(op.small)
    want = op.run(inputs, chunk_size=16)
    for specs in (batch, channels[op.name]):
        put = {k: jax.device_put(v, NamedSharding(mesh, specs.get(k, P()))) if isinstance(v, np.ndarray) else v
               for k, v in inputs.items()}
        compiled = jax.jit(op.scan, static_argnames=STATIC).lower(**put, chunk_size=16).compile()
        got = compiled(**{k: v for k, v in put.items() if isinstance(v, jax.Array)})
        assert all(error(g, w) < 1e-5 for g, w in zip(got, want, strict=True)), (op.name, specs)
        assert not got[0].sharding.is_fully_replicated, (op.name, specs)
        assert "all-gather" not in compiled.as_text(), (op.name, specs)

for module, name in ((ssd, "ssd"), (scan, "selective_scan")):  # each device runs the kernel for its own heads
    setattr(module.tpu, name, functools.partial(getattr(module.tpu, name), interpret=True))
    module.gpu.declines = lambda *_: "what GPUs take"
for op in OPS:
    inputs = op.inputs(next(spec for spec in op.specs if spec.name == "full"))
    want = op.run(inputs, chunk_size=16)
    whole = NamedSharding(mesh, P())
    put = {k: jax.device_put(v, whole) if isinstance(v, np.ndarray) else v for k, v in inputs.items()}
    run = jax.jit(op.scan, static_argnames=(*STATIC, "implementation"))
    got = run(**put, chunk_size=16, implementation="pallas")
    assert all(error(g, w) < 1e-5 for g, w in zip(got, want, strict=True)), op.name
    assert got[0].sharding.spec[2] == "d", op.name
print("same")
"""


def test_two_devices():
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    root = Path(__file__).parents[2]
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, cwd=root, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "same"
