"""Decays in bfloat16 instead of float32: `python -m bench.decay` ("Compiler-First State Space Duality", Table 8).

The decays between the positions of a chunk and to its end are rounded to bfloat16 where the engine keeps float32; all
else stays, and so does what the difference of logits means: random weights give another one than a trained checkpoint.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import typer

from bench.common import Bench, Row, Section, Setting, bars, command, significant
from bench.masking import traced_with
from bench.models import load_model, planned_chunk, random_ids
from mamba_jax import Params, forward
from mamba_jax.ops import ssd

PAPER = {"float32": 0.0, "bfloat16": 0.013}  # largest error of a logit: Table 8, 130M on a TPU v6e, 1024 tokens


def rounded(coarse: jax.Array, fine: jax.Array, exact: Any = ssd._decay) -> jax.Array:
    """What `ssd._decay` gives, in bfloat16."""
    return jax.lax.reduce_precision(exact(coarse, fine), exponent_bits=8, mantissa_bits=7)


def logits_of(params: Params, length: int) -> np.ndarray:
    tokens = np.array([random_ids(params, length)], np.int32)
    return np.asarray(forward(params, tokens, chunk_size=planned_chunk(params, length))[0], np.float64)


def run(setting: Setting) -> list[Section]:
    rows: list[Row] = []
    length = setting.lengths[0]
    for name in setting.models:
        for dtype in dict.fromkeys((setting.weights, "float32", "bfloat16")):
            params = load_model(name, dtype)
            exact = logits_of(params, length)
            with traced_with("_decay", rounded):
                apart = np.abs(logits_of(params, length) - exact)
            for decay, error in (("float32", 0.0), ("bfloat16", float(apart.max()))):
                rows.append(
                    {
                        "model": name,
                        "weights": dtype,
                        "decays": decay,
                        "largest error of a logit": significant(error, 3),
                        "over their deviation": significant(error / float(jnp.std(exact)), 3),
                        "paper": PAPER[decay],
                    }
                )
    return [
        Section(
            "Table 8: decays in 16 bits",
            rows,
            f"The paper: the 130M checkpoint, bfloat16, 1024 tokens, TPU v6e. Here {length} tokens; other weights, so "
            "the size of the error does not compare, only that there is one.",
            "Decays are the one factor that is multiplied up over positions, hence float32 whatever the weights are.",
        )
    ]


def draw(sections: list[Section], figure: Any) -> None:
    panel = figure.subplots()
    rows = [row for row in sections[0].rows if row["decays"] == "bfloat16"]
    bars(panel, rows, lambda row: f"{row['model']}\n{row['weights']} weights", "largest error of a logit")
    panel.set(title="bfloat16 decays against float32 ones", ylabel="largest error of a logit")


BENCH = Bench(
    "decay",
    "Decays in bfloat16 (Table 8)",
    small=Setting(("mamba2-small",), (512,), rounds=1),
    full=Setting(("mamba2-130m",), (1024,), rounds=1),
    run=run,
    draw=draw,
)
main = command(BENCH)

if __name__ == "__main__":
    typer.run(main)
