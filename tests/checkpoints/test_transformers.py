"""Against transformers itself: it loads what `save` writes with the same logits, and `load` what it writes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mamba_jax import forward, prefill, step
from mamba_jax.checkpoints import load, save
from tests.checkpoints.folders import random_params

torch = pytest.importorskip("torch", reason="needs the extra `parity`")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.parity

SHARED = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "initializer_range": 0.3}
FAMILIES = {
    "mamba": {"state_size": 8, "time_step_rank": 3, "use_bias": True},
    "mamba-untied": {"state_size": 8, "tie_word_embeddings": False, "expand": 3, "use_conv_bias": False},
    "mamba2": {"state_size": 16, "num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 8},
    "mamba2-tied": {
        "state_size": 16,
        "num_heads": 4,
        "head_dim": 16,
        "n_groups": 1,
        "chunk_size": 8,
        "use_bias": True,
        "tie_word_embeddings": True,
        "time_step_limit": (0.05, float("inf")),
        "residual_in_fp32": False,
    },
    "falcon_mamba": {"state_size": 8, "time_step_rank": 3, "tie_word_embeddings": False, "mixer_rms_eps": 1e-5},
    "falcon_mamba-u48": {"state_size": 8, "time_step_rank": 3, "mixer_rms_eps": 1e-6},
}
IDS = np.random.default_rng(0).integers(0, 61, (2, 19))


def random_model(family):
    """A model of transformers with no weight left at its initial 0 or 1."""
    torch.manual_seed(0)
    kind = family.split("-")[0]
    config = transformers.AutoConfig.for_model(kind, **SHARED, **FAMILIES[family])
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def logits_of(model):
    with torch.no_grad():
        return model(torch.tensor(IDS), use_cache=False).logits.numpy()


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_loads_what_save_writes_with_the_same_logits(tmp_path, family):
    model = random_model(family)
    model.save_pretrained(tmp_path / "theirs")
    params = load(tmp_path / "theirs")
    want = logits_of(model)
    # Ours of the same weights: the names mean the same and the config says the same.
    np.testing.assert_allclose(forward(params, IDS), want, rtol=2e-4, atol=2e-4 * np.abs(want).max())

    save(params, tmp_path / "ours", "hf")
    ours, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert type(ours) is type(model)
    np.testing.assert_array_equal(logits_of(ours), want)
    assert ours.config.time_step_rank == model.config.time_step_rank
    assert ours.generation_config.eos_token_id == model.generation_config.eos_token_id
    again = load(tmp_path / "ours")
    assert (again.config, again.text) == (params.config, params.text)


def test_u48_falcon_mamba_norms_b_c_and_dt_once_in_prefill_and_in_decode(tmp_path):
    model = random_model("falcon_mamba-u48")
    model.save_pretrained(tmp_path)
    params = load(tmp_path)
    assert params.config.bcdt_norm_eps == 1e-6
    want = logits_of(model)
    atol = 2e-4 * np.abs(want).max()
    logits, cache = prefill(params, IDS[:, :9])
    np.testing.assert_allclose(logits, want[:, 8], rtol=2e-4, atol=atol)
    for i in range(9, IDS.shape[1]):
        logits, cache = step(params, IDS[:, i], cache)
        np.testing.assert_allclose(logits, want[:, i], rtol=2e-4, atol=atol)
    unnormed = dataclasses.replace(params, config=dataclasses.replace(params.config, bcdt_norm_eps=None))
    assert np.abs(forward(unnormed, IDS) - want).max() > 100 * atol


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_transformers_takes_the_dtype_from_the_config(tmp_path, dtype):
    save(random_params("mamba2", dtype), tmp_path, "hf")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert model.dtype == getattr(torch, dtype)
    np.testing.assert_array_equal(
        model.backbone.layers[0].mixer.in_proj.weight.detach().float().numpy(),
        np.asarray(load(tmp_path).layers[0].in_proj.astype(jnp.float32)),
    )


def test_shards_and_bin_files_of_transformers(tmp_path):
    model = random_model("mamba2")
    model.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    (tmp_path / "bin").mkdir()
    model.config.save_pretrained(tmp_path / "bin")
    torch.save(model.state_dict(), tmp_path / "bin" / "pytorch_model.bin")
    shards, single = load(tmp_path / "shards"), load(tmp_path / "bin")
    jax.tree.map(np.testing.assert_array_equal, shards, single.replace(text=shards.text))
    want = model.backbone.layers[1].mixer.out_proj.weight.detach().numpy()
    np.testing.assert_array_equal(shards.layers[1].out_proj, want)


def test_original_weights_become_a_model_of_transformers(tmp_path):
    params = random_params("mamba1", norm_eps=1e-5)
    save(params, tmp_path / "original", "original")
    converted = load(tmp_path / "original")
    save(converted, tmp_path / "hf", "hf")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    want = logits_of(model)
    np.testing.assert_allclose(forward(params, IDS), want, rtol=2e-4, atol=2e-4 * np.abs(want).max())


@pytest.mark.reference
@pytest.mark.parametrize("name", ["mamba1-12m", "mamba2-12m-hf"])
def test_a_converted_reference_checkpoint_gives_the_true_logits(reference_dir, tmp_path, name):
    from safetensors.numpy import load_file

    golden = load_file(reference_dir / name / "golden.safetensors")
    save(load(reference_dir / name, dtype="float32"), tmp_path, "hf")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(torch.tensor(golden["ids"])[None].long(), use_cache=False).logits[0, :, :256].numpy()
    np.testing.assert_allclose(logits, golden["truth_logits256"], atol=3e-5)
