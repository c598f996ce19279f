"""Everything runs as ever where the caller's configuration of JAX is stricter than the default."""

import jax
import numpy as np
import pytest

from mamba_jax import embed, forward, generate, init_cache, init_params, prefill, score, step
from mamba_jax.programs import TABLE
from tests.tiny import tiny_params


def everything(params):
    """Results of every function, as arrays."""
    cache = init_cache(params.config, 1, params.dtype)
    options = {"temperature": 0.8, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.2}
    return [
        forward(params, [[1, 2, 3]]),
        forward(params, [[1, 2, 3]], segment_ids=[[-1, 0, 0]])[:, 1:],
        forward(params, [[1, 2, 3]], lengths=[2])[:, :2],
        step(params, [4], prefill(params, [[1, 2, 3]], cache=cache)[1])[0],
        generate(params, [1, 2, 3], max_new_tokens=3).tokens,
        generate(params, [1, 2, 3], max_new_tokens=3, **options).tokens,
        score(params, [1, 2, 3]).total,
        embed(params, [1, 2, 3]),
        jax.grad(lambda params: forward(params, [[1, 2, 3]]).sum())(params).norm_f,
        init_params(params.config, jax.random.key(0)).embedding,
    ]


@pytest.mark.parametrize("kind", ["mamba1", "mamba2-groups", "falcon"])
def test_a_stricter_configuration_changes_nothing(kind, monkeypatch):
    params = tiny_params(kind, n_layer=1)
    want = everything(params)
    monkeypatch.setattr(TABLE, "_programs", {})  # to be traced again
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        got = everything(params)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", ["mamba1", "mamba2-groups"])
def test_without_jit_the_functions_of_arrays_run_and_the_programs_say_why_not(kind):
    params = tiny_params(kind, n_layer=1)
    want = forward(params, [[1, 2, 3]])
    with jax.disable_jit():
        logits, cache = prefill(params, [[1, 2]])
        np.testing.assert_allclose(forward(params, [[1, 2, 3]]), want, atol=1e-4)
        np.testing.assert_allclose(logits, want[:, 1], atol=1e-4)
        np.testing.assert_allclose(step(params, [3], cache)[0], want[:, 2], atol=1e-4)
        for call in (generate, score, embed):
            with pytest.raises(ValueError, match="jax_disable_jit: got True, wanted False"):
                call(params, [1, 2, 3])
