"""What a process costs: `python -m bench.process [--model mamba2-130m] [--dtype float32]`.

Seconds to the first token of a first process (compiling) and of later ones (warm compilation cache), each started from
nothing on a checkpoint on disk, and the peak memory of a process by the length of its prompt. Weights are random.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer

from bench.common import environment
from bench.models import random_params

_CHILD = """
import json, resource, sys, time
from mamba_jax.scheduler.compilation_cache import enable_compilation_cache
enable_compilation_cache()
import mamba_jax
params = mamba_jax.load(sys.argv[1])
loaded = time.time()
mamba_jax.generate(params, [5] * int(sys.argv[2]), max_new_tokens=1)
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps({"loaded": loaded, "done": time.time(), "rss_kib": peak}))
"""


def run(folder: str, length: int, cache: str) -> dict[str, float]:
    """One process: seconds until the weights are there and until the first token, and its peak memory in MiB."""
    start = time.time()
    command = [sys.executable, "-c", _CHILD, folder, str(length)]
    output = subprocess.run(command, env=os.environ | {"MAMBA_JAX_CACHE": cache}, check=True, capture_output=True)
    values = json.loads(output.stdout)
    return {
        "load_s": values["loaded"] - start,
        "first_token_s": values["done"] - start,
        "peak_mib": values["rss_kib"] / 1024,
    }


def main(
    model: str = "mamba2-130m",
    dtype: str = "float32",
    prompt: Annotated[list[int] | None, typer.Option(help="Prompt lengths for the peak memory.")] = None,
    out: Annotated[Path | None, typer.Option("--json", help="Write the report.")] = None,
) -> None:
    """Time the first token of processes, and measure their memory."""
    import mamba_jax

    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as cache:
        mamba_jax.save(random_params(model, dtype), Path(folder) / "model")
        target = str(Path(folder) / "model")
        cold = run(target, 100, cache)
        warm = [run(target, 100, cache) for _ in range(3)]
        lengths = prompt or [2048, 16384]
        memory = {length: run(target, length, cache)["peak_mib"] for length in lengths}
    report = environment("process") | {
        "model": model,
        "dtype": dtype,
        "cold_first_token_s": cold["first_token_s"],
        "warm_first_token_s": statistics.median(w["first_token_s"] for w in warm),
        "warm_load_s": statistics.median(w["load_s"] for w in warm),
        "peak_mib": memory,
    }
    if out is not None:
        out.write_text(json.dumps(report, indent=1))
    typer.echo(json.dumps(report, indent=1))


if __name__ == "__main__":
    typer.run(main)
