"""Comparisons with other implementations: what is within, what is not, and what is said."""

import json

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file
from typer.testing import CliRunner

import mamba_jax
from mamba_jax import cli, forward, generate
from mamba_jax.parity import Difference, Outputs, against, compare, recorded
from mamba_jax.programs import BLOCK, Spec, lower_program
from tests.tiny import tiny_params

IDS = np.random.default_rng(0).integers(0, 101, 60).astype(np.int32)


def own_outputs(params, **changes):
    logits, hidden = forward(params, IDS[None], output_hidden_states=True)
    logits, hidden = np.asarray(logits[0], np.float64), np.asarray(hidden[-1][0], np.float64)
    tokens = generate(params, IDS[:9].tolist(), max_new_tokens=6, stop_token_ids=[]).tokens
    plain = {"hidden": hidden, "logits": logits[:, :50].copy(), "argmax": logits.argmax(-1)}
    return Outputs(against="itself", ids=IDS, greedy=[(IDS[:9].tolist(), tokens)], **plain | changes)


@pytest.fixture(scope="module", params=["mamba1", "mamba2"])
def params(request):
    return tiny_params(request.param)


def test_differences_are_absolute_and_relative():
    found = Difference.of([1.0, -4.0], [1.5, -4.0], rtol=0.1, atol=0.3)
    assert (found.max_abs, found.max_rel, found.within) == (0.5, 0.125, False)
    assert Difference.of([1.0], [1.5], rtol=0.1, atol=0.36).within
    assert not Difference.of([np.nan], [1.0], rtol=1, atol=1).within
    with pytest.raises(ValueError, match="wanted ours"):
        Difference.of([1.0], [1.0, 2.0], rtol=1, atol=1)


def test_the_same_model_is_within(params):
    found = compare(params, own_outputs(params))
    assert found.verdict is True
    assert found.hidden.max_abs == found.logits.max_abs == 0
    assert (found.argmax_equal, found.greedy_equal, found.greedy_first_difference) == (1.0, (1, 1), None)


@pytest.mark.parametrize("part", ["hidden", "logits", "greedy", "perplexity"])
def test_each_part_can_fail_the_verdict(params, part):
    theirs, text = own_outputs(params), None
    if part == "hidden":
        theirs.hidden[3, 2] += 1.0
    elif part == "logits":
        theirs.logits[59, 1] += 3e-4
    elif part == "greedy":
        theirs.greedy[0][1][4] += 1
    else:
        text = IDS.tolist()
        ours = mamba_jax.perplexity(params, text).perplexity
        assert compare(params, own_outputs(params, perplexity=ours + 4e-4), text).verdict is True
        theirs = own_outputs(params, perplexity=ours + 6e-4)
    found = compare(params, theirs, text)
    assert found.verdict is False
    assert found.greedy_first_difference == (4 if part == "greedy" else None)


@pytest.mark.parametrize("setting", ["bfloat16", "tensorfloat32"])
def test_u46_float32_multiplies_at_highest_precision_whatever_jax_is_set_to(params, setting):
    with jax.default_matmul_precision(setting):
        for lowered in (
            jax.jit(forward, static_argnames="chunk_size").lower(params, IDS[None], chunk_size=16),
            lower_program(params, Spec("decode", 1, BLOCK)),
        ):
            text = lowered.as_text()
            dots = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
            assert dots
            assert all("precision = [HIGHEST, HIGHEST]" in line for line in dots), text
        found = compare(params, own_outputs(params))
    assert found.precision == "highest"
    assert compare(tiny_params("mamba2", dtype="bfloat16"), own_outputs(params)).precision.startswith("bfloat16")


def test_other_dtypes_get_no_verdict():
    params = tiny_params("mamba2", "bfloat16")
    assert compare(params, own_outputs(params)).verdict is None


def test_recorded_outputs_are_read_with_what_stands_beside_them(tmp_path, params):
    theirs = own_outputs(params)
    tensors = {"ids": IDS, "truth_hidden": theirs.hidden, "truth_logits50": theirs.logits}
    tensors |= {"last_hidden": theirs.hidden + 0.5, "logits50": theirs.logits - 0.25}
    tensors |= {"logits50_bf16": theirs.logits + 2.0}
    save_file(tensors, tmp_path / "golden.safetensors")
    (tmp_path / "greedy_fp32.json").write_text(json.dumps({"a": {"prompt": [1], "new": [2, 3]}}))
    (tmp_path / "reference.json").write_text(json.dumps({"ppl_fp32_valid": [7.5, 10], "ppl_bf16_valid": [8.5, 10]}))
    found = recorded(tmp_path / "golden.safetensors", "float32")
    assert found.their_error == (0.5, 0.25)
    assert (found.greedy, found.perplexity) == ([([1], [2, 3])], 7.5)
    np.testing.assert_array_equal(found.logits, theirs.logits)
    half = recorded(tmp_path / "golden.safetensors", "bfloat16")
    assert (half.their_error, half.greedy, half.perplexity) == ((None, 2.0), [], 8.5)


def test_a_file_without_anything_to_compare_is_named(tmp_path):
    for tensors in ({"x": IDS}, {"ids": IDS}):
        save_file(tensors, tmp_path / "empty.safetensors")
        with pytest.raises(ValueError, match=r"empty\.safetensors: got tensors"):
            recorded(tmp_path / "empty.safetensors", "float32")


def test_recorded_outputs_of_other_shapes_are_named(tmp_path):
    file = tmp_path / "golden.safetensors"
    save_file({"ids": IDS, "argmax": IDS[1:]}, file)
    with pytest.raises(ValueError, match=r"golden\.safetensors: argmax: got shape .*, wanted that of ids"):
        recorded(file, "float32")
    save_file({"ids": IDS, "argmax": IDS}, file)
    for name, value in [("greedy_fp32", [1]), ("greedy_fp32", {"a": 1}), ("reference", {"ppl_fp32_valid": 3})]:
        (tmp_path / f"{name}.json").write_text(json.dumps(value))
        with pytest.raises(ValueError, match=f"{name}.json"):
            recorded(file, "float32")
        (tmp_path / f"{name}.json").unlink()
    file.write_bytes(b"x" * 100)
    with pytest.raises(ValueError, match=r"golden\.safetensors: truncated or not safetensors"):
        recorded(file, "float32")


@pytest.mark.parametrize("kind", ["mamba1", "mamba2", "falcon"])
def test_against_transformers(kind):
    pytest.importorskip("torch", reason="needs the extra parity")
    # Without ids that only pad the embedding: transformers would choose these too.
    found = against(tiny_params(kind, vocab_size=104), "transformers")
    assert found.verdict is True, found
    assert found.greedy_equal == (4, 4)
    assert found.against.startswith("transformers ")


def test_the_command_exits_with_the_verdict(tmp_path):
    params = mamba_jax.load(mamba_jax.default_model(), dtype="float32")
    logits, hidden = forward(params, IDS[None], output_hidden_states=True)
    tensors = {"ids": IDS, "truth_hidden": np.asarray(hidden[-1][0]), "truth_logits": np.asarray(logits[0])}
    save_file(tensors, tmp_path / "good.safetensors")
    save_file(tensors | {"truth_logits": tensors["truth_logits"] + 1}, tmp_path / "bad.safetensors")
    for name, code, verdict in (("good", 0, True), ("bad", 1, False)):
        result = CliRunner().invoke(cli.app, ["parity", "--against", str(tmp_path / f"{name}.safetensors"), "--json"])
        assert result.exit_code == code, result.output
        assert json.loads(result.stdout)["verdict"] is verdict
    shown = CliRunner().invoke(cli.app, ["parity", "--against", str(tmp_path / "bad.safetensors")])
    assert "NOT within the tolerances" in shown.stdout


@pytest.mark.reference
@pytest.mark.parametrize("name", ["mamba1-12m", "mamba2-12m-hf"])
def test_the_reference_checkpoints_meet_the_papers_tolerances(reference_dir, name):
    params = mamba_jax.load(reference_dir / name, dtype="float32")
    found = against(params, str(reference_dir / name / "golden.safetensors"))
    assert found.verdict is True, found
    assert (found.argmax_equal, found.greedy_equal) == (1.0, (12, 12))
    assert found.logits.max_abs < found.their_error[1]
