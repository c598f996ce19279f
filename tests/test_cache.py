"""Caches: shapes, slots, rows that go nowhere."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mamba_jax import init_cache
from mamba_jax.cache import put_rows, take_rows
from tests.tiny import KINDS, tiny_config


def filled(config, batch, seed):
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda x: jnp.asarray(rng.normal(size=x.shape).astype("float32")), init_cache(config, batch, "float32")
    )


@pytest.mark.parametrize("kind", KINDS)
def test_u08_dummy_rows_touch_no_slot(kind):
    config = tiny_config(kind)
    live, new = filled(config, 4, 0), filled(config, 5, 1)
    got = put_rows(live, [0, 1, -1, 2, 9], new)
    jax.tree.map(np.testing.assert_array_equal, take_rows(got, [3]), take_rows(live, [3]))
    jax.tree.map(np.testing.assert_array_equal, take_rows(got, [0, 1, 2]), take_rows(new, [0, 1, 3]))
    assert got.batch == 4


def test_rows_taken_and_put_back_change_nothing():
    cache = filled(tiny_config("mamba2"), 3, 0)
    jax.tree.map(np.testing.assert_array_equal, put_rows(cache, [2, 0], take_rows(cache, [2, 0])), cache)


def test_states_are_float32_unless_asked_otherwise():
    config = tiny_config("mamba2")
    assert {x.dtype.name for x in init_cache(config, 1, "float32").ssm} == {"float32"}
    assert {x.dtype.name for x in init_cache(config, 1, "float32", state_dtype="bfloat16").ssm} == {"bfloat16"}
    assert {x.dtype.name for x in init_cache(config, 1, "float16").conv} == {"float16"}


@pytest.mark.parametrize("batch", [0, -1, 1.5, True, "2", 10**12, 10**30])
def test_a_batch_that_is_no_number_of_rows_is_refused(batch):
    with pytest.raises(ValueError, match=f"batch: got {batch!r}"):
        init_cache(tiny_config("mamba1"), batch, "float32")


def test_a_cache_beyond_the_memory_is_an_error_about_the_batch():
    config = tiny_config("mamba1", d_inner=1 << 20, d_state=1 << 10)
    with pytest.raises(ValueError, match=r"^batch: got 2147483647, wanted a cache that fits the device's memory"):
        init_cache(config, 2**31 - 1, "float32")


@pytest.mark.parametrize("dtype", ["int8", "float64", "bool", None, "no such"])
def test_windows_and_states_are_of_dtypes_that_weights_may_have(dtype):
    config = tiny_config("mamba1")
    with pytest.raises(ValueError, match=r"^dtype: got .*, wanted one of bfloat16, float16, float32"):
        init_cache(config, 1, dtype)
    with pytest.raises(ValueError, match=r"^state_dtype: got"):
        init_cache(config, 1, "float32", dtype)
