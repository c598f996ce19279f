"""Warm-up: afterwards nothing compiles, in this process and in the next."""

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

import mamba_jax
from mamba_jax.programs import Spec, compile_programs, program, program_weights
from mamba_jax.scheduler.monitoring import count_compilations
from mamba_jax.scheduler.programs import ColdProgramError, ProgramTable
from mamba_jax.warm import specs_for
from tests.tiny import tiny_params

SMALL = {"n_layer": 1, "d_model": 8, "d_inner": 16, "headdim": 8, "d_state": 8, "vocab_size": 61}


@pytest.fixture(autouse=True)
def process_table():
    """The process's table, which later tests share, is not left complete."""
    yield
    mamba_jax.programs.TABLE.complete = mamba_jax.programs.TABLE.strict = False


def test_u76_u77_two_hundred_requests_after_warming_compile_nothing(tmp_path, caplog):
    params = tiny_params("mamba2", **SMALL | {"vocab_size": 67})  # of no other test: all is to be compiled here
    warmth = mamba_jax.warm(params, batch=range(1, 5), lengths=(1, 4000), folder=tmp_path, strict=True)
    assert warmth.compiled + warmth.fetched >= len(warmth.programs)
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 4001, 200)
    lengths[:9] = (1, 15, 16, 17, 2047, 2048, 2049, 3999, 4000)  # around the compiled ones
    variants = ({}, {"temperature": 0.7}, {"top_k": 5, "temperature": 1.0}, {"logprobs": True}, {"return_cache": True})
    with count_compilations() as counts, caplog.at_level(logging.WARNING):
        for i, length in enumerate(lengths):
            batch = int(rng.integers(1, 5))
            prompts = [[3] * int(length), *([4] * int(n) for n in rng.integers(1, length + 1, batch - 1))]
            options = variants[i % len(variants)] | {"stop_token_ids": [1, 2]}
            results = mamba_jax.generate(params, prompts, max_new_tokens=1 + i % 3, seed=list(range(batch)), **options)
            assert len(results) == batch
    assert (counts.compiled, counts.fetched) == (0, 0)
    assert not caplog.records


def test_a_program_that_was_not_warmed_is_named(tmp_path, caplog):
    params = tiny_params("mamba1", n_layer=1, d_model=8, d_inner=16, vocab_size=59)
    mamba_jax.warm(params, lengths=(1, 16), max_new_tokens=1, folder=tmp_path)
    with caplog.at_level(logging.WARNING, logger="mamba_jax"):
        mamba_jax.generate(params, [1] * 60, max_new_tokens=1)
    assert [record.getMessage() for record in caplog.records] == [
        "compiling prefill batch 1 length 64 chunk 64 float32, which was not compiled ahead"
    ]
    mamba_jax.warm(params, lengths=(1, 16), max_new_tokens=1, folder=tmp_path, strict=True)
    mamba_jax.generate(params, [1] * 60, max_new_tokens=1)
    with pytest.raises(ColdProgramError, match=r"batch 2.* float32: not among the programs"):
        mamba_jax.generate(params, [[1], [2]], max_new_tokens=1)


def test_a_second_table_fetches_what_the_first_compiled(tmp_path):
    params = tiny_params("mamba2", **SMALL | {"vocab_size": 53})
    first = mamba_jax.warm(params, lengths=(1, 40), folder=tmp_path, table=ProgramTable())
    jax.clear_caches()
    second = mamba_jax.warm(params, lengths=(1, 40), folder=tmp_path, table=ProgramTable())
    assert first.programs == second.programs
    assert (first.compiled, second.compiled, second.fetched) == (len(first.programs), 0, len(first.programs))
    assert first.bytes_written > 0
    assert second.bytes_written == 0


def test_policies_and_tasks_have_programs_of_their_own():
    model = mamba_jax.programs.model_of(tiny_params("mamba2"))

    def wanted(**changes):
        requests = {"batch": 3, "lengths": (1, 60), "max_new_tokens": 4, "policies": [None], "tasks": ["generate"]}
        return set(specs_for(model, **requests | changes))

    plain = wanted()
    assert {spec.batch for spec in plain} == {4}
    assert {spec.kind for spec in plain} == {"init", "prefill", "decode", "row"}
    assert Spec("prefill", 4, 64, 16) in wanted(policies=["static:16"])
    assert not any(spec.kind == "decode" for spec in wanted(max_new_tokens=0))
    assert {spec.kind for spec in wanted(tasks=["score"])} == {"init", "score"}
    several = {"batch": (1, 3), "policies": ["static:16", "static:32"]}
    assert wanted(**several | {"policies": iter(several["policies"])}) == wanted(**several)
    by_entropy = wanted(policies=["corey-default"], lengths=(1, 5000))
    assert {spec.length for spec in by_entropy if spec.watch} >= {1024, 2048}
    assert {spec.chunk_size for spec in by_entropy if spec.length == 1024 and not spec.watch} >= {32, 64, 128, 256, 512}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch": []}, "batch: got no"),
        ({"batch": 0}, "batch: got 0"),
        ({"lengths": (0, 5)}, "lengths: got 0"),
        ({"lengths": (9, 5)}, "lengths: got 9 to 5"),
        ({"lengths": (9, 5), "max_new_tokens": 20}, "lengths: got 9 to 5"),
        ({"policies": []}, "policies: got none"),
        ({"max_new_tokens": -1}, "max_new_tokens: got -1"),
        ({"tasks": ["train"]}, r"tasks: got \['train'\]"),
        ({"tasks": "score"}, "tasks: got 'score'"),
        ({"tasks": []}, "tasks: got none"),
        ({"policies": ["none"]}, "policy: got 'none'"),
        ({"policies": [5]}, "policy: got 5, wanted a policy"),
        ({"policies": "length"}, "policies: got 'length'"),
        ({"policies": None}, "policies: got None"),
        ({"batch": "8"}, "batch: got '8'"),
        ({"batch": True}, "batch: got True"),
        ({"batch": 2.0}, "batch: got 2.0"),
        ({"batch": 2**16 + 1}, "batch: got 65537"),
        ({"lengths": (5,)}, r"lengths: got \(5,\), wanted two integers"),
        ({"lengths": 5}, "lengths: got 5, wanted two integers"),
        ({"lengths": (1, 2.0)}, "lengths: got .*, wanted two integers"),
        ({"lengths": ("1", "2")}, "lengths: got .*, wanted two integers"),
        ({"lengths": range(1, 10**12)}, "lengths: got .*, wanted two integers"),
        ({"lengths": (1, 2**26 + 1)}, "lengths: got 1 to 67108865 and 0 new tokens, wanted at most 67108864"),
        ({"lengths": (1, 2**26), "max_new_tokens": 1}, "lengths: got 1 to 67108864 and 1 new tokens"),
        ({"lengths": (1, 2**26), "policies": ["length"]}, "lengths: got 1 to 67108864, each of which is planned"),
        ({"max_new_tokens": 1.5}, "max_new_tokens: got 1.5"),
        ({"max_new_tokens": True}, "max_new_tokens: got True"),
        ({"max_new_tokens": 10**12}, "max_new_tokens: got"),
        ({"folder": 5}, "folder: got 5, wanted a path"),
        ({"folder": "~nouser/x"}, "folder: got '~nouser/x', wanted a path"),
    ],
)
def test_bad_arguments_are_named(arguments, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        mamba_jax.warm(tiny_params("mamba2"), **{"folder": tmp_path, "max_new_tokens": 0, **arguments})


def test_new_tokens_lengthen_what_is_read_but_not_what_a_prompt_may_have():
    model = mamba_jax.programs.model_of(tiny_params("mamba2"))

    def read(lengths, max_new_tokens, task="generate"):
        more = {"batch": 1, "max_new_tokens": max_new_tokens, "policies": [None], "tasks": [task]}
        specs = specs_for(model, lengths=lengths, **more)
        return {spec.length for spec in specs if spec.kind in ("prefill", task)}

    assert read((1, 16), 0) == {16}
    assert read((1, 16), 16) == read((1, 32), 0) == {16, 32}
    assert read((1, 16), 16, task="score") == {16}
    assert read((np.int64(1), np.int32(16)), np.int64(16)) == {16, 32}


def test_different_programs_compile_side_by_side_and_a_tolerated_failure_stops_none():
    params, table = program_weights(tiny_params("mamba2", **SMALL)), ProgramTable()
    good = [Spec("init", batch) for batch in (1, 2, 3, 4)]
    failed = compile_programs(params, [Spec("bad", 1), *good], table=table, tolerated=ValueError)
    assert list(failed) == [Spec("bad", 1)]
    assert "kind: got 'bad'" in str(failed[Spec("bad", 1)])
    for spec in good:
        before = len(table.compilations)
        program(params, spec, table=table)
        assert len(table.compilations) == before


@pytest.mark.parametrize("error", [ValueError("no such program"), KeyboardInterrupt()])
def test_an_error_and_an_interrupt_drop_what_is_queued(monkeypatch, error):
    """Every program takes a moment; the first ends in the error, or Ctrl-C comes while they compile."""
    params, table = program_weights(tiny_params("mamba2", **SMALL)), ProgramTable()
    began = []

    def lower(params, spec):
        began.append(spec)
        if len(began) == 1 and isinstance(error, ValueError):
            raise error
        if len(began) == 3 and isinstance(error, KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        time.sleep(0.1)
        return jax.jit(lambda x: x + 1).lower(1.0)

    monkeypatch.setattr("mamba_jax.programs.lower_program", lower)
    with pytest.raises(type(error)):
        compile_programs(params, [Spec("init", batch) for batch in range(1, 201)], table=table)
    ended = len(began)
    assert ended < 150
    time.sleep(0.3)
    assert len(began) == ended  # nothing goes on behind


CHILD = """
import json, sys
import jax, numpy as np
import mamba_jax
from mamba_jax.scheduler.monitoring import count_compilations
from tests.tiny import tiny_params
device = jax.devices()[int(sys.argv[2])]
params = jax.device_put(tiny_params("mamba2", n_layer=1), device)
with count_compilations() as counts:
    warmth = mamba_jax.warm(params, lengths=(1, 30), folder=sys.argv[1])
    tokens = mamba_jax.generate(params, [1, 2, 3], max_new_tokens=5, stop_token_ids=[]).tokens
print(json.dumps({"compiled": warmth.compiled, "fetched": warmth.fetched, "tokens": tokens}))
"""


def child(folder, device=0):
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"
    command = [sys.executable, "-c", CHILD, str(folder), str(device)]
    done = subprocess.run(
        command,
        env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_u79_u80_programs_of_another_process_folder_device_or_a_broken_file(tmp_path):
    tmp_path, copy = tmp_path / "folder", tmp_path / "copy"
    first = child(tmp_path)
    shutil.copytree(tmp_path, copy)
    again = child(os.path.relpath(copy))
    assert (again["compiled"], again["fetched"]) == (0, first["compiled"])
    other = child(tmp_path, device=1)  # found or compiled, never a failure
    assert other["compiled"] + other["fetched"] == first["compiled"]
    for file in tmp_path.iterdir():
        if file.name.endswith("-cache"):
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    broken = child(tmp_path)
    assert broken["compiled"] == first["compiled"]
    assert first["tokens"] == again["tokens"] == other["tokens"] == broken["tokens"]
