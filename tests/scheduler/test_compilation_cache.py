import os
import stat
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache

from mamba_jax.scheduler.compilation_cache import enable_compilation_cache, own_folder

SETTINGS = (
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
    "jax_persistent_cache_enable_xla_caches",
)


@pytest.fixture(autouse=True)
def settings_restored(monkeypatch):
    before = {name: getattr(jax.config, name) for name in SETTINGS}
    jax.config.update("jax_compilation_cache_dir", None)
    for name in ("MAMBA_JAX_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def test_small_programs_are_stored_and_found_again(tmp_path):
    folder = enable_compilation_cache(tmp_path / "a" / "b")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700

    def double(x):
        return x * 2

    hits, counting = 0, True

    def count(event, **_):
        nonlocal hits
        hits += counting and event == "/jax/compilation_cache/cache_hits"

    x = jnp.ones(3)
    jax.monitoring.register_event_listener(count)
    jax.jit(double).lower(x).compile()
    assert any("double" in file.name for file in folder.iterdir())
    assert hits == 0
    jax.clear_caches()
    jax.jit(double).lower(x).compile()
    counting = False  # a listener cannot be taken back
    assert hits == 1


def test_another_folder_counts_from_the_next_compilation_on(tmp_path):
    for name in ("one", "two"):
        folder = enable_compilation_cache(tmp_path / name)
        jax.jit(lambda x: x + 1).lower(jnp.ones(5)).compile()
        assert list(folder.iterdir())


def test_where_it_is(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert enable_compilation_cache() == tmp_path / "home" / ".cache" / "mamba_jax"
    jax.config.update("jax_compilation_cache_dir", None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert enable_compilation_cache() == tmp_path / "xdg" / "mamba_jax"
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "jax"))
    assert enable_compilation_cache() == tmp_path / "jax"
    monkeypatch.setenv("MAMBA_JAX_CACHE", str(tmp_path / "own"))
    assert enable_compilation_cache() == tmp_path / "own"
    assert enable_compilation_cache(tmp_path / "named") == tmp_path / "named"


def test_a_relative_folder_stays_where_it_was(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert enable_compilation_cache("here") == tmp_path / "here"
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "here")


@pytest.mark.parametrize("name", ["MAMBA_JAX_CACHE", "XDG_CACHE_HOME"])
def test_a_home_that_nobody_has_is_no_place(monkeypatch, name):
    monkeypatch.setenv(name, "~nouser/x")
    with pytest.raises(OSError, match=f"{name}: got '~nouser/x"):
        enable_compilation_cache()


def test_a_user_without_a_home_has_no_place(monkeypatch):
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as where HOME is not set and the user not known
    with pytest.raises(OSError, match="MAMBA_JAX_CACHE may name another"):
        own_folder()


def test_what_is_no_path_is_named():
    with pytest.raises(ValueError, match="directory: got 5, wanted a path"):
        enable_compilation_cache(5)


def test_a_folder_that_cannot_be_made(tmp_path):
    Path(tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        enable_compilation_cache(tmp_path / "file")
