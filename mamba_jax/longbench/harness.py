"""Running a model on samples of LongBench, batch by batch, so that a run can be killed and taken up again."""

import dataclasses
import importlib.metadata
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from mamba_jax import records
from mamba_jax import text as text_lib
from mamba_jax.arguments import as_path
from mamba_jax.generate import Generation, generate
from mamba_jax.longbench.data import Sample, find_tasks, load_samples
from mamba_jax.longbench.metrics import require_rouge, score_prediction
from mamba_jax.longbench.prompts import Template, cut_middle, load_templates
from mamba_jax.longbench.summary import Summary, summarize
from mamba_jax.ops.dispatch import Implementation
from mamba_jax.params import Params
from mamba_jax.planning import DEFAULT_POLICY, as_policy, decode_implementation, reading_implementation
from mamba_jax.programs import model_of, program_weights
from mamba_jax.progress import track
from mamba_jax.scheduler.policies import Policy
from mamba_jax.text import Tokenizer


@dataclasses.dataclass(frozen=True)
class _Task:
    name: str
    template: Template
    samples: list[Sample]  # this shard's
    of: int  # samples of all shards
    digest: str  # of the file


@dataclasses.dataclass(frozen=True)
class _Prompt:
    sample: Sample
    ids: list[int]
    cut: int  # tokens that were cut out


def run(
    params: Params,
    data: str | Path,
    out: str | Path,
    *,
    tasks: Sequence[str] | None = None,
    name: str = "",
    offset: int = 0,
    max_samples: int | None = None,
    max_length: int | None = None,
    max_new_tokens: int | None = None,
    batch: int = 1,
    policy: Policy | str | None = None,
    implementation: Implementation | None = None,
    tokenizer: Tokenizer | str | None = None,
    shard: tuple[int, int] | None = None,
) -> Summary:
    """Put the samples of LongBench tasks to a model, greedily, with a bar while it runs.

    In `out` there are then `TASK.jsonl` with a record for each sample (its fields `pred`, `answers`, `all_classes` and
    `length` are those that LongBench's own scripts read), `summary.json`, and `run.json` with what was asked for.
    Killed and called again, a run goes on with what it had not finished.

    Args:
        params: the model.
        data: a folder with `TASK.jsonl` files and the templates that `load_templates` reads.
        out: where to write; made if need be.
        tasks: which tasks; None takes all that have samples and a template.
        name: the model's, for the summary.
        offset: samples of each task to leave out at the beginning.
        max_samples: most samples of each task.
        max_length: most tokens of a prompt, at least 2; longer ones lose their middle. None cuts nothing.
        max_new_tokens: most tokens of an answer, whatever the task; None takes the task's own.
        batch: samples run together, those of like lengths; speed, and rounding where weights have 16 bits.
        policy: decides chunk sizes; speed only. As in `generate`.
        implementation: of scans and steps, as in `generate`.
        tokenizer: one to use instead of the checkpoint's, or the folder of one.
        shard: (i, n) runs the i-th of n parts only, i from 1, for n processes; `merge` puts them together.

    Raises:
        ValueError: if an argument or a file does not fit, or `out` holds a run of another configuration.
        NotImplementedError: if implementation is "pallas" and the kernels do not take the model, batch or device.
        ImportError: if the package `rouge` is missing.
    """
    _check(max_length=max_length, max_new_tokens=max_new_tokens, batch=batch, shard=shard)
    source = tokenizer if tokenizer is not None else params.text.tokenizer
    if source is None:
        raise ValueError(
            "tokenizer: the checkpoint has none beside it: pass the argument tokenizer (command line: --tokenizer PATH)"
        )
    loaded = text_lib.load_tokenizer(source) if isinstance(source, str) else source
    chosen, folder = as_policy(policy, params.config.n_layer), as_path("out", out)
    model = model_of(program_weights(params))
    reading_implementation(model, batch, chosen, implementation)  # raises if there is none
    decode_implementation(model, batch, implementation)
    found = _tasks(as_path("data", data), tasks, offset, max_samples, max_new_tokens, shard or (1, 1))
    require_rouge()
    config = {
        "model": name,
        "weights": records.fingerprint(params),
        "dtype": params.dtype.name,
        "tokenizer": source if isinstance(source, str) else str(getattr(source, "name_or_path", "")),
        "policy": DEFAULT_POLICY if chosen is None else chosen.name,
        "implementation": implementation,
        "offset": offset,
        "max_samples": max_samples,
        "max_length": max_length,
        "tasks": {
            task.name: {
                "samples": task.of,
                "data": task.digest,
                "template": records.digest(task.template.text.encode()),
                "max_new_tokens": task.template.max_new_tokens,
            }
            for task in found
        },
    }
    device, versions = jax.devices()[0], {part: importlib.metadata.version(part) for part in ("jax", "jaxlib")}
    records.claim(
        folder,
        {"config": config | {"shard": shard}, "batch": batch, "device": device.device_kind, "versions": versions},
    )
    done = {task.name: records.read_lines(folder / f"{task.name}.jsonl") for task in found}
    with track("LongBench", sum(len(task.samples) for task in found)) as advance:
        for task in found:
            path, finished = folder / f"{task.name}.jsonl", done[task.name]
            advance(len(finished))
            for prompts in _batches(task, loaded, max_length, batch):
                left = [prompt for prompt in prompts if prompt.sample.index not in finished]
                if not left:
                    continue
                new = _answer(params, task, left, loaded, chosen, implementation)
                records.append_lines(path, new)
                finished |= {record["index"]: record for record in new}
                advance(len(new))
            records.write_lines(path, finished.values())
    summary = summarize(config, {task: list(lines.values()) for task, lines in done.items()})
    records.write_json(folder / records.SUMMARY_FILE, dataclasses.asdict(summary))
    return summary


def merge(shards: Sequence[str | Path], out: str | Path | None = None) -> Summary:
    """Put the parts of a run together; every sample weighs alike, however unequal the parts.

    Args:
        shards: folders of `run` with `shard=`, or folders that hold such folders.
        out: where to write the whole, as `run` would have; None only gives the summary.

    Raises:
        ValueError: if the folders are not the parts of one run, or a sample is missing or there twice.
    """
    folders = [folder for path in shards for folder in _runs_in(as_path("shards", path))]
    if not folders:
        raise ValueError("shards: got no folder, wanted those of a run's parts")
    runs = [records.read_run(folder) for folder in folders]
    configs = [{key: value for key, value in run["config"].items() if key != "shard"} for run in runs]
    for folder, config in zip(folders, configs, strict=True):
        if not {"tasks", "offset", "model", "dtype", "policy", "max_length"} <= config.keys():
            raise ValueError(f"shards: got {folder}, which holds a run of something else, wanted one of LongBench")
        if config != configs[0]:
            differing = sorted(key for key in config | configs[0] if config.get(key) != configs[0].get(key))
            raise ValueError(
                f"shards: {folder} and {folders[0]} differ in {', '.join(differing)}, wanted the parts of one run"
            )
    config = configs[0]
    whole = {task: _gather(folders, task, config) for task in config["tasks"]}
    summary = summarize(config, {task: list(lines.values()) for task, lines in whole.items()})
    if out is not None:
        folder = as_path("out", out)
        records.claim(folder, runs[0] | {"config": config | {"shard": None}})
        for task, lines in whole.items():
            records.write_lines(folder / f"{task}.jsonl", lines.values())
        records.write_json(folder / records.SUMMARY_FILE, dataclasses.asdict(summary))
    return summary


def _gather(folders: Sequence[Path], task: str, config: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    """The records of a task out of all parts, each sample's once."""
    lines: dict[int, dict[str, Any]] = {}
    for folder in folders:
        part = records.read_lines(folder / f"{task}.jsonl")
        if twice := lines.keys() & part.keys():
            raise ValueError(f"shards: {folder}: {task}: got sample {min(twice)} a second time, wanted each once")
        lines |= part
    wanted = range(config["offset"], config["offset"] + config["tasks"][task]["samples"])
    if missing := set(wanted) - lines.keys():
        raise ValueError(
            f"shards: {task}: got {len(lines)} of {len(wanted)} samples (number {min(missing)} is missing), wanted all "
            "of them: run each part to its end, and name them all"
        )
    return lines


def _runs_in(folder: Path) -> list[Path]:
    if (folder / records.RUN_FILE).exists():
        return [folder]
    inside = sorted(path.parent for path in folder.glob(f"*/{records.RUN_FILE}"))
    if not inside:
        raise ValueError(f"shards: got {folder}, which holds no run and no folder of one")
    return inside


def _check(*, max_length: int | None, max_new_tokens: int | None, batch: int, shard: tuple[int, int] | None) -> None:
    if max_length is not None and max_length < 2:
        raise ValueError(f"max_length: got {max_length}, wanted at least 2, or None")
    if max_new_tokens is not None and max_new_tokens < 1:
        raise ValueError(f"max_new_tokens: got {max_new_tokens}, wanted at least 1, or None")
    if batch < 1:
        raise ValueError(f"batch: got {batch}, wanted at least 1")
    if shard is not None and not 1 <= shard[0] <= shard[1]:
        raise ValueError(f"shard: got {shard[0]}/{shard[1]}, wanted i/n with i from 1 to n")


def _tasks(
    data: Path,
    wanted: Sequence[str] | None,
    offset: int,
    max_samples: int | None,
    max_new_tokens: int | None,
    shard: tuple[int, int],
) -> list[_Task]:
    if not data.is_dir():
        raise ValueError(f"data: got {data}, wanted a folder with samples and templates")
    files, templates = find_tasks(data), load_templates(data)
    known = [task for task in files if task in templates]
    names = list(dict.fromkeys(known if wanted is None else wanted))
    if unknown := [name for name in names if name not in known] or not names:
        got = "none" if unknown is True else ", ".join(unknown)
        raise ValueError(f"tasks: got {got}, wanted tasks with samples and a template in {data}: {', '.join(known)}")
    first, parts = shard
    tasks = []
    for name in names:
        samples = load_samples(files[name], offset=offset, max_samples=max_samples)
        template = templates[name]
        if max_new_tokens is not None:
            template = dataclasses.replace(template, max_new_tokens=max_new_tokens)
        digest = records.digest(files[name].read_bytes())
        tasks.append(_Task(name, template, samples[first - 1 :: parts], len(samples), digest))
    if not any(task.samples for task in tasks):
        raise ValueError(f"shard: got {first}/{parts}, which leaves no sample: there are fewer samples than parts")
    return tasks


def _batches(task: _Task, tokenizer: Tokenizer, max_length: int | None, batch: int) -> list[list[_Prompt]]:
    """Prompts, longer ones first so that neighbours are of like lengths; the same batches whatever is done already."""
    prompts = [_Prompt(s, *cut_middle(tokenizer, task.template.render(s), max_length)) for s in task.samples]
    prompts.sort(key=lambda prompt: (-len(prompt.ids), prompt.sample.index))
    return [prompts[start : start + batch] for start in range(0, len(prompts), batch)]


def _answer(
    params: Params,
    task: _Task,
    prompts: list[_Prompt],
    tokenizer: Tokenizer,
    policy: Policy | None,
    implementation: Implementation | None,
) -> list[dict[str, Any]]:
    """Generate for one batch; its records."""
    rows, length = [prompt.ids for prompt in prompts], task.template.max_new_tokens
    results: Any = generate(  # a list, as rows
        params, rows, max_new_tokens=length, policy=policy, implementation=implementation, tokenizer=tokenizer
    )
    return [_record(task.name, *pair, len(prompts)) for pair in zip(prompts, results, strict=True)]


def _record(task: str, prompt: _Prompt, result: Generation, batch: int) -> dict[str, Any]:
    sample, timings = prompt.sample, result.timings
    statistics = [decision.statistic for decision in result.decisions if decision.statistic is not None]
    return {
        "index": sample.index,
        "id": sample.id,
        "pred": result.text,
        "answers": list(sample.answers),
        "all_classes": sample.row.get("all_classes"),
        "length": sample.row.get("length"),
        "scores": score_prediction(task, result.text or "", sample.answers),
        "prompt_tokens": len(prompt.ids),
        "cut_tokens": prompt.cut,
        "new_tokens": len(result.tokens),
        "finish_reason": result.finish_reason,
        "batch": batch,
        "latency_s": timings["prefill_s"] + timings["decode_s"],
        "tokens_per_s": timings["tokens_per_s"],
        "entropy": float(np.mean(statistics)) if statistics else None,
        "decoded_by": result.decoded_by,
        "decisions": [dataclasses.asdict(decision) for decision in result.decisions],
    }
