import jax
import pytest

from mamba_jax.ops import dispatch


@pytest.fixture(autouse=True, scope="module")
def kernels_by_default():
    """Kernels where nothing is said; traces made with and without do not meet."""
    jax.clear_caches()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "KERNELS_BY_DEFAULT", frozenset({"cuda", "tpu"}))
        yield
    jax.clear_caches()


@pytest.fixture
def at_a_gpu(monkeypatch):
    """A process that takes itself to be at a GPU, while it traces."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
