"""`MambaConfig` and `TextInfo` as the `config.json` of a layout, strict JSON that transformers or mamba_ssm reads."""

import math
from typing import Any

from mamba_jax.checkpoints.keys import Layout
from mamba_jax.config import MambaConfig
from mamba_jax.params import TextInfo


def write_config(config: MambaConfig, text: TextInfo, dtype: str, layout: Layout) -> dict[str, Any]:
    """The config of a layout, as strict JSON can hold it.

    Args:
        config: the architecture.
        text: token ids for the Hugging Face layout; the original one has no place for them.
        dtype: of the weights.
        layout: "hf" or "original".

    Returns:
        What `parse_config` reads back, and transformers or mamba_ssm too.

    Raises:
        ValueError: if the layout cannot express the architecture; the message names each field it cannot.
    """
    lost = _lost_in_hf(config) if layout == "hf" else _lost_in_original(config)
    if lost:
        raise ValueError(f"layout {layout!r} cannot express {', '.join(lost)}")
    return _write_hf(config, text, dtype) if layout == "hf" else _write_original(config)


def write_generation_config(text: TextInfo) -> dict[str, Any]:
    """The token ids, as generation_config.json has them."""
    eos = text.eos_token_ids[0] if len(text.eos_token_ids) == 1 else list(text.eos_token_ids) or None
    ids = {"bos_token_id": text.bos_token_id, "eos_token_id": eos, "pad_token_id": text.pad_token_id}
    return {key: value for key, value in ids.items() if value is not None}


def _lost(config: MambaConfig, **wanted: Any) -> list[str]:
    fields = [(name, getattr(config, name)) for name, value in wanted.items() if getattr(config, name) != value]
    return [f"{name}={value!r}" for name, value in fields]


def _lost_in_hf(config: MambaConfig) -> list[str]:
    lost = _lost(config, block_norm="rms")
    if config.layer == "mamba1":
        return lost + _lost(config, dt_limit=(0.0, math.inf))
    lost += _lost(config, gated_norm=True, norm_before_gate=False, D_has_hdim=False)
    return lost + _uneven(config)


def _lost_in_original(config: MambaConfig) -> list[str]:
    lost = _lost(config, bcdt_norm_eps=None, norm_eps=1e-5)
    if config.layer == "mamba1":
        expand = config.d_inner / config.d_model
        lost += _lost(config, dt_limit=(0.0, math.inf))
        return lost if int(expand * config.d_model) == config.d_inner else [*lost, f"d_inner={config.d_inner}"]
    if config.dt_limit != (0.0, math.inf) and math.isinf(config.dt_limit[1]):
        lost += [f"dt_limit={config.dt_limit} in strict JSON"]
    return lost + _uneven(config)


def _uneven(config: MambaConfig) -> list[str]:
    if config.d_inner % config.d_model:
        return [f"d_inner={config.d_inner}, no multiple of d_model={config.d_model}"]
    return []


def _write_hf(config: MambaConfig, text: TextInfo, dtype: str) -> dict[str, Any]:
    c = config
    family = "Mamba2" if c.layer == "mamba2" else "Mamba" if c.bcdt_norm_eps is None else "FalconMamba"
    shared: dict[str, Any] = {
        "architectures": [f"{family}ForCausalLM"],
        "model_type": {"Mamba": "mamba", "Mamba2": "mamba2", "FalconMamba": "falcon_mamba"}[family],
        "torch_dtype": dtype,  # older and newer transformers read this name
        "vocab_size": c.padded_vocab_size,
        "unpadded_vocab_size": c.vocab_size,
        "pad_vocab_size_multiple": c.pad_vocab_size_multiple,
        "hidden_size": c.d_model,
        "num_hidden_layers": c.n_layer,
        "state_size": c.d_state,
        "conv_kernel": c.d_conv,
        "expand": max(c.d_inner // c.d_model, 1),
        "layer_norm_epsilon": c.norm_eps,
        "hidden_act": "silu",
        "use_conv_bias": c.conv_bias,
        "use_bias": c.proj_bias,
        "tie_word_embeddings": c.tie_embeddings,
        "residual_in_fp32": c.residual_in_fp32,
        # null where there is none: absent, it would mean the default of transformers' class.
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        **write_generation_config(text),
    }
    if c.layer == "mamba1":
        shared |= {"intermediate_size": c.d_inner, "time_step_rank": c.dt_rank}
        return shared if c.bcdt_norm_eps is None else shared | {"mixer_rms_eps": c.bcdt_norm_eps}
    shared |= {"num_heads": c.nheads, "head_dim": c.headdim, "n_groups": c.ngroups, "chunk_size": c.chunk_size}
    if c.dt_limit != (0.0, math.inf):  # the default, which has no spelling that all versions of transformers read
        low, high = c.dt_limit
        shared["time_step_limit"] = [low, {"__float__": "Infinity"} if math.isinf(high) else high]
    return shared


def _write_original(config: MambaConfig) -> dict[str, Any]:
    c = config
    even = c.d_inner % c.d_model == 0
    ssm: dict[str, Any] = {
        "layer": "Mamba1" if c.layer == "mamba1" else "Mamba2",
        "d_state": c.d_state,
        "d_conv": c.d_conv,
        "expand": c.d_inner // c.d_model if even else c.d_inner / c.d_model,
        "bias": c.proj_bias,
        "conv_bias": c.conv_bias,
    }
    if c.layer == "mamba1":
        ssm["dt_rank"] = c.dt_rank
    else:
        names = ("headdim", "ngroups", "norm_before_gate", "D_has_hdim", "chunk_size")
        ssm |= {name: getattr(c, name) for name in names} | {"rmsnorm": c.gated_norm}
        if c.dt_limit != (0.0, math.inf):
            ssm["dt_limit"] = list(c.dt_limit)
    return {
        "d_model": c.d_model,
        "d_intermediate": 0,
        "n_layer": c.n_layer,
        "vocab_size": c.vocab_size,
        "ssm_cfg": ssm,
        "attn_layer_idx": [],
        "attn_cfg": {},
        "rms_norm": c.block_norm == "rms",
        "residual_in_fp32": c.residual_in_fp32,
        "fused_add_norm": True,
        "pad_vocab_size_multiple": c.pad_vocab_size_multiple,
        "tie_embeddings": c.tie_embeddings,
    }
