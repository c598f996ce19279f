"""Static against row-wise causal mask: `python -m bench.masking` ("Compiler-First State Space Duality", Table 7).

The same prefill program twice: with the mask as a comparison of two ranges, which XLA fuses into what surrounds it, and
with one that a loop writes row by row, as the paper's ablation does.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import typer

from bench.common import Bench, Row, Section, Setting, bars, command, seconds_of, significant, turns
from bench.models import Prefill, load_model, planned_chunk
from mamba_jax.ops import ssd

PAPER = {"static": 42631, "row-wise": 7330}  # tokens a second: Table 7, 1.3B on a TPU v6e, 1024 tokens


def row_wise(scores: jax.Array) -> jax.Array:
    """What `ssd._causal` gives, one row after the other."""
    columns = jnp.arange(scores.shape[-1])

    def write(i: jax.Array, masked: jax.Array) -> jax.Array:
        row = jax.lax.dynamic_index_in_dim(scores, i, -2)
        return jax.lax.dynamic_update_slice_in_dim(masked, jnp.where(columns <= i, row, 0.0), i, -2)

    return jax.lax.fori_loop(0, scores.shape[-2], write, jnp.zeros_like(scores))


@contextmanager
def traced_with(name: str, function: Callable[..., jax.Array]) -> Iterator[None]:
    """While it lasts, what is traced uses another function in Mamba-2's scan."""
    jax.clear_caches()
    try:
        with mock.patch.object(ssd, name, function):
            yield
    finally:
        jax.clear_caches()


def run(setting: Setting) -> list[Section]:
    rows: list[Row] = []
    for name in setting.models:
        params = load_model(name, setting.weights)
        length = setting.lengths[0]
        chunk = planned_chunk(params, length)
        programs = {"static": Prefill(params, length, chunk)}
        with traced_with("_causal", row_wise):
            programs["row-wise"] = Prefill(params, length, chunk)
        logits = {mask: np.asarray(program()) for mask, program in programs.items()}
        apart = float(np.abs(logits["static"] - logits["row-wise"]).max())
        calls = {mask: functools.partial(seconds_of, program) for mask, program in programs.items()}
        found = turns(calls, setting.rounds)
        for mask, seconds in found.items():
            rows.append(
                {
                    "model": name,
                    "mask": mask,
                    "tok/s": significant(length / seconds),
                    "against static %": significant(100 * (found["static"] / seconds - 1), 3),
                    "largest difference of logits": apart if mask == "row-wise" else 0.0,
                    "paper tok/s": PAPER[mask],
                    "paper %": {"static": 0.0, "row-wise": -82.8}[mask],
                }
            )
    return [
        Section(
            "Table 7: prefill with either mask",
            rows,
            f"The paper: Mamba-2 1.3B, bfloat16, 1024 tokens, TPU v6e. Here {setting.lengths[0]} tokens in chunks of "
            f"{chunk}, {setting.weights} weights: the percentage compares, the rates do not.",
            "The results are the same up to the order in which XLA adds up." if apart else "The logits are equal.",
        )
    ]


def draw(sections: list[Section], figure: Any) -> None:
    panel = figure.subplots()
    bars(panel, sections[0].rows, lambda row: f"{row['model']}\n{row['mask']}", "tok/s")
    panel.set(title="Prefill by causal mask", ylabel="tokens per second")


BENCH = Bench(
    "masking",
    "Static against row-wise mask (Table 7)",
    small=Setting(("mamba2-small",), (512,), rounds=5),
    full=Setting(("mamba2-1.3b",), (1024,), rounds=10),
    run=run,
    draw=draw,
)
main = command(BENCH)

if __name__ == "__main__":
    typer.run(main)
