"""Shares of the machine's limits: `python -m bench.utilisation` ("Compiler-First ...", Tables 2 and 3, Figs. 4 and 6).

Prefill by floating-point operations, decode by the bytes it reads, counted as the paper does: 2 operations a parameter
and token, and the weights once a token. The limits are the device's datasheet where it is known, and always a large
matrix product and a large matrix-vector product on this machine.
"""

import functools
import statistics
from typing import Any

import jax
import typer

from bench.common import (
    DATASHEET,
    Bench,
    Row,
    Section,
    Setting,
    bandwidth_probe,
    bars,
    command,
    device_name,
    lines,
    matmul_rate,
    seconds_of,
    significant,
    turns,
)
from bench.decode import LENGTHS, SIZES, decoding
from bench.models import beside, load_model, published, random_ids
from mamba_jax.programs import read_prompts

PREFILL = (1024, 4096, 8192)
# Percent of 918 TFLOP/s and of 1600 GB/s: Tables 2 and 3 (TPU v6e).
TABLE_2 = {
    "mamba2-130m": (6.22, 8.23, 7.68),
    "mamba2-370m": (7.47, 9.04, 7.60),
    "mamba2-780m": (10.62, 11.33, 8.20),
    "mamba2-1.3b": (12.53, 11.67, 8.39),
    "mamba2-2.7b": (15.23, 12.96, 9.71),
}
TABLE_3 = {
    "mamba2-130m": (51.62, 52.29, 52.87, 53.13, 53.26, 53.32),
    "mamba2-370m": (57.88, 58.65, 59.07, 59.29, 59.32, 59.32),
    "mamba2-780m": (62.07, 62.59, 62.80, 62.87, 62.93, 62.99),
    "mamba2-1.3b": (61.22, 61.55, 61.69, 61.77, 61.86, 61.87),
    "mamba2-2.7b": (63.43, 63.74, 63.91, 64.00, 64.06, 64.08),
}


def run(setting: Setting) -> list[Section]:
    """Measure; prefill reads texts of twice the longest generation, that length and a quarter of it."""
    longest = max(setting.lengths)
    prompts = (longest // 4, longest, 2 * longest)
    rate, probe = matmul_rate(setting.weights), bandwidth_probe()
    peak_rate, peak_bandwidth = DATASHEET.get(device_name(), (None, None))
    prefill: list[Row] = []
    decode: list[Row] = []
    for name in setting.models:
        params = load_model(name, setting.weights)
        size = sum(leaf.size for leaf in jax.tree.leaves(params))
        weight = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
        texts = {n: [random_ids(params, n)] for n in prompts}
        read = {n: functools.partial(seconds_of, read_prompts, params, text) for n, text in texts.items()}
        for n, seconds in turns(read, 2 * setting.rounds).items():
            teraflops = 2 * size * n / seconds / 1e12
            paper = dict(zip(PREFILL, TABLE_2.get(published(name), ()), strict=False)).get(n)
            prefill.append(
                {
                    "model": name,
                    "tokens": n,
                    "ms": significant(1e3 * seconds),
                    "tok/s": significant(n / seconds),
                    "TFLOP/s": significant(teraflops, 3),
                    "MFU %": None if peak_rate is None else significant(100 * teraflops / peak_rate, 3),
                    "% of a matrix product": significant(100 * teraflops / rate, 3),
                    "paper MFU %": paper,
                }
            )
        bandwidth = statistics.median(probe() for _ in range(3))
        decoding(params, 8, "device")
        steps = {n: functools.partial(decoding, params, n, "device") for n in sorted(setting.lengths)}
        for n, seconds in turns(steps, setting.rounds, warm_up=False).items():
            gigabytes = weight / seconds / 1e9
            decode.append(
                {
                    "model": name,
                    "tokens": n,
                    "tok/s": significant(1 / seconds),
                    "GB/s": significant(gigabytes),
                    "HBU %": None if peak_bandwidth is None else significant(100 * gigabytes / peak_bandwidth, 3),
                    "% of a matrix-vector product": significant(100 * gigabytes / bandwidth, 3),
                    "paper HBU %": dict(zip(LENGTHS, TABLE_3.get(published(name), ()), strict=False)).get(n),
                }
            )
    limits = f"{setting.weights} matrix product {rate:.3g} TFLOP/s, matrix-vector product {bandwidth:.4g} GB/s here"
    sheet = "" if peak_rate is None else f"; datasheet {peak_rate:g} TFLOP/s, {peak_bandwidth:g} GB/s"
    note = f"The paper: TPU v6e, 918 TFLOP/s and 1600 GB/s. Limits: {limits}{sheet}."
    note += f" Another device: shares compare.{beside(setting.models)}"
    return [
        Section("Table 2: prefill of one row", prefill, note, "Head and embedding count as parameters, as there."),
        Section(
            "Table 3: decode of one row", decode, note, f"The paper's weights are float32, ours {setting.weights}."
        ),
    ]


def draw(sections: list[Section], figure: Any) -> None:
    """Figs. 4 and 6."""
    prefill, decode = (section.rows for section in sections)
    operations, reads, best = figure.subplots(1, 3)
    mfu = "MFU %" if prefill[0]["MFU %"] is not None else "% of a matrix product"
    hbu = "HBU %" if decode[0]["HBU %"] is not None else "% of a matrix-vector product"
    lines(operations, prefill, "tokens", mfu, ("model",))
    operations.set(title="Prefill", xlabel="prompt tokens", ylabel=mfu)
    lines(reads, decode, "tokens", hbu, ("model",))
    reads.set(title="Decode", xlabel="generated tokens", ylabel=hbu)
    for panel in (operations, reads):
        panel.set_ylim(0, 1.1 * panel.get_ylim()[1])
    shares: list[Row] = []
    for name in dict.fromkeys(row["model"] for row in prefill):
        size = name.removeprefix("mamba2-")
        top = max(row[mfu] for row in prefill if row["model"] == name)
        mean = statistics.mean(row[hbu] for row in decode if row["model"] == name)
        shares += [{"label": f"{size}\nprefill", "%": top}, {"label": f"{size}\ndecode", "%": mean}]
    bars(best, shares, lambda row: row["label"], "%")
    best.set(title="Best prefill and mean decode", ylabel="% of the limit")


BENCH = Bench(
    "utilisation",
    "Shares of the machine's limits (Tables 2, 3, Figs. 4, 6)",
    small=Setting(("mamba2-small",), (128, 512), rounds=2),
    full=Setting(SIZES, LENGTHS, rounds=2),
    run=run,
    draw=draw,
    panels=3,
)
main = command(BENCH)

if __name__ == "__main__":
    typer.run(main)
