"""Checkpoint folders for tests, made from small random models without the code under test."""

import json

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import safetensors.numpy

from mamba_jax import TextInfo
from mamba_jax.params import build_params
from tests.checkpoints import torch_archives
from tests.tiny import tiny_config

MAMBA1 = {
    "d_model": 16,
    "n_layer": 2,
    "vocab_size": 29,
    "ssm_cfg": {},
    "rms_norm": True,
    "residual_in_fp32": True,
    "fused_add_norm": True,
    "pad_vocab_size_multiple": 8,
}
MAMBA2 = {
    "model_type": "mamba2",
    "architectures": ["Mamba2ForCausalLM"],
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "vocab_size": 32,
    "state_size": 8,
    "num_heads": 4,
    "head_dim": 8,
    "n_groups": 2,
    "expand": 2,
    "tie_word_embeddings": False,
    "eos_token_id": 5,
    "bos_token_id": 1,
    "pad_token_id": None,
    "time_step_limit": [0.0, float("inf")],
}


def mamba1_shapes(vocab=32, m=16, d=32, n=16, r=1, layers=2):
    """What an original Mamba-1 file of `MAMBA1` holds."""
    shapes = {"backbone.embedding.weight": (vocab, m), "backbone.norm_f.weight": (m,), "lm_head.weight": (vocab, m)}
    for i in range(layers):
        mixer = {
            "A_log": (d, n),
            "D": (d,),
            "in_proj.weight": (2 * d, m),
            "conv1d.weight": (d, 1, 4),
            "conv1d.bias": (d,),
            "x_proj.weight": (r + 2 * n, d),
            "dt_proj.weight": (d, r),
            "dt_proj.bias": (d,),
            "out_proj.weight": (m, d),
        }
        shapes |= {f"backbone.layers.{i}.mixer.{name}": shape for name, shape in mixer.items()}
        shapes[f"backbone.layers.{i}.norm.weight"] = (m,)
    return shapes


def mamba2_shapes(vocab=32, m=16, h=4, p=8, g=2, n=8, layers=2):
    """What a Hugging Face Mamba-2 file of `MAMBA2` holds."""
    d, channels = h * p, h * p + 2 * g * n
    shapes = {"backbone.embeddings.weight": (vocab, m), "backbone.norm_f.weight": (m,), "lm_head.weight": (vocab, m)}
    for i in range(layers):
        mixer = {
            "A_log": (h,),
            "D": (h,),
            "dt_bias": (h,),
            "in_proj.weight": (d + channels + h, m),
            "conv1d.weight": (channels, 1, 4),
            "conv1d.bias": (channels,),
            "norm.weight": (d,),
            "out_proj.weight": (m, d),
        }
        shapes |= {f"backbone.layers.{i}.mixer.{name}": shape for name, shape in mixer.items()}
        shapes[f"backbone.layers.{i}.norm.weight"] = (m,)
    return shapes


def random_arrays(shapes, dtype="float32", seed=0):
    rng = np.random.default_rng(seed)
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    return {name: rng.standard_normal(shape).astype(kind) for name, shape in shapes.items()}


def random_params(kind, dtype="float32", text=None, **changes):
    """A tiny random model; drawn by numpy, for JAX compiles a program for each shape."""
    rng = np.random.default_rng(0)

    def make(path, shape, leaf_dtype):
        return jnp.asarray(rng.standard_normal(shape).astype(leaf_dtype))

    return build_params(tiny_config(kind, **changes), dtype, make, text or TextInfo())


def tied(arrays, embedding="backbone.embedding.weight"):
    return arrays | {"lm_head.weight": arrays[embedding]}


def write_safetensors(path, arrays):
    """Write with the format's own library."""
    safetensors.numpy.save_file(arrays, path, {"format": "pt"})


def write_shards(folder, arrays, stem, suffix, count=2):
    """Write shards and their index."""
    write = write_safetensors if suffix == "safetensors" else torch_archives.write
    names, weight_map = list(arrays), {}
    for i in range(count):
        file = f"{stem}-{i + 1:05}-of-{count:05}.{suffix}"
        write(folder / file, {name: arrays[name] for name in names[i::count]})
        weight_map |= dict.fromkeys(names[i::count], file)
    write_json(folder / f"{stem}.{suffix}.index.json", {"metadata": {}, "weight_map": weight_map})


def write_json(path, value):
    path.write_text(json.dumps(value))


def mamba1_folder(folder, dtype="float32", seed=0, **changes):
    """An original Mamba-1 checkpoint with pytorch_model.bin; gives its arrays."""
    folder.mkdir(exist_ok=True)
    arrays = tied(random_arrays(mamba1_shapes(), dtype, seed))
    write_json(folder / "config.json", MAMBA1 | changes)
    torch_archives.write(folder / "pytorch_model.bin", arrays)
    return arrays


def mamba2_folder(folder, dtype="float32", seed=0, **changes):
    """A Hugging Face Mamba-2 checkpoint with model.safetensors; gives its arrays."""
    folder.mkdir(exist_ok=True)
    arrays = random_arrays(mamba2_shapes(), dtype, seed)
    write_json(folder / "config.json", MAMBA2 | changes)
    write_safetensors(folder / "model.safetensors", arrays)
    return arrays
