"""Fixtures shared by all tests."""

import os
from pathlib import Path

import pytest


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
