"""`config.json` in the dialects it comes in, read into `MambaConfig` and `TextInfo`.

- Original: what mamba_ssm writes (d_model, n_layer, ssm_cfg, ...). Its defaults are those of mamba_ssm's classes.
- Hugging Face: model_type mamba, mamba2 or falcon_mamba. Its defaults are those of transformers' config classes.
- Mistral: the params.json of Codestral-Mamba (dim, n_layers, ...), which mistral_inference turns into an original one.

A key that is not used is ignored, except where it would change the maths: hybrid layers, an unknown entry of ssm_cfg.
"""

import dataclasses
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from mamba_jax.checkpoints.files import CONFIG_FILES, GENERATION_CONFIG, has_tokenizer, read_json
from mamba_jax.config import MambaConfig
from mamba_jax.messages import clip, shown, some
from mamba_jax.params import TextInfo

Dialect = Literal["original", "mistral", "mamba", "mamba2", "falcon_mamba"]

_WANTED = "a pure Mamba: model_type mamba, mamba2 or falcon_mamba, or mamba_ssm's own format"
_HYBRIDS = (
    "bamba",
    "falcon_h1",
    "granitemoehybrid",
    "hymba",
    "jamba",
    "mamba2attn",
    "nemotron_h",
    "nemotron_h_omni",
    "phi4flash",
    "plamo2",
    "samba",
    "zamba",
    "zamba2",
)
_ARCHITECTURES: dict[str, Dialect] = {
    "MambaLMHeadModel": "original",
    "MambaForCausalLM": "mamba",
    "MambaModel": "mamba",
    "Mamba2ForCausalLM": "mamba2",
    "Mamba2Model": "mamba2",
    "FalconMambaForCausalLM": "falcon_mamba",
    "FalconMambaModel": "falcon_mamba",
}
_MODEL_TYPES: dict[str, Dialect] = {"mamba": "mamba", "mamba2": "mamba2", "falcon_mamba": "falcon_mamba"}
# Spellings of "this layer is Mamba" in lists of layer kinds; Nemotron-H writes a letter for each layer.
_MAMBA_LAYERS = frozenset({"mamba", "mamba2", "linear_attention", "M"})
# Keys that say which layers have attention.
_ATTENTION_LAYERS = (
    "attn",
    "attn_layer_idx",
    "attn_layer_indices",
    "attn_layer_period",
    "hybrid_layer_ids",
)
_ATTENTION_KEYS = (
    "attn_layer_indices",
    "hybrid_override_pattern",
    "n_heads",
    "num_attention_heads",
    "num_key_value_heads",
)
# Entries of ssm_cfg that only initialise, train or place a layer.
_INERT_SSM_KEYS = {
    *("A_init_range", "conv_init", "dt_init", "dt_init_floor", "dt_max", "dt_min", "dt_scale"),
    *("device", "dtype", "layer_idx", "process_group", "sequence_parallel", "use_fast_path", "use_mem_eff_path"),
}
_SHARED_SSM_KEYS = {"layer", "expand", "d_conv", "conv_bias", "bias", "d_state"} | _INERT_SSM_KEYS
_MAMBA1_SSM_KEYS = _SHARED_SSM_KEYS | {"dt_rank"}
_MAMBA2_SSM_KEYS = _SHARED_SSM_KEYS | {
    *("headdim", "ngroups", "d_ssm", "rmsnorm", "norm_before_gate", "D_has_hdim", "chunk_size", "dt_limit"),
}
_TEXT_DEFAULTS: dict[str, tuple[int | None, int | None, int | None]] = {  # eos, bos, pad
    "original": (None, None, None),
    "mistral": (None, None, None),
    "mamba": (0, 0, 0),
    "mamba2": (2, 0, 1),
    "falcon_mamba": (0, 0, 0),
}
_MISSING = object()


def read_config(folder: Path) -> tuple[MambaConfig, TextInfo]:
    """Read a checkpoint folder's config, generation config and whether a tokenizer lies there.

    Args:
        folder: the checkpoint's folder.

    Returns:
        The architecture, and what the checkpoint says about text.

    Raises:
        ValueError: as `parse_config`, or if there is no config.
    """
    path = next((folder / name for name in CONFIG_FILES if os.path.lexists(folder / name)), None)
    if path is None:
        found = some(sorted(os.listdir(folder))) or "nothing"
        raise ValueError(f"{folder}: no {' or '.join(CONFIG_FILES)}; found {found}")
    config, text = parse_config(read_json(path), str(path))
    generation = folder / GENERATION_CONFIG
    if os.path.lexists(generation):
        text = _read_text(read_json(generation), str(generation), text, config.padded_vocab_size)
    return config, dataclasses.replace(text, tokenizer=str(folder.absolute()) if has_tokenizer(folder) else None)


def parse_config(raw: Mapping[str, Any], where: str = "config.json") -> tuple[MambaConfig, TextInfo]:
    """Translate a config of any dialect.

    Args:
        raw: the JSON object.
        where: what to call it in errors.

    Returns:
        The architecture, and what the config says about text (without a tokenizer).

    Raises:
        ValueError: if a key is missing or of the wrong type, values contradict each other, or the architecture is a
            hybrid or unknown; the message names `where`, the key, what came and what was wanted.
    """
    dialect = _dialect(raw, where)
    _refuse_other_layers(raw, where)
    if dialect in ("original", "mistral"):
        fields = _parse_original(_from_mistral(raw, where) if dialect == "mistral" else raw, where)
    else:
        fields = _parse_mamba2(raw, where) if dialect == "mamba2" else _parse_mamba1(raw, where, dialect)
    try:
        config = MambaConfig(**fields)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    eos, bos, pad = _TEXT_DEFAULTS[dialect]
    default = TextInfo(None, () if eos is None else (eos,), bos, pad)
    return config, _read_text(raw, where, default, config.padded_vocab_size)


def _dialect(raw: Mapping[str, Any], where: str) -> Dialect:
    if "dim" in raw and "n_layers" in raw:
        return "mistral"
    named = _named_dialect(raw, where)
    is_original = "d_model" in raw and "n_layer" in raw and "hidden_size" not in raw
    if is_original and named != "falcon_mamba":
        if named == "mamba2" and _section(raw, "ssm_cfg", where).get("layer") != "Mamba2":
            raise ValueError(f"{where}: model_type 'mamba2', but ssm_cfg has no layer 'Mamba2'")
        return "original"
    return named or _guess_dialect(raw, where)


def _named_dialect(raw: Mapping[str, Any], where: str) -> Dialect | None:
    """What model_type and architectures say, if they are there."""
    model_type, architectures = raw.get("model_type"), raw.get("architectures") or []
    if not isinstance(architectures, list | tuple) or not all(isinstance(name, str) for name in architectures):
        raise ValueError(f"{where}: architectures: got {shown(architectures)}, wanted a list of names")
    if model_type is not None and not isinstance(model_type, str):
        raise ValueError(f"{where}: model_type: got {shown(model_type)}, wanted a name")
    for name in [*([] if model_type is None else [model_type]), *architectures]:
        plain = name.lower().replace("_", "").removesuffix("forcausallm")
        if plain in {hybrid.replace("_", "") for hybrid in _HYBRIDS}:
            raise ValueError(f"{where}: {clip(name)} is a hybrid: it has attention or MLP layers too; wanted {_WANTED}")
    if model_type not in (None, *_MODEL_TYPES):
        raise ValueError(f"{where}: unknown architecture: model_type {shown(model_type)}; wanted {_WANTED}")
    if unknown := [name for name in architectures if name not in _ARCHITECTURES]:
        raise ValueError(f"{where}: unknown architecture {some(unknown)}; wanted {_WANTED}")
    kinds = [_MODEL_TYPES[model_type]] if model_type is not None else []
    kinds += [_ARCHITECTURES[name] for name in architectures]
    named = dict.fromkeys(kind for kind in kinds if kind != "original")
    if len(named) > 1:
        raise ValueError(
            f"{where}: model_type {model_type!r} contradicts architectures {some(architectures)}, or these each other"
        )
    return next(iter(named), "original" if kinds else None)


def _guess_dialect(raw: Mapping[str, Any], where: str) -> Dialect:
    """For a Hugging Face config that names no architecture: only what cannot be another one."""
    if "hidden_size" in raw and "state_size" in raw and not any(key in raw for key in _ATTENTION_KEYS):
        if "num_heads" in raw and "head_dim" in raw:
            return "mamba2"
        if "mixer_rms_eps" in raw:
            return "falcon_mamba"
        if "ssm_cfg" in raw:  # left over from the conversion of a state-spaces checkpoint
            return "mamba"
        raise ValueError(f"{where}: may be mamba or falcon_mamba: add the right one as 'model_type'")
    raise ValueError(f"{where}: unknown architecture: neither model_type nor known keys; wanted {_WANTED}")


def _refuse_other_layers(raw: Mapping[str, Any], where: str) -> None:
    for key in _ATTENTION_LAYERS:
        if raw.get(key):
            raise ValueError(f"{where}: {key}: hybrid: attention layers {shown(raw[key])}; wanted {_WANTED}")
    if raw.get("d_intermediate"):
        raise ValueError(
            f"{where}: d_intermediate: got {shown(raw['d_intermediate'])}: MLP layers between the mixers; "
            f"wanted 0, {_WANTED}"
        )
    for key in ("layer_types", "layers_block_type", "hybrid_override_pattern"):
        kinds = raw.get(key) or []
        listed = isinstance(kinds, list | tuple) or (isinstance(kinds, str) and key == "hybrid_override_pattern")
        names = [kind if isinstance(kind, str) else shown(kind) for kind in (kinds if listed else [kinds])]
        if others := [name for name in dict.fromkeys(names) if name not in _MAMBA_LAYERS]:
            raise ValueError(f"{where}: {key}: hybrid: has layers {some(others)}; wanted {_WANTED}")
    for key in ("quantization_config", "compression_config"):
        if raw.get(key):
            raise ValueError(f"{where}: {key}: quantised weights are not supported; wanted bfloat16 to float32")


def _from_mistral(raw: Mapping[str, Any], where: str) -> dict[str, Any]:
    keys = _Keys(raw, where)
    if raw.get("model_type", "mamba") != "mamba" or "n_groups" not in raw or any(key in raw for key in _ATTENTION_KEYS):
        raise ValueError(f"{where}: 'dim' and 'n_layers' are Mistral's format, but not of a Mamba; wanted {_WANTED}")
    renamed = {"dim": "d_model", "n_layers": "n_layer"}
    original = {renamed.get(key, key): value for key, value in raw.items() if key not in ("model_type", "n_groups")}
    return original | {"ssm_cfg": {"layer": "Mamba2", "ngroups": keys.integer("n_groups")}}


def _parse_original(raw: Mapping[str, Any], where: str) -> dict[str, Any]:
    top, ssm = _Keys(raw, where), _Keys(_section(raw, "ssm_cfg", where), f"{where}: ssm_cfg")
    layer = ssm.raw.get("layer", "Mamba1")
    if layer not in ("Mamba1", "Mamba2"):
        raise ValueError(f"{where}: ssm_cfg: layer: got {shown(layer)}, wanted 'Mamba1' or 'Mamba2'")
    d_model = top.integer("d_model")
    shared = {
        "vocab_size": top.integer("vocab_size"),
        "pad_vocab_size_multiple": top.integer("pad_vocab_size_multiple", 8),
        "d_model": d_model,
        "n_layer": top.integer("n_layer"),
        "d_inner": int(ssm.number("expand", 2) * d_model),
        "d_conv": ssm.integer("d_conv", 4),
        "block_norm": "rms" if top.flag("rms_norm", True) else "layer",
        "conv_bias": ssm.flag("conv_bias", True),
        "proj_bias": ssm.flag("bias", False),
        "tie_embeddings": top.flag("tie_embeddings", True),
        "residual_in_fp32": top.flag("residual_in_fp32", True),
    }
    ssm.refuse_others(_MAMBA1_SSM_KEYS if layer == "Mamba1" else _MAMBA2_SSM_KEYS)
    if layer == "Mamba1":
        rank = _rank(ssm, "dt_rank", d_model)
        return shared | {"layer": "mamba1", "d_state": ssm.integer("d_state", 16), "dt_rank": rank}
    if ssm.integer("d_ssm", shared["d_inner"]) != shared["d_inner"]:
        raise ValueError(
            f"{where}: ssm_cfg: d_ssm={ssm.raw['d_ssm']} is not d_inner={shared['d_inner']}: the rest is an MLP, "
            "which is not supported"
        )
    return shared | {
        "layer": "mamba2",
        "d_state": ssm.integer("d_state", 128),
        "headdim": ssm.integer("headdim", 64),
        "ngroups": ssm.integer("ngroups", 1),
        "chunk_size": ssm.integer("chunk_size", 256),
        "gated_norm": ssm.flag("rmsnorm", True),
        "norm_before_gate": ssm.flag("norm_before_gate", False),
        "D_has_hdim": ssm.flag("D_has_hdim", False),
        "dt_limit": parse_limit(ssm.raw.get("dt_limit"), f"{where}: ssm_cfg: dt_limit"),
    }


def _shared_hf(keys: "_Keys") -> dict[str, Any]:
    activation = keys.raw.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):  # two names of one function
        raise ValueError(f"{keys.where}: hidden_act: got {shown(activation)}, wanted 'silu'")
    # Here vocab_size counts rows; `save` adds how many of them mean something, which holds until someone resizes.
    rows, multiple = keys.integer("vocab_size"), max(keys.integer("pad_vocab_size_multiple", 1), 1)
    unpadded = keys.integer("unpadded_vocab_size", rows)
    padded = -(-unpadded // multiple) * multiple
    return {
        "vocab_size": unpadded if padded == rows else rows,
        "pad_vocab_size_multiple": multiple,
        "d_model": keys.integer("hidden_size"),
        "n_layer": keys.integer("num_hidden_layers"),
        "d_conv": keys.integer("conv_kernel", 4),
        "norm_eps": keys.number("layer_norm_epsilon", 1e-5),
        "conv_bias": keys.flag("use_conv_bias", True),
        "proj_bias": keys.flag("use_bias", False),
        "residual_in_fp32": keys.flag("residual_in_fp32", True),
    }


def _parse_mamba1(raw: Mapping[str, Any], where: str, dialect: Dialect) -> dict[str, Any]:
    keys = _Keys(raw, where)
    shared = _shared_hf(keys)
    expanded = int(keys.number("expand", 2) * shared["d_model"])
    return shared | {
        "layer": "mamba1",
        "d_inner": keys.integer("intermediate_size", expanded),  # Falcon-Mamba-7B: expand 16, yet 2 * hidden_size
        "d_state": keys.integer("state_size", 16),
        "dt_rank": _rank(keys, "time_step_rank", shared["d_model"]),
        "bcdt_norm_eps": keys.number("mixer_rms_eps", 1e-6) if dialect == "falcon_mamba" else None,
        "tie_embeddings": keys.flag("tie_word_embeddings", True),
    }


def _parse_mamba2(raw: Mapping[str, Any], where: str) -> dict[str, Any]:
    keys = _Keys(raw, where)
    shared = _shared_hf(keys)
    heads, headdim = keys.integer("num_heads", 128), keys.integer("head_dim", 64)
    expand = keys.number("expand", 2)
    if heads * headdim != int(expand * shared["d_model"]):
        raise ValueError(
            f"{where}: num_heads {heads} * head_dim {headdim} = {heads * headdim} is not "
            f"expand {expand} * hidden_size {shared['d_model']} = {int(expand * shared['d_model'])}"
        )
    return shared | {
        "layer": "mamba2",
        "d_inner": heads * headdim,
        "d_state": keys.integer("state_size", 128),
        "headdim": headdim,
        "ngroups": keys.integer("n_groups", 8),
        "chunk_size": keys.integer("chunk_size", 256),
        # transformers gates first whatever `norm_before_gate` says; Codestral-Mamba publishes true and means false.
        "norm_before_gate": False,
        # Only this clamps: time_step_min and time_step_max are for the initial values.
        "dt_limit": parse_limit(raw.get("time_step_limit"), f"{where}: time_step_limit"),
        "tie_embeddings": keys.flag("tie_word_embeddings", False),
    }


def parse_limit(value: Any, where: str = "dt_limit") -> tuple[float, float]:
    """The limits of dt, in any of the ways they are written: [0.0, Infinity], {"__float__": "Infinity"}, "inf", null.

    Raises:
        ValueError: if they are not two numbers.
    """
    if isinstance(value, str) and "," in value:
        value = value.strip("()[] ").split(",")
    if value is None:
        return (0.0, math.inf)
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise ValueError(f"{where}: got {shown(value)}, wanted two numbers")
    # dt is positive after softplus, so a limit below 0 is none.
    low, high = (_limit(item, absent, where) for item, absent in zip(value, (0.0, math.inf), strict=True))
    return (max(low, 0.0), high)


def _limit(value: Any, absent: float, where: str) -> float:
    if isinstance(value, Mapping) and set(value) == {"__float__"}:
        value = value["__float__"]
    if isinstance(value, str) and value.strip().lower() in ("null", "none", ""):
        value = None
    if value is None:
        return absent
    try:
        number = float(value) if isinstance(value, int | float | str) and not isinstance(value, bool) else math.nan
    except (ValueError, OverflowError):
        number = math.nan
    if math.isnan(number):
        raise ValueError(f"{where}: got {shown(value)}, wanted a number")
    return number


def _rank(keys: "_Keys", key: str, d_model: int) -> int:
    auto = math.ceil(d_model / 16)
    return auto if keys.raw.get(key) == "auto" else keys.integer(key, auto)


def _section(raw: Mapping[str, Any], key: str, where: str) -> Mapping[str, Any]:
    section = raw.get(key) or {}
    if not isinstance(section, Mapping):
        raise ValueError(f"{where}: {key}: got {shown(section)}, wanted an object")
    return section


def _read_text(raw: Mapping[str, Any], where: str, default: TextInfo, rows: int) -> TextInfo:
    """The token ids a config or generation config names, over `default`; the embedding has `rows` rows."""

    def ids(key: str, absent: Any, end: float) -> Any:
        value = raw.get(key, absent)
        many = value if isinstance(value, list | tuple) else () if value is None else (value,)
        if not all(type(item) is int and item >= 0 for item in many):
            raise ValueError(f"{where}: {key}: got {shown(value)}, wanted token ids")
        if key in raw and not all(item < end for item in many):
            raise ValueError(f"{where}: {key}: got {shown(value)}, wanted token ids from 0 to {rows - 1}")
        return value

    eos = ids("eos_token_id", default.eos_token_ids, rows)
    eos_token_ids = tuple(eos) if isinstance(eos, list | tuple) else () if eos is None else (eos,)
    bos = ids("bos_token_id", default.bos_token_id, rows)
    pad = ids("pad_token_id", default.pad_token_id, math.inf)  # never read: some checkpoints name one they lack
    for key, value in (("bos_token_id", bos), ("pad_token_id", pad)):
        if isinstance(value, list | tuple):
            raise ValueError(f"{where}: {key}: got {shown(value)}, wanted one token id")
    return TextInfo(default.tokenizer, eos_token_ids, bos, pad)


@dataclasses.dataclass(frozen=True)
class _Keys:
    """Typed look-ups in a JSON object; null counts as absent. Each raises a ValueError that names object and key."""

    raw: Mapping[str, Any]
    where: str

    def integer(self, key: str, default: Any = _MISSING) -> int:
        return self._get(key, default, "an integer", lambda value: type(value) is int and abs(value) < 2**53)

    def number(self, key: str, default: Any = _MISSING) -> float:
        return self._get(key, default, "a number", lambda value: type(value) in (int, float) and abs(value) < 1e30)

    def flag(self, key: str, default: Any = _MISSING) -> bool:
        return self._get(key, default, "true or false", lambda value: type(value) is bool)

    def refuse_others(self, known: set[str] | frozenset[str]) -> None:
        """Refuse keys that are not known, for they may change the maths."""
        others = sorted(set(self.raw) - known)
        if others:
            raise ValueError(f"{self.where}: unknown {some(others)}; known are {', '.join(sorted(known))}")

    def _get(self, key: str, default: Any, wanted: str, accept: Any) -> Any:
        value = self.raw.get(key)
        if value is None:
            if default is _MISSING:
                raise ValueError(f"{self.where}: {key}: missing, wanted {wanted}")
            return default
        if not accept(value):
            raise ValueError(f"{self.where}: {key}: got {shown(value)}, wanted {wanted}")
        return value
