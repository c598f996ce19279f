"""Configs of every dialect: dimensions of published models, refusals by name, contradictions, fuzz."""

import functools
import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mamba_jax import MambaConfig, TextInfo
from mamba_jax.checkpoints.configs import _ATTENTION_LAYERS, _MAMBA2_SSM_KEYS, parse_config, parse_limit, read_config

ORIGINAL = {
    "d_model": 768,
    "n_layer": 24,
    "vocab_size": 50277,
    "ssm_cfg": {},
    "rms_norm": True,
    "residual_in_fp32": True,
    "fused_add_norm": True,
    "pad_vocab_size_multiple": 8,
}
MAMBA_HF = {
    "architectures": ["MambaForCausalLM"],
    "model_type": "mamba",
    "d_inner": 1536,
    "d_model": 768,
    "n_layer": 24,
    "hidden_size": 768,
    "num_hidden_layers": 24,
    "intermediate_size": 1536,
    "expand": 2,
    "state_size": 16,
    "time_step_rank": 48,
    "vocab_size": 50280,
    "pad_vocab_size_multiple": 8,
    "ssm_cfg": {},
    "rms_norm": True,
    "use_bias": False,
    "use_conv_bias": True,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
MAMBA2_HF = {
    "model_type": "mamba2",
    "hidden_size": 768,
    "num_hidden_layers": 24,
    "vocab_size": 50288,
    "expand": 2,
    "num_heads": 24,
    "head_dim": 64,
    "n_groups": 1,
    "state_size": 128,
    "chunk_size": 256,
    "tie_word_embeddings": True,
    "eos_token_id": 0,
    "bos_token_id": 0,
    "pad_token_id": 0,
    "time_step_limit": [0.0, math.inf],
}
CODESTRAL = MAMBA2_HF | {
    "architectures": ["Mamba2ForCausalLM"],
    "hidden_size": 4096,
    "num_hidden_layers": 64,
    "intermediate_size": 8192,
    "vocab_size": 32768,
    "num_heads": 128,
    "n_groups": 8,
    "norm_before_gate": True,
    "tie_word_embeddings": False,
}
FALCON = {
    "architectures": ["FalconMambaForCausalLM"],
    "model_type": "falcon_mamba",
    "hidden_size": 4096,
    "intermediate_size": 8192,
    "expand": 16,
    "num_hidden_layers": 64,
    "state_size": 16,
    "time_step_rank": 256,
    "vocab_size": 65024,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 11,
    "pad_token_id": 11,
}
PARAMS_JSON = {
    "dim": 4096,
    "n_layers": 64,
    "vocab_size": 32768,
    "n_groups": 8,
    "rms_norm": True,
    "residual_in_fp32": True,
    "fused_add_norm": True,
    "pad_vocab_size_multiple": 1,
    "tie_embeddings": False,
    "model_type": "mamba",
}
PUBLISHED = {
    "mamba-130m": (
        ORIGINAL,
        {
            "layer": "mamba1",
            "d_inner": 1536,
            "d_state": 16,
            "dt_rank": 48,
            "padded_vocab_size": 50280,
            "tie_embeddings": True,
        },
    ),
    "mamba-2.8b-slimpj": (
        ORIGINAL | {"d_model": 2560, "n_layer": 64},
        {"layer": "mamba1", "d_model": 2560, "n_layer": 64, "d_inner": 5120, "dt_rank": 160, "in_proj_width": 10240},
    ),
    "mamba2-130m": (
        ORIGINAL
        | {"ssm_cfg": {"layer": "Mamba2"}, "d_intermediate": 0, "attn_layer_idx": [], "pad_vocab_size_multiple": 16},
        {
            "layer": "mamba2",
            "nheads": 24,
            "headdim": 64,
            "d_state": 128,
            "ngroups": 1,
            "in_proj_width": 3352,
            "padded_vocab_size": 50288,
        },
    ),
    "mamba2-2.7b": (
        ORIGINAL | {"ssm_cfg": {"layer": "Mamba2"}, "d_model": 2560, "n_layer": 64, "pad_vocab_size_multiple": 16},
        {"layer": "mamba2", "d_inner": 5120, "nheads": 80, "in_proj_width": 10576, "conv_channels": 5376},
    ),
    "mamba-130m-hf": (
        MAMBA_HF,
        {
            "layer": "mamba1",
            "d_inner": 1536,
            "dt_rank": 48,
            "vocab_size": 50280,
            "padded_vocab_size": 50280,
            "bcdt_norm_eps": None,
        },
    ),
    "mamba2-130m-hf": (MAMBA2_HF, {"layer": "mamba2", "nheads": 24, "in_proj_width": 3352, "tie_embeddings": True}),
    "codestral": (
        CODESTRAL,
        {
            "layer": "mamba2",
            "nheads": 128,
            "ngroups": 8,
            "in_proj_width": 18560,
            "norm_before_gate": False,
            "tie_embeddings": False,
        },
    ),
    "falcon-mamba-7b": (
        FALCON,
        {
            "layer": "mamba1",
            "d_inner": 8192,
            "dt_rank": 256,
            "bcdt_norm_eps": 1e-6,
            "tie_embeddings": False,
            "vocab_size": 65024,
        },
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_parse_to_the_right_dims(name):
    raw, facts = PUBLISHED[name]
    config, _ = parse_config(raw)
    assert {key: getattr(config, key) for key in facts} == facts


def test_text_ids():
    assert parse_config(ORIGINAL)[1] == TextInfo()
    assert parse_config(FALCON)[1] == TextInfo(None, (11,), 0, 11)
    assert parse_config(FALCON | {"eos_token_id": [11, 12], "pad_token_id": None})[1] == TextInfo(
        None, (11, 12), 0, None
    )
    with pytest.raises(ValueError, match=r"there: eos_token_id: got \['</s>'\]"):
        parse_config(FALCON | {"eos_token_id": ["</s>"]}, "there")
    with pytest.raises(ValueError, match="bos_token_id"):
        parse_config(FALCON | {"bos_token_id": [0, 1]})


def test_generation_config_wins(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(FALCON))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8]}))
    (tmp_path / "tokenizer.json").write_text("{}")
    assert read_config(tmp_path)[1] == TextInfo(str(tmp_path), (7, 8), 0, 11)


def test_absent_keys_take_the_defaults_of_their_family():
    small = {"hidden_size": 512, "num_hidden_layers": 2, "vocab_size": 96}
    config, text = parse_config(small | {"model_type": "mamba2", "num_heads": 16})
    assert (config.headdim, config.ngroups, config.d_state, config.tie_embeddings) == (64, 8, 128, False)
    assert text == TextInfo(None, (2,), 0, 1)
    config, text = parse_config(small | {"model_type": "mamba"})
    assert (config.d_inner, config.d_state, config.dt_rank, config.tie_embeddings) == (1024, 16, 32, True)
    assert text == TextInfo(None, (0,), 0, 0)
    config, _ = parse_config({"d_model": 512, "n_layer": 2, "vocab_size": 97, "ssm_cfg": {"layer": "Mamba2"}})
    assert (config.headdim, config.ngroups, config.d_state, config.tie_embeddings) == (64, 1, 128, True)
    assert (config.padded_vocab_size, config.residual_in_fp32, config.block_norm) == (104, True, "rms")


HYBRIDS = {
    "jamba": {"model_type": "jamba", "architectures": ["JambaForCausalLM"], "attn_layer_offset": 4},
    "bamba": {"model_type": "bamba", "attn_layer_indices": [9, 18, 27], "mamba_n_heads": 128},
    "zamba2": {"model_type": "zamba2", "layers_block_type": ["mamba", "hybrid"]},
    "nemotron_h": {"model_type": "nemotron_h", "hybrid_override_pattern": "M-M*-"},
    "falcon_h1": {"model_type": "falcon_h1", "mamba_d_ssm": 1536},
    "granitemoehybrid": {"model_type": "granitemoehybrid", "layer_types": ["mamba", "attention"]},
    "JambaForCausalLM": {"architectures": ["JambaForCausalLM"]},
    "NemotronHForCausalLM": {"architectures": ["NemotronHForCausalLM"]},
}


@pytest.mark.parametrize("name", HYBRIDS)
def test_hybrids_are_refused_by_name(name):
    with pytest.raises(ValueError, match=f"^there: {name} is a hybrid"):
        parse_config(MAMBA2_HF | {"model_type": None} | HYBRIDS[name], "there")


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (ORIGINAL | {"attn_layer_idx": [9, 18]}, r"attn_layer_idx: hybrid: attention layers \[9, 18\]"),
        (ORIGINAL | {"d_intermediate": 14336}, "d_intermediate: got 14336: MLP"),
        (MAMBA2_HF | {"layer_types": ["mamba", "full_attention"]}, "layer_types: hybrid: has layers full_attention"),
        (MAMBA2_HF | {"model_type": "mamba3"}, "unknown architecture: model_type 'mamba3'"),
        (MAMBA2_HF | {"model_type": None, "architectures": ["MysteryLM"]}, "unknown architecture MysteryLM"),
        ({"hidden_size": 8, "num_attention_heads": 2}, "unknown architecture"),
        (
            {"hidden_size": 8, "state_size": 4, "num_hidden_layers": 1},
            "may be mamba or falcon_mamba: add .* 'model_type'",
        ),
        ({}, "unknown architecture"),
        (ORIGINAL | {"ssm_cfg": {"layer": "Mamba3"}}, "ssm_cfg: layer: got 'Mamba3'"),
        (ORIGINAL | {"ssm_cfg": {"use_magic": True}}, "ssm_cfg: unknown use_magic"),
        (ORIGINAL | {"ssm_cfg": {"layer": "Mamba2", "d_ssm": 1024}}, "ssm_cfg: d_ssm=1024 is not d_inner=1536.*MLP"),
        (ORIGINAL | {"model_type": "mamba2"}, "model_type 'mamba2', but ssm_cfg has no layer"),
        (ORIGINAL | {"vocab_size": None}, "vocab_size: missing"),
        (ORIGINAL | {"d_model": "768"}, "d_model: got '768', wanted an integer"),
        (ORIGINAL | {"rms_norm": 1}, "rms_norm: got 1, wanted true or false"),
        (MAMBA_HF | {"architectures": ["Mamba2ForCausalLM"]}, "model_type 'mamba' contradicts"),
        (MAMBA_HF | {"hidden_act": "gelu"}, "hidden_act: got 'gelu'"),
        (MAMBA_HF | {"quantization_config": {"bits": 4}}, "quantization_config"),
        (MAMBA_HF | {"architectures": [{}]}, r"architectures: got \[\{\}\], wanted a list of names"),
        (MAMBA_HF | {"architectures": "MambaModel"}, "architectures: got 'MambaModel', wanted a list of names"),
        (MAMBA_HF | {"model_type": ["mamba"]}, r"model_type: got \['mamba'\], wanted a name"),
        (MAMBA2_HF | {"architectures": ["LlamaForCausalLM"]}, "unknown architecture LlamaForCausalLM"),
        (MAMBA2_HF | {"architectures": ["Mamba2Model", "MambaModel"]}, "model_type 'mamba2' contradicts"),
        (
            MAMBA2_HF | {"model_type": None, "architectures": ["Mamba2Model", "MambaModel"]},
            "model_type None contradicts architectures Mamba2Model, MambaModel, or these each other",
        ),
        (MAMBA2_HF | {"compression_config": {"format": "int"}}, "compression_config: quantised weights"),
        (MAMBA2_HF | {"attn_layer_indices": [3]}, r"attn_layer_indices: hybrid: attention layers \[3\]"),
        (MAMBA2_HF | {"hybrid_layer_ids": [6, 12]}, "hybrid_layer_ids: hybrid: attention layers"),
        (MAMBA2_HF | {"attn": {"layers": [1]}}, "attn: hybrid: attention layers"),
        (MAMBA2_HF | {"hybrid_override_pattern": "MM*-"}, r"hybrid_override_pattern: hybrid: has layers \*, -"),
        (MAMBA2_HF | {"layers_block_type": ["mamba", "attention"]}, "layers_block_type: hybrid: has layers attention"),
        (MAMBA2_HF | {"layers_block_type": {"3": "attention"}}, "layers_block_type: hybrid: has layers"),
        (MAMBA2_HF | {"time_step_limit": [math.inf, math.inf]}, r"dt_limit: got \(inf, inf\), wanted .* a finite low"),
        (MAMBA2_HF | {"n_groups": 7}, "ngroups=7 does not divide nheads=24"),
    ],
)
def test_refusals_name_file_key_got_and_wanted(raw, message):
    with pytest.raises(ValueError, match=f"^there: {message}"):
        parse_config(raw, "there")


def test_an_unnamed_architecture_is_recognised():
    for raw in (MAMBA2_HF, CODESTRAL, MAMBA_HF, FALCON | {"mixer_rms_eps": 1e-6}):
        stripped = {key: value for key, value in raw.items() if key not in ("model_type", "architectures")}
        assert parse_config(stripped)[0] == parse_config(raw)[0]
    by_architecture = {key: value for key, value in FALCON.items() if key != "model_type"}
    assert parse_config(by_architecture)[0] == parse_config(FALCON)[0]


def test_u37_heads_times_headdim_must_be_expand_times_hidden():
    raw = MAMBA2_HF | {"hidden_size": 512, "expand": 2, "num_heads": 8, "head_dim": 64}
    with pytest.raises(ValueError, match=r"num_heads 8 \* head_dim 64 = 512 is not expand 2 \* hidden_size 512 = 1024"):
        parse_config(raw)


def test_u38_a_direct_config_may_have_heads_that_are_not_expand_times_hidden():
    config = MambaConfig(
        layer="mamba2", vocab_size=128, d_model=2688, n_layer=1, d_inner=64 * 64, d_state=128, headdim=64, ngroups=8
    )
    assert (config.d_inner, config.conv_channels) == (4096, 6144)


def test_u39_a_toy_config_says_which_value_to_change():
    raw = ORIGINAL | {"d_model": 16, "ssm_cfg": {"layer": "Mamba2"}}
    with pytest.raises(ValueError, match=r"there: d_inner=32 is not a multiple of headdim=64: set headdim"):
        parse_config(raw, "there")
    assert parse_config(raw | {"ssm_cfg": {"layer": "Mamba2", "headdim": 8}})[0].nheads == 4


def test_u40_only_time_step_limit_clamps():
    bounds = {"time_step_min": 0.001, "time_step_max": 0.1, "time_step_floor": 1e-4}
    assert parse_config(MAMBA2_HF | bounds)[0].dt_limit == (0.0, math.inf)
    assert parse_config(MAMBA2_HF | bounds | {"time_step_limit": [0.01, 0.2]})[0].dt_limit == (0.01, 0.2)
    ssm = {"layer": "Mamba2", "dt_min": 0.001, "dt_max": 0.1, "dt_limit": [0.0, 0.5]}
    assert parse_config(ORIGINAL | {"ssm_cfg": ssm})[0].dt_limit == (0.0, 0.5)


@pytest.mark.parametrize(
    "value",
    [
        [0.0, math.inf],
        (0.0, math.inf),
        [0, "inf"],
        ["0.0", "Infinity"],
        [None, None],
        [0.0, None],
        [0.0, "null"],
        [0.0, {"__float__": "Infinity"}],
        [{"__float__": "-Infinity"}, {"__float__": "Infinity"}],
        "(0.0, inf)",
        "[0.0, Infinity]",
        None,
        json.loads("[0.0, Infinity]"),
        json.loads("[0.0, 1e999]"),
    ],
)
def test_u40_all_spellings_of_no_limit(value):
    assert parse_limit(value) == (0.0, math.inf)
    assert parse_config(MAMBA2_HF | {"time_step_limit": value})[0].dt_limit == (0.0, math.inf)


def test_u40_an_absent_limit_is_none():
    assert (
        parse_config({key: value for key, value in MAMBA2_HF.items() if key != "time_step_limit"})[0].dt_limit[1]
        == math.inf
    )


@pytest.mark.parametrize(
    "value", [[0.0], "inf", [0.0, "soon"], [0.0, True], [math.nan, 1.0], [0.0, 10**400], 3.0, {"low": 0}, [0.0, [1.0]]]
)
def test_u40_limits_that_are_no_two_numbers(value):
    with pytest.raises(ValueError, match="dt_limit: got"):
        parse_limit(value)


def test_u40_limits_in_the_wrong_order():
    with pytest.raises(ValueError, match="dt_limit"):
        parse_config(MAMBA2_HF | {"time_step_limit": [0.5, 0.1]})


def test_u55_an_original_config_is_recognised_without_model_type():
    raw = ORIGINAL | {"d_model": 2560, "n_layer": 64}
    config, _ = parse_config(raw)
    assert (config.layer, config.d_model, config.n_layer, config.d_inner) == ("mamba1", 2560, 64, 5120)


def test_u56_unknown_keys_are_ignored():
    extra = {"_name_or_path": "x", "torch_dtype": "bfloat16", "foo": {"bar": 1}}
    for raw in (MAMBA_HF, MAMBA2_HF, FALCON, ORIGINAL, PARAMS_JSON):
        assert parse_config(raw | extra) == parse_config(raw)


def test_u60_codestral_and_its_params_json_are_one_architecture():
    published, _ = parse_config(CODESTRAL)
    translated, _ = parse_config(PARAMS_JSON)
    assert published == translated
    assert published.in_proj_width == 18560


def test_u60_a_params_json_of_a_transformer_is_refused():
    raw = {"dim": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 8, "head_dim": 128, "vocab_size": 32000}
    with pytest.raises(ValueError, match="Mistral's format, but not of a Mamba"):
        parse_config(raw)


def test_layernorm_blocks_and_mixer_switches_of_the_original_layout():
    ssm = {
        "layer": "Mamba2",
        "rmsnorm": False,
        "norm_before_gate": True,
        "D_has_hdim": True,
        "bias": True,
        "conv_bias": False,
    }
    config, _ = parse_config(ORIGINAL | {"rms_norm": False, "residual_in_fp32": False, "ssm_cfg": ssm})
    got = (config.block_norm, config.gated_norm, config.norm_before_gate, config.D_has_hdim)
    assert got == ("layer", False, True, True)
    assert (config.proj_bias, config.conv_bias, config.residual_in_fp32) == (True, False, False)


def test_a_resized_vocabulary_overrides_what_was_unpadded():
    saved = MAMBA_HF | {"unpadded_vocab_size": 50277}
    assert parse_config(saved)[0].vocab_size == 50277
    assert parse_config(saved | {"vocab_size": 50300})[0].vocab_size == 50300


def test_folders_without_a_usable_config(tmp_path):
    (tmp_path / "weights.txt").write_text("x")
    with pytest.raises(ValueError, match=r"no config.json or params.json; found weights.txt"):
        read_config(tmp_path)
    for text in ("{", "[1]", "\xff", "[" * 100_000):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ValueError, match=r"config\.json: "):
            read_config(tmp_path)


def test_lists_of_layers_that_are_all_mamba_are_taken():
    all_mamba = {"hybrid_override_pattern": "MMMM", "layers_block_type": ["mamba"] * 4, "attn_layer_indices": []}
    assert parse_config(MAMBA2_HF | all_mamba) == parse_config(MAMBA2_HF)


def test_keys_given_twice_are_an_error(tmp_path):
    (tmp_path / "config.json").write_text('{"d_model": 8, "n_layer": 1, "ssm_cfg": {"expand": 2, "expand": 4}}')
    with pytest.raises(ValueError, match=r"config\.json: not valid JSON: keys given twice: expand"):
        read_config(tmp_path)


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 300),
    st.floats(),
    st.text(max_size=4),
    st.lists(st.integers(0, 3), max_size=2),
    st.dictionaries(st.text(max_size=2), st.integers(), max_size=1),
    st.just(10**400),
)
KEYS = sorted(
    {
        *(*ORIGINAL, *MAMBA2_HF, *FALCON, *PARAMS_JSON, "layer_types", "layers_block_type", "d_intermediate"),
        *("mixer_rms_eps", "quantization_config", "compression_config", "hybrid_override_pattern", "hidden_act"),
    }
)


NEST = functools.reduce(lambda inner, _: [inner], range(100_000), [])
ODD = [True, -1, 0, 1.5, math.nan, math.inf, -math.inf, 10**400, 10**5000, 2**63, "", "x", "\ud800", b"x", (), [], {}]
ODD += [[None], [[]], [{}], {"a": {}}, [1] * 1000, {"__float__": []}, ["Infinity", {"__float__": "x"}], NEST, object()]


@pytest.mark.parametrize("base", [ORIGINAL, MAMBA_HF, MAMBA2_HF, FALCON, PARAMS_JSON])
def test_a_value_of_any_type_is_taken_or_refused_by_name(base):
    ssm = {"layer": "Mamba2"} if base is ORIGINAL else {}
    places = [(key, value) for key in {*KEYS, *_ATTENTION_LAYERS, "time_step_limit"} for value in ODD]
    cases = [(key, base | {key: value}) for key, value in places]
    cases += [(key, base | {"ssm_cfg": ssm | {key: value}}) for key in _MAMBA2_SSM_KEYS for value in ODD]
    problems = {}
    for key, raw in cases:
        try:
            config, _ = parse_config(raw, "there")
        except ValueError as error:
            problems[str(error)] = key
        else:
            assert math.isfinite(config.norm_eps + config.dt_limit[0]), key
            assert config.d_inner >= 1, key
    for problem, key in problems.items():
        assert problem.startswith("there: "), (key, problem)
        assert len(problem) < 1500, (key, problem)


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from([ORIGINAL, MAMBA_HF, MAMBA2_HF, FALCON, PARAMS_JSON]),
    st.dictionaries(st.sampled_from(KEYS), VALUES),
)
def test_any_config_parses_or_raises_value_error(base, changes):
    try:
        config, _ = parse_config(base | changes)
    except ValueError:
        return
    assert config.d_inner >= 1


def test_an_id_beyond_the_embedding_is_named_with_its_file(tmp_path):
    with pytest.raises(ValueError, match=r"there: bos_token_id: got 99999999, wanted token ids from 0 to \d+"):
        parse_config(FALCON | {"bos_token_id": 99999999}, "there")
    assert parse_config(FALCON | {"pad_token_id": 99999999})[1].pad_token_id == 99999999
    (tmp_path / "config.json").write_text(json.dumps(FALCON))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 99999999]}))
    with pytest.raises(ValueError, match=r"generation_config.json: eos_token_id: got \[0, 99999999\]"):
        read_config(tmp_path)
