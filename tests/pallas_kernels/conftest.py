import pytest

from mamba_jax.ops import dispatch


@pytest.fixture(autouse=True)
def kernels_by_default(monkeypatch):
    monkeypatch.setattr(dispatch, "KERNELS_BY_DEFAULT", True)
