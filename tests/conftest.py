"""Fixtures shared by all tests."""

import os
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

from mamba_jax import enable_compilation_cache


@pytest.fixture(scope="session")
def reference_dir() -> Path:
    """Folder with the trained reference checkpoints and golden tensors; skips where there is none."""
    folder = os.environ.get("MAMBA_JAX_REFERENCE")
    if not folder:
        pytest.skip("set MAMBA_JAX_REFERENCE to the folder of the reference checkpoints to run this test")
    path = Path(folder)
    if not (path / "kernel_goldens.safetensors").is_file():
        pytest.fail(f"MAMBA_JAX_REFERENCE={folder} holds no kernel_goldens.safetensors")
    return path


@pytest.fixture(scope="session", autouse=True)
def own_cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No test reads or writes what the user keeps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MAMBA_JAX_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module", autouse=True)
def shared_programs(own_cache_folder: None, tmp_path_factory: pytest.TempPathFactory) -> None:
    """What was compiled once in this process is not compiled again after it was forgotten."""
    enable_compilation_cache(tmp_path_factory.getbasetemp() / "programs")


@pytest.fixture(scope="module", autouse=True)
def few_mappings() -> Iterator[None]:
    """Compiled programs go before a process has as many memory mappings as Linux allows (65530), which ends it."""
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and len(maps.read_bytes().splitlines()) > 20_000:
        jax.clear_caches()
