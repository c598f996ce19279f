"""Measure the tables that ship with the package: `python -m bench.calibrate --model mamba2-130m --dtype bfloat16`.

Weights are random, of the published sizes, or those of the embedded default model ("default").
"""

from pathlib import Path
from typing import Annotated

import typer

import mamba_jax
from bench.models import PUBLISHED, random_params
from mamba_jax.scheduler.calibration import SHIPPED


def main(
    model: Annotated[list[str], typer.Option(help=f"default or one of {', '.join(PUBLISHED)}.")],
    dtype: Annotated[list[str] | None, typer.Option(help="float32, bfloat16 or float16.")] = None,
    batch: Annotated[list[int] | None, typer.Option(help="Rows.")] = None,
    rounds: int = 7,
    out: Annotated[Path, typer.Option(help="Folder of the tables.")] = SHIPPED,
) -> None:
    """Calibrate models on this device."""
    for name in model:
        for kind in dtype or ["float32"]:
            if name == "default":
                params = mamba_jax.cast_params(mamba_jax.load(mamba_jax.default_model()), kind)
            else:
                params = random_params(name, kind)
            for found in mamba_jax.calibrate(params, batch=batch or [1], rounds=rounds, folder=out):
                best = {length: timing.chunk_size or "kernels" for length, timing in found.best.items()}
                typer.echo(f"{found.shape} on {found.device}: {best}")


if __name__ == "__main__":
    typer.run(main)
