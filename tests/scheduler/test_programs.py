"""The program table: compiled once, found again, told apart by every field of the key."""

import concurrent.futures
import dataclasses
import re
import threading
import time

import jax
import jax.numpy as jnp
import pytest

from mamba_jax import init_cache
from mamba_jax.programs import Spec, program
from mamba_jax.scheduler.programs import ProgramKey, ProgramTable
from tests.tiny import tiny_params

KEY = ProgramKey(
    kind="prefill", config="c", dtype="float32", batch=1, length=16, chunk_size=16, placement="cpu", variant=""
)


def lower():
    return jax.jit(lambda x: x + 1).lower(jnp.zeros(3))


def test_a_program_is_compiled_once_even_by_many_threads():
    table = ProgramTable()
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        programs = list(pool.map(lambda _: table.get(KEY, lower), range(16)))
    assert len({id(p) for p in programs}) == 1
    assert [c.key for c in table.compilations] == [KEY]
    assert programs[0](jnp.ones(3)).tolist() == [2, 2, 2]


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(ProgramKey)])
def test_every_field_tells_programs_apart(field):
    table = ProgramTable()
    table.get(KEY, lower)
    value = getattr(KEY, field)
    other = dataclasses.replace(KEY, **{field: value + 1 if isinstance(value, int) else "other"})
    assert other not in table
    table.get(other, lower)
    assert len(table) == 2


def test_a_failed_compilation_leaves_nothing_behind():
    table = ProgramTable()

    def fail():
        raise RuntimeError("no memory")

    with pytest.raises(RuntimeError, match="no memory"):
        table.get(KEY, fail)
    assert KEY not in table
    assert table.compilations == []
    table.get(KEY, lower)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, RuntimeError])
def test_an_interrupt_is_for_its_own_thread_and_those_that_wait_compile_themselves(error):
    table, began, go = ProgramTable(), threading.Event(), threading.Event()

    def interrupted():
        began.set()
        assert go.wait(60)
        raise error("here")

    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        first = pool.submit(table.get, KEY, interrupted)
        assert began.wait(60)
        others = [pool.submit(table.get, KEY, lower) for _ in range(2)]
        time.sleep(0.1)  # they wait by now
        go.set()
        with pytest.raises(error, match="here"):
            first.result()
        if error is RuntimeError:  # what cannot be compiled cannot be by the others either
            for other in others:
                with pytest.raises(error, match="here"):
                    other.result()
        else:
            assert others[0].result() is others[1].result()
            assert len(table.compilations) == 1


def test_programs_take_weights_as_arguments_and_donate_the_cache():
    params = tiny_params("mamba2", n_layer=1)
    text = program(params, Spec("decode", 1, 64), table=ProgramTable()).as_text()
    aliases = text[: text.index("\n")]
    assert aliases.count("-alias") >= len(jax.tree.leaves(init_cache(params.config, 1, params.dtype)))
    rows, width = params.embedding.shape
    assert f"f32[{rows},{width}]" in text[text.index("ENTRY") :]  # a parameter, not a constant
    assert not re.search(rf"f32\[{rows},{width}\]\S* constant", text)


def test_an_unknown_kind_is_refused():
    with pytest.raises(ValueError, match="kind: got 'train'"):
        program(tiny_params("mamba2", n_layer=1), Spec("train", 1, 16), table=ProgramTable())
