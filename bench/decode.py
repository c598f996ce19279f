"""Decode strategies: `python -m bench.decode` ("Compiler-First State Space Duality", Tables 1, 4 and 10, Fig. 2).

Three ways to the same tokens: a loop on the device, a dispatch per token, and reading the whole text again for each
token. A figure at n tokens is the mean rate of a generation of n tokens (device, host), or the rate of a step whose
text has n tokens (recompute). Prefill and compilation are left out.
"""

import functools
from typing import Any

import typer

from bench.common import Bench, Row, Section, Setting, command, lines, significant, turns
from bench.models import beside, load_model, published, random_ids
from mamba_jax import Params, generate

PROMPT = 16
# Tokens a second by model, strategy and length: Tables 1 and 10 (TPU v6e), Table 4 (L40S).
V6E = {
    "mamba2-130m": {
        "device": {128: 1588, 256: 1609, 512: 1627, 1024: 1635, 2048: 1639, 4096: 1641},
        "host": {128: 662, 1024: 729, 4096: 751},
        "recompute": {128: 903, 256: 898, 512: 626, 1024: 278, 2048: 132, 4096: 56},
    },
    "mamba2-370m": {
        "device": {128: 626, 256: 634, 512: 639, 1024: 641, 2048: 641, 4096: 641},
        "host": {128: 392, 1024: 391, 4096: 390},
        "recompute": {128: 495, 256: 348, 512: 205, 1024: 124, 2048: 39, 4096: 18},
    },
    "mamba2-780m": {"device": {128: 318, 256: 321, 512: 322, 1024: 322, 2048: 323, 4096: 323}},
}
L40S = {
    "mamba2-130m": {
        "device": {128: 240.2, 1024: 267.1, 4096: 314.2},
        "host": {128: 178.4, 1024: 141.9, 4096: 188.5},
        "recompute": {128: 203.3, 1024: 115.8, 4096: 20.3},
    },
    "mamba2-370m": {
        "device": {128: 154.3, 1024: 165.1, 4096: 148.0},
        "host": {128: 104.1, 1024: 98.8, 4096: 112.3},
    },
}


def decoding(params: Params, new: int, mode: Any) -> float:
    """Seconds a token of a generation of `new` tokens."""
    result: Any = generate(params, random_ids(params, PROMPT), max_new_tokens=new, stop_token_ids=[], mode=mode)
    return result.timings["decode_s"] / new


def rereading(params: Params, length: int) -> float:
    """Seconds of a step without a cache whose text has `length` tokens."""
    seconds = []
    for new in (1, 2):  # the first token needs no reading beyond the prompt's
        result: Any = generate(
            params, random_ids(params, length - 1), max_new_tokens=new, stop_token_ids=[], mode="recompute"
        )
        seconds.append(result.timings["decode_s"])
    return seconds[1] - seconds[0]


def run(setting: Setting) -> list[Section]:
    """Measure the strategies; host on the first length, the last and one between."""
    rows: list[Row] = []
    lengths = sorted(setting.lengths)
    hosted = {lengths[0], lengths[len(lengths) // 2], lengths[-1]}
    for name in setting.models:
        params = load_model(name, setting.weights)
        for mode in ("device", "host"):
            decoding(params, 8, mode)  # compiles
        calls = {("device", n): functools.partial(decoding, params, n, "device") for n in lengths}
        calls |= {("host", n): functools.partial(decoding, params, n, "host") for n in lengths if n in hosted}
        again = {("recompute", n): functools.partial(rereading, params, n) for n in lengths}
        found = turns(calls, setting.rounds, warm_up=False) | turns(again, setting.rounds)
        for (mode, n), seconds in sorted(found.items()):
            rows.append(
                {
                    "model": name,
                    "method": mode,
                    "tokens": n,
                    "tok/s": significant(1 / seconds),
                    "device is faster by": significant(seconds / found["device", n]),
                    "paper v6e tok/s": V6E.get(published(name), {}).get(mode, {}).get(n),
                    "paper L40S tok/s": L40S.get(published(name), {}).get(mode, {}).get(n),
                }
            )
    return [
        Section(
            "Tables 1, 4 and 10: tokens a second of one row, by strategy",
            rows,
            "The paper: TPU v6e and L40S, float32 weights by its own bandwidth shares; no other model's figures are in "
            f"its text. Here: {setting.weights} weights, greedy, so only ratios and flatness compare."
            + beside(setting.models),
            " ".join(summary(name, [row for row in rows if row["model"] == name]) for name in setting.models),
        )
    ]


def summary(name: str, rows: list[Row]) -> str:
    """How flat the cached rate is and what the cache gains at the longest text."""
    rates = [row["tok/s"] for row in rows if row["method"] == "device"]
    longest = max(row["tokens"] for row in rows)
    gain = next(row["device is faster by"] for row in rows if (row["method"], row["tokens"]) == ("recompute", longest))
    spread = 100 * (max(rates) / min(rates) - 1)
    return (
        f"{name}: cached decode is {gain:.1f} times as fast as recomputation at {longest} tokens (the paper: 27 to 36 "
        f"at 4096) and its rate varies by {spread:.1f}% over the lengths."
    )


def draw(sections: list[Section], figure: Any) -> None:
    """Fig. 2: what the cache gains, the latency of a generation, the rate of a step."""
    rows = [row | {"s": row["tokens"] / row["tok/s"]} for row in sections[0].rows]
    gain, latency, rate = figure.subplots(1, 3)
    without = [row for row in rows if row["method"] == "recompute"]
    lines(gain, without, "tokens", "device is faster by", ("model",))
    gain.set(title="Gain of the cache", ylabel="cached over recomputed rate", yscale="log")
    lines(latency, [row for row in rows if row["method"] == "device"], "tokens", "s", ("model", "method"))
    latency.set(title="Generation with the cache", ylabel="seconds", yscale="log")
    lines(rate, rows, "tokens", "tok/s", ("model", "method"))
    rate.set(title="Rate", ylabel="tokens per second", yscale="log")


LENGTHS = (128, 256, 512, 1024, 2048, 4096)
SIZES = ("mamba2-130m", "mamba2-370m", "mamba2-780m", "mamba2-1.3b", "mamba2-2.7b")
BENCH = Bench(
    "decode",
    "Decode strategies (Tables 1, 4, 10, Fig. 2)",
    small=Setting(("mamba2-small",), (128, 256, 512, 1024), rounds=3),
    full=Setting(SIZES, LENGTHS, rounds=2),
    run=run,
    draw=draw,
    panels=3,
)
main = command(BENCH)

if __name__ == "__main__":
    typer.run(main)
