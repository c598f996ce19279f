"""What callers pass: integers within bounds, paths of a known home."""

import numpy as np
import pytest

import mamba_jax
from mamba_jax.arguments import as_integer, as_integers, as_path
from mamba_jax.longbench import merge
from mamba_jax.parity import against
from mamba_jax.planning import as_policy
from mamba_jax.sampling import row_keys
from mamba_jax.text import load_tokenizer
from tests.tiny import tiny_params


@pytest.mark.parametrize("value", [1, 8, np.int64(3), np.array(8, np.int32)])
def test_integers_from_one_bound_to_the_other(value):
    assert as_integer("n", value, 1, 8) == int(value)


@pytest.mark.parametrize("value", [0, 9, True, 2.0, "8", None, np.array([3])])
def test_what_is_no_integer_within_the_bounds_is_named(value):
    with pytest.raises(ValueError, match=r"^n: got .*, wanted an integer from 1 to 8$"):
        as_integer("n", value, 1, 8)


def test_an_integer_of_more_digits_than_python_prints_is_named():
    with pytest.raises(ValueError, match=r"^n: got an integer of 33220 bits, wanted"):
        as_integer("n", 10**10000, 1, 8)


def test_a_home_folder_is_written_out(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert as_path("out", "~/x") == tmp_path / "x"


@pytest.mark.parametrize("value", ["~nouser/x", "a\0b", 5, b"x"])
def test_what_is_no_path_is_named(value):
    with pytest.raises(ValueError, match=r"^out: got .*, wanted a path") as error:
        as_path("out", value)
    assert "\0" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("path_or_hub_id", mamba_jax.load),
        ("directory", lambda path: mamba_jax.save(tiny_params("mamba1"), path)),
        ("tokenizer", load_tokenizer),
        ("what", lambda path: against(tiny_params("mamba1"), path)),
        ("out", lambda path: mamba_jax.perplexity(tiny_params("mamba1"), [1, 2, 3], out=path)),
        ("shards", lambda path: merge([path])),
        ("table", lambda path: as_policy(f"table:{path}")),
    ],
)
def test_a_home_that_nobody_has_is_an_error_that_names_the_argument(name, call):
    with pytest.raises(ValueError, match=f"{name}: got .*~nouser/x.*, wanted .*: Could not determine home"):
        call("~nouser/x")


class Wrapped:
    """An integer that only numpy can read."""

    def __array__(self, dtype=None, copy=None):
        return np.array(3, dtype)


def test_an_array_that_only_numpy_reads_is_an_integer():
    assert as_integer("n", Wrapped(), 1, 8) == 3
    assert as_integers([Wrapped(), 4]) == [3, 4]
    assert row_keys(Wrapped(), 1).tolist() == row_keys(3, 1).tolist()
    with pytest.raises(ValueError, match=r"n: got .*, wanted an integer from 4 to 8"):
        as_integer("n", Wrapped(), 4, 8)


def test_a_cache_of_no_configuration_is_named():
    with pytest.raises(ValueError, match="config: got 'x', wanted a MambaConfig"):
        mamba_jax.init_cache("x", 1, "float32")
