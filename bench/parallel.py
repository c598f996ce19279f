"""Data parallelism: `python -m bench.parallel` (COREY, Table 32).

The same prompts are continued on one device, on two, on four ...: each device has the weights and a share of the
prompts, which it answers one after the other, as the paper's processes do. On a CPU two devices are made of the one
there is, which shows that it works and, since both share its cores, nothing about speed.
"""

import concurrent.futures
import functools
from typing import Any

import jax
import typer

from bench.common import Bench, Row, Section, Setting, bars, command, seconds_of, significant, turns
from bench.models import load_model, random_ids
from mamba_jax import Params, generate

PROMPTS = 16
CPU_DEVICES = 2
TABLE_32 = {1: (5.04, 1.0), 2: (10.56, 2.11), 4: (19.03, 3.45)}  # tokens a second and speed-up by RTX 3090s


def cpu_devices() -> None:
    """On a CPU: more than one device. Other platforms have what they have."""
    jax.config.update("jax_num_cpu_devices", CPU_DEVICES)


def answer(replicas: list[Params], prompts: list[list[int]], new: int) -> list[list[int]]:
    """Continue each prompt on one of the devices, all of which work at a time."""

    def share(first: int) -> list[tuple[int, list[int]]]:
        results = []
        for i in range(first, len(prompts), len(replicas)):
            result: Any = generate(replicas[first], prompts[i], max_new_tokens=new, stop_token_ids=[])
            results.append((i, result.tokens))
        return results

    with concurrent.futures.ThreadPoolExecutor(len(replicas)) as pool:
        shares = list(pool.map(share, range(len(replicas))))
    return [tokens for _, tokens in sorted(pair for part in shares for pair in part)]


def run(setting: Setting) -> list[Section]:
    rows: list[Row] = []
    devices = jax.devices()
    counts = [count for count in (1, 2, 4, 8) if count <= len(devices)]
    length, new = setting.lengths
    for name in setting.models:
        params = load_model(name, setting.weights)
        replicas = [jax.device_put(params, device) for device in devices[: counts[-1]]]
        prompts = [random_ids(params, length, seed) for seed in range(PROMPTS)]
        answers = {count: answer(replicas[:count], prompts, new) for count in counts}
        calls = {count: functools.partial(seconds_of, answer, replicas[:count], prompts, new) for count in counts}
        found = turns(calls, setting.rounds, warm_up=False)
        for count, seconds in found.items():
            rows.append(
                {
                    "model": name,
                    "devices": count,
                    "seconds": significant(seconds),
                    "tok/s": significant(PROMPTS * new / seconds),
                    "speed-up": significant(found[1] / seconds, 3),
                    "same tokens": "yes" if answers[count] == answers[1] else "NO",
                    "paper tok/s": TABLE_32.get(count, (None,))[0],
                    "paper speed-up": TABLE_32.get(count, (None, None))[1],
                }
            )
    shared = "These devices share one CPU, so the speed-up means nothing. " if jax.default_backend() == "cpu" else ""
    return [
        Section(
            f"Table 32: {PROMPTS} prompts of {length} tokens, {new} new ones each",
            rows,
            "The paper: Mamba-370M, 20 LongBench prompts, RTX 3090, a process a GPU; its times hold loading and are "
            "super-linear at two. Only speed-ups compare.",
            f"{shared}{len(devices)} devices here.",
        )
    ]


def draw(sections: list[Section], figure: Any) -> None:
    panel = figure.subplots()
    bars(panel, sections[0].rows, lambda row: f"{row['model']}\n{row['devices']} devices", "tok/s")
    panel.set(title=sections[0].title.partition(": ")[2], ylabel="tokens per second, prefill included")


BENCH = Bench(
    "parallel",
    "Data parallelism (COREY, Table 32)",
    small=Setting(("mamba1-small",), (64, 16), rounds=2),
    full=Setting(("mamba1-370m",), (1024, 128), rounds=2),
    run=run,
    draw=draw,
    prepare=cpu_devices,
)
main = command(BENCH)

if __name__ == "__main__":
    typer.run(main)
