"""A training step: `python -m bench.training` ("Compiler-First State Space Duality", Table 13).

Loss and its gradient on one row (what the paper times), and the whole step with optax's AdamW besides.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
import typer

from bench.common import Bench, Row, Section, Setting, command, lines, seconds_of, significant, turns
from bench.models import beside, load_model, planned_chunk, published, random_ids
from mamba_jax import Params, forward

# ms of JAX and of mamba_ssm's Triton by length: Table 13 (L40S).
TABLE_13 = {
    "mamba2-130m": {512: (25.9, 73.7), 1024: (45.2, 72.4), 2048: (86.7, 68.0)},
    "mamba2-370m": {512: (62.8, 147.0), 1024: (115.8, 128.6), 2048: (229.6, 151.4)},
}
RATE = 1e-4


def loss_of(params: Params, tokens: jax.Array, chunk_size: int) -> jax.Array:
    """Mean cross entropy of each next token."""
    logits = forward(params, tokens[:, :-1], chunk_size=chunk_size)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def run(setting: Setting) -> list[Section]:
    rows: list[Row] = []
    optimiser = optax.adamw(RATE)
    for name in setting.models:
        params = load_model(name, setting.weights)
        calls = {}
        for length in setting.lengths:
            tokens = jnp.asarray([random_ids(params, length + 1)], jnp.int32)
            gradient = jax.value_and_grad(functools.partial(loss_of, chunk_size=planned_chunk(params, length)))

            def step(params: Params, state: Any, tokens: jax.Array, gradient: Any = gradient) -> Any:
                loss, grads = gradient(params, tokens)
                updates, state = optimiser.update(grads, state, params)
                return loss, optax.apply_updates(params, updates), state

            calls["gradient", length] = functools.partial(seconds_of, jax.jit(gradient), params, tokens)
            calls["step", length] = functools.partial(seconds_of, jax.jit(step), params, optimiser.init(params), tokens)
        found = turns(calls, setting.rounds)
        for length in setting.lengths:
            ours, paper = found["gradient", length], TABLE_13.get(published(name), {}).get(length, (None, None))
            rows.append(
                {
                    "model": name,
                    "tokens": length,
                    "forward + backward ms": significant(1e3 * ours),
                    "with AdamW ms": significant(1e3 * found["step", length]),
                    "tok/s": significant(length / ours),
                    "paper JAX ms": paper[0],
                    "paper Triton ms": paper[1],
                }
            )
    return [
        Section(
            "Table 13: a training step of one row",
            rows,
            f"The paper: one L40S, ten steps, forward and backward. Here {setting.weights} weights, medians of "
            f"{setting.rounds}; another device, so only the growth with the length compares.{beside(setting.models)}",
            "mamba_ssm is not run here: its Triton column has no counterpart.",
        )
    ]


def draw(sections: list[Section], figure: Any) -> None:
    panel = figure.subplots()
    lines(panel, sections[0].rows, "tokens", "forward + backward ms", ("model",))
    panel.set(title="Forward and backward", xlabel="tokens", ylabel="ms", yscale="log")


BENCH = Bench(
    "training",
    "A training step (Table 13)",
    small=Setting(("mamba2-small",), (512,), rounds=3),
    full=Setting(("mamba2-130m", "mamba2-370m"), (512, 1024, 2048), rounds=10),
    run=run,
    draw=draw,
)
main = command(BENCH)

if __name__ == "__main__":
    typer.run(main)
