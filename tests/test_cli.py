import io
import json
import math
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

import mamba_jax
from mamba_jax import cli, text
from tests import small_tokenizers
from tests.tiny import tiny_params

ROOT = Path(__file__).parents[1]
PROMPT = "It was a dark night"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Folder of a tiny random model with a tokenizer beside its weights."""
    folder = tmp_path_factory.mktemp("models")
    small_tokenizers.byte_level().save_pretrained(folder / "tokenizer")
    info = mamba_jax.TextInfo(tokenizer=str(folder / "tokenizer"), eos_token_ids=(0,), bos_token_id=0)
    mamba_jax.save(tiny_params("mamba2", vocab_size=320, text=info), folder / "tiny")
    return str(folder / "tiny")


@pytest.fixture(scope="module")
def bare_model(tmp_path_factory):
    """The same without a tokenizer."""
    folder = tmp_path_factory.mktemp("bare") / "tiny"
    mamba_jax.save(tiny_params("mamba2", vocab_size=320), folder)
    return str(folder)


@pytest.fixture(scope="module")
def params(model):
    return mamba_jax.load(model)


@pytest.fixture(scope="module", autouse=True)
def cache_folder(tmp_path_factory):
    """Keep compiled programs of these tests away from the user's, and leave JAX as it was."""
    names = ["dir", "min_compile_time_secs", "min_entry_size_bytes", "enable_xla_caches"]
    names = ["jax_compilation_cache_dir", *(f"jax_persistent_cache_{name}" for name in names[1:])]
    before = {name: getattr(jax.config, name) for name in names}
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MAMBA_JAX_CACHE", str(folder))
        yield folder
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.fixture
def run(capsys, monkeypatch):
    """Run the command line in this process: exit code, stdout, stderr."""

    def call(*args, stdin=None):
        if stdin is not None:
            monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        with pytest.raises(SystemExit) as end:
            cli.main([str(arg) for arg in args])
        out, err = capsys.readouterr()
        return end.value.code or 0, out, err

    return call


def strict_json(out):
    """The one JSON object that `out` is, in strict JSON."""

    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    assert out.endswith("}\n")
    assert out.count("\n") == 1
    return json.loads(out, parse_constant=refuse)


# generate


def test_generate_prints_the_continuation(run, model, params):
    want = mamba_jax.generate(params, PROMPT, max_new_tokens=12)
    assert want.text
    for extra in ([], ["--no-stream"]):
        code, out, err = run("generate", PROMPT, "--model", model, "--max-new-tokens", 12, *extra)
        assert (code, out, err) == (0, want.text + "\n", "")


def test_generate_json_has_the_fields_of_generation(run, model, params):
    want = mamba_jax.generate(params, PROMPT, max_new_tokens=5, logprobs=True)
    code, out, _ = run("generate", PROMPT, "-m", model, "--max-new-tokens", 5, "--json")
    got = strict_json(out)
    assert code == 0
    assert list(got) == ["tokens", "text", "logprobs", "finish_reason", "timings", "decoded_by", "read_by"]
    assert got["tokens"] == want.tokens
    assert got["text"] == want.text
    assert (got["decoded_by"], set(got["read_by"])) == ("xla", {"xla"})
    assert got["finish_reason"] == want.finish_reason
    np.testing.assert_allclose(got["logprobs"], want.logprobs, rtol=1e-6)
    assert all(value >= 0 for value in got["timings"].values())


@pytest.mark.parametrize("args", [[], ["-"]])
def test_prompt_from_stdin_loses_one_newline(run, model, params, args):
    want = mamba_jax.generate(params, PROMPT + "\n", max_new_tokens=5).text
    assert run("generate", *args, "-m", model, "--max-new-tokens", 5, stdin=f"{PROMPT}\n\n".encode())[1] == want + "\n"
    plain = mamba_jax.generate(params, PROMPT, max_new_tokens=5).text
    assert run("generate", *args, "-m", model, "--max-new-tokens", 5, stdin=PROMPT.encode())[1] == plain + "\n"


def test_sampling_options_reach_the_model(run, model, params):
    options = {
        "max_new_tokens": 12,
        "temperature": 200.0,  # the logits are large
        "top_k": 50,
        "top_p": 0.95,
        "min_p": 0.01,
        "repetition_penalty": 1.2,
        "seed": 7,
    }
    want = mamba_jax.generate(params, PROMPT, **options)
    args = [item for name, value in options.items() for item in ("--" + name.replace("_", "-"), value)]
    assert run("generate", PROMPT, "-m", model, *args)[1] == want.text + "\n"
    assert want.tokens != mamba_jax.generate(params, PROMPT, **options | {"seed": 8}).tokens


def test_stop_strings(run, model, params):
    whole = mamba_jax.generate(params, PROMPT, max_new_tokens=12).text
    stop = whole[4:6]
    args = ["generate", PROMPT, "-m", model, "--max-new-tokens", 12, "--stop", "never there", "--stop", stop]
    assert run(*args)[1] == whole[: whole.index(stop)] + "\n"
    got = strict_json(run(*args, "--json")[1])
    assert got["text"] == whole[: whole.index(stop)]
    assert got["finish_reason"] == "stop"


def test_no_token_wanted(run, model):
    assert run("generate", PROMPT, "-m", model, "--max-new-tokens", 0)[:2] == (0, "\n")
    got = strict_json(run("generate", PROMPT, "-m", model, "--max-new-tokens", 0, "--json")[1])
    assert (got["tokens"], got["logprobs"], got["text"], got["finish_reason"]) == ([], [], "", "length")


def test_tokenizer_option_serves_weights_without_one(run, model, bare_model, tmp_path):
    code, out, err = run("generate", PROMPT, "-m", bare_model, "--max-new-tokens", 5)
    assert (code, out) == (1, "")
    assert "tokenizer" in err
    want = run("generate", PROMPT, "-m", model, "--max-new-tokens", 5)[1]
    args = ["--max-new-tokens", 5, "--tokenizer", model]
    assert run("generate", PROMPT, "-m", bare_model, *args) == (0, want, "")


def test_dtype_option(run, model):
    want = mamba_jax.generate(mamba_jax.load(model, dtype="bfloat16"), PROMPT, max_new_tokens=5, logprobs=True)
    args = ["--max-new-tokens", 5, "--dtype", "bfloat16", "--json"]
    got = strict_json(run("generate", PROMPT, "-m", model, *args)[1])
    np.testing.assert_allclose(got["logprobs"], want.logprobs, rtol=1e-6)


def test_without_a_model_the_embedded_one_is_used(run, model, monkeypatch):
    monkeypatch.setattr(mamba_jax, "default_model", lambda: Path(model), raising=False)
    args = ["generate", PROMPT, "--max-new-tokens", 5]
    assert run(*args) == run(*args, "--model", model)


def test_programs_are_kept_for_the_next_process(run, model, cache_folder):
    jax.clear_caches()
    mamba_jax.programs.TABLE.__init__()
    run("generate", PROMPT, "-m", model, "--max-new-tokens", 3)
    stored = list(cache_folder.iterdir())
    assert any("decode" in file.name for file in stored)
    assert any("prefill" in file.name for file in stored)


def test_no_place_for_the_cache_is_no_error(run, model, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("MAMBA_JAX_CACHE", str(tmp_path / "file"))
    code, out, err = run("generate", PROMPT, "-m", model, "--max-new-tokens", 3)
    assert (code, bool(out.strip())) == (0, True)
    assert err.startswith("no compilation cache: ")


def test_progress_at_a_terminal_goes_to_stderr(run, model, params, monkeypatch):
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(mamba_jax.programs.TABLE, "_programs", {})
    want = mamba_jax.generate(params, PROMPT, max_new_tokens=70).text
    for extra in ([], ["--no-stream"]):
        assert run("generate", PROMPT, "-m", model, "--max-new-tokens", 70, *extra)[1] == want + "\n"
    for label in ("Loading", "Compiling", "Generating"):
        assert label in terminal.getvalue()


# score


def test_score_json(run, model, params):
    want = mamba_jax.score(params, PROMPT)
    code, out, err = run("score", PROMPT, "-m", model, "--json")
    got = strict_json(out)
    assert (code, err) == (0, "")
    assert got["tokens"] == want.tokens
    assert got["logprobs"][0] is None
    np.testing.assert_allclose(got["logprobs"][1:], want.logprobs[1:], rtol=1e-6)
    assert "".join(got["pieces"]) == PROMPT
    assert got["total"] == pytest.approx(sum(got["logprobs"][1:]))
    assert got["perplexity"] == pytest.approx(math.exp(-got["total"] / (len(got["tokens"]) - 1)))


def test_score_reads_argument_file_and_stdin_alike(run, model, tmp_path):
    words = "naïve 🙂\n"
    (tmp_path / "words.txt").write_text(words, encoding="utf-8")
    argument = run("score", words, "-m", model)
    assert argument[0] == 0
    assert run("score", "--file", tmp_path / "words.txt", "-m", model) == argument
    assert run("score", "-m", model, stdin=words.encode()) == argument
    assert run("score", "-", "-m", model, stdin=words.encode()) == argument


def test_score_table(run, model, params):
    want = mamba_jax.score(params, PROMPT)
    lines = run("score", PROMPT, "-m", model)[1].splitlines()
    rows = [line.split(maxsplit=2) for line in lines[:-1]]
    assert [int(row[1]) for row in rows] == want.tokens
    assert "".join(json.loads(row[2]) for row in rows) == PROMPT
    assert rows[0][0] == "-"
    np.testing.assert_allclose([float(row[0]) for row in rows[1:]], want.logprobs[1:], atol=1e-4)
    assert lines[-1].startswith(f"{len(want.tokens) - 1} tokens scored")


def test_score_of_one_token_has_no_perplexity(run, model):
    got = strict_json(run("score", "a", "-m", model, "--json")[1])
    assert (got["logprobs"], got["total"], got["perplexity"]) == ([None], 0.0, None)


# info and convert


def test_info(run, model, params):
    code, out, err = run("info", "-m", model, "--json")
    got = strict_json(out)
    leaves = jax.tree.leaves(params)
    cache = jax.tree.leaves(mamba_jax.init_cache(params.config, 1, params.dtype))
    assert (code, err) == (0, "")
    assert got["model"] == model
    assert got["parameters"] == sum(leaf.size for leaf in leaves)
    assert got["bytes"] == sum(leaf.nbytes for leaf in leaves)
    assert got["cache_bytes_per_row"] == sum(leaf.nbytes for leaf in cache)
    assert got["dtype"] == "float32"
    assert got["tokenizer"] == model
    assert got["eos_token_ids"] == [0]
    assert got["architecture"]["d_model"] == params.config.d_model
    assert got["architecture"]["padded_vocab_size"] == params.config.padded_vocab_size
    assert got["architecture"]["dt_limit"] == [0.0, None]
    shown = run("info", "-m", model)[1]
    assert all(name in shown for name in (*got["architecture"], "parameters", "cache_bytes_per_row"))
    assert f"{got['parameters']:,}" in shown


@pytest.mark.parametrize("layout", ["hf", "original"])
def test_convert(run, model, params, tmp_path, layout):
    target = tmp_path / "copy"
    code, out, err = run("convert", model, target, "--layout", layout)
    assert (code, out) == (0, "")
    assert str(target) in err
    copy = mamba_jax.load(target)
    jax.tree.map(np.testing.assert_array_equal, copy.replace(config=params.config, text=params.text), params)
    loaded = text.load_tokenizer(copy.text.tokenizer)
    assert text.encode(loaded, PROMPT) == text.encode(small_tokenizers.byte_level(), PROMPT)
    code, _, err = run("convert", model, target, "--layout", layout)
    assert code == 1
    assert str(target) in err


def test_convert_dtype(run, model, tmp_path):
    assert run("convert", model, tmp_path / "half", "--layout", "hf", "--dtype", "bfloat16")[0] == 0
    assert strict_json(run("info", "-m", tmp_path / "half", "--json")[1])["dtype"] == "bfloat16"


# What is wrong


def test_unknown_model_says_what_was_tried(run, tmp_path):
    code, out, err = run("generate", PROMPT, "--model", tmp_path / "absent")
    assert (code, out) == (1, "")
    assert err.startswith("error: ")
    assert str(tmp_path / "absent") in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("option", "value"),
    [("top-p", "0"), ("repetition-penalty", "0"), ("temperature", "inf"), ("temperature", "nan"), ("seed", 2**64)],
)
def test_a_value_that_the_library_refuses_is_wrong_use_before_any_model_is_read(run, option, value):
    code, out, err = run("generate", PROMPT, "-m", "/no/such/folder", f"--{option}", value)
    assert (code, out) == (2, "")
    assert f"--{option}" in err


def test_what_does_nothing_at_temperature_0_is_said(run, model):
    args = ["generate", PROMPT, "-m", model, "--max-new-tokens", 3]
    code, out, err = run(*args, "--top-k", 5, "--seed", 0)
    assert (code, out) == run(*args)[:2]
    assert err == "at --temperature 0 the likeliest token is taken: --top-k, --seed changes nothing\n"
    assert run(*args, "--top-k", 5, "--seed", 0, "--temperature", 1)[2] == ""


@pytest.mark.parametrize(("command", "data"), [("generate", b""), ("generate", b"\n"), ("score", b"")])
def test_an_empty_stdin_is_an_error(run, model, command, data):
    code, out, err = run(command, "-m", model, stdin=data)
    assert (code, out) == (1, "")
    assert "text, wanted" in err


def test_an_empty_argument_begins_with_bos_but_has_no_score(run, model):
    assert run("generate", "", "-m", model, "--max-new-tokens", 3)[0] == 0
    assert run("score", "", "-m", model)[0] == 1


@pytest.mark.parametrize(("as_json", "shown"), [(True, '"perplexity": null}'), (False, "perplexity inf")])
def test_a_perplexity_beyond_the_floats(capsys, as_json, shown):
    tokenizer = small_tokenizers.byte_level()
    cli._print_score(mamba_jax.Score(tokens=[65, 66], logprobs=[None, -1e6]), tokenizer, as_json)
    assert shown in capsys.readouterr().out


@pytest.mark.parametrize(
    "args",
    [
        ["generate", PROMPT, "--temperature", "-1"],
        ["generate", PROMPT, "--top-k", "0"],
        ["generate", PROMPT, "--dtype", "int8"],
        ["generate", PROMPT, "--no-such-option"],
        ["generate", PROMPT, "another"],
        ["convert", "a", "b"],
        ["convert", "a", "b", "--layout", "gguf"],
        ["score", "a", "--file", __file__],
        ["score", "--file", "/no/such/file"],
        ["no-such-command"],
        ["generate", PROMPT, "--policy", "bogus"],
        ["generate", PROMPT, "--policy", "static:0"],
        ["generate", PROMPT, "--policy", "table:/no/such/file"],
        ["generate", PROMPT, "--policy", "[/bold]"],
        ["generate", PROMPT, "--stop", "ok", "--stop", ""],
        ["generate", PROMPT, "--stop", "\udcff"],
        ["generate", "\udcff"],
        ["generate", PROMPT, "--model", ""],
        ["generate", PROMPT, "--tokenizer", ""],
        ["generate", PROMPT, "--max-new-tokens", "-1"],
        ["score", "\udcff"],
        ["score", "a", "--model", ""],
        ["perplexity", "--text", __file__, "--window", "256", "--stride", "512"],
        ["perplexity", "--text", __file__, "--window", "1"],
        ["perplexity", "--text", __file__, "--stride", "0"],
        ["perplexity", "--text", __file__, "--chunk-size", "0"],
        ["perplexity", "--text", __file__, "--chunk-size", "9" * 5000],
        ["perplexity", "--text", __file__, "--out", ""],
        ["perplexity", "--text", "/no/such/file"],
        ["parity", "--against", "bogus"],
        ["parity", "--against", ""],
        ["longbench"],
        ["longbench", "--data", "/no/such/folder"],
        ["longbench", "--data", str(ROOT), "--shard", "3/2"],
        ["longbench", "--data", str(ROOT), "--shard", "0/2"],
        ["longbench", "--data", str(ROOT), "--max-length", "1"],
        ["longbench", "--data", str(ROOT), "--policy", "bogus"],
        ["longbench", "--data", str(ROOT), "--out", ""],
        ["longbench", "--merge", "/no/such/folder"],
        ["info", "--model", ""],
        ["convert", "", "b", "--layout", "hf"],
        ["convert", "a", "", "--layout", "hf"],
        ["plan", "--length", "0"],
        ["plan", "--length", "8", "--batch", "0"],
        ["plan", "--length", "8", "--policy", "bogus"],
        ["warm", "--batch", "0"],
        ["warm", "--batch", "1,,2"],
        ["warm", "--lengths", "0:8"],
        ["warm", "--lengths", "8:1"],
        ["warm", "--lengths", "8"],
        ["warm", "--policy", "measured", "--policy", "bogus"],
        ["warm", "--cache-dir", ""],
        ["calibrate", "--batch", "0"],
        ["calibrate", "--rounds", "0"],
        ["calibrate", "--folder", ""],
        ["layers", __file__, "--policy", "static:64"],
        ["layers", __file__, "--policy", "bogus"],
        ["bench", "no-such-benchmark"],
    ],
    ids=lambda args: ascii(" ".join(args))[1:61],
)
def test_wrong_use_is_2_before_any_model_is_read(run, args, monkeypatch):
    monkeypatch.setattr(mamba_jax, "load", lambda *_, **__: pytest.fail("read a model"))
    code, out, err = run(*args)
    assert (code, out) == (2, "")
    assert "Usage" in err


@pytest.mark.parametrize(
    ("args", "option"),
    [
        (["plan", "--length", 2**26 + 1], "--length"),
        (["plan", "--length", 10**30], "--length"),
        (["plan", "--length", 1, "--batch", 2**16 + 1], "--batch"),
        (["warm", "--platform", "tpu", "--topology", "zzz"], "--topology"),
        (["warm", "--platform", "tpu", "--topology", "v6e:one"], "--topology"),
        (["warm", "--platform", "tpu", "--dry-run"], "--dry-run"),
        (["warm", "--dry-run", "--lengths", "1:1000000000"], "--lengths"),
        (["warm", "--dry-run", "--lengths", "1:67108864", "--policy", "length", "--max-new-tokens", 0], "--lengths"),
        (["warm", "--lengths", "1:1000000000"], "--lengths"),
        (["warm", "--lengths", "1:" + "9" * 5000], "--lengths"),
        (["warm", "--dry-run", "--batch", "1,1000000000"], "--batch"),
        (["warm", "--batch", "0"], "--batch"),
        (["warm", "--max-new-tokens", 10**9], "--max-new-tokens"),
        (["calibrate", "--batch", "1000000000"], "--batch"),
        (["calibrate", "--rounds", 1001], "--rounds"),
        (["warm", "--cache-dir", __file__], "--cache-dir"),
        (["warm", "--cache-dir", f"{__file__}/below"], "--cache-dir"),
        (["warm", "--cache-dir", "~nouser/x"], "--cache-dir"),
        (["calibrate", "--folder", __file__], "--folder"),
    ],
    ids=lambda args: " ".join(map(str, args))[:60],
)
def test_what_is_out_of_range_or_no_folder_is_wrong_use_of_the_option(run, model, args, option):
    code, out, err = run(*args, "-m", model)
    assert (code, out) == (2, "")
    assert f"Invalid value for '{option}'" in err or f"Invalid value for {option}" in err
    assert "Traceback" not in err


@pytest.mark.parametrize("command", ["warm --cache-dir", "calibrate --folder"])
def test_a_folder_that_cannot_be_written_is_wrong_use(run, model, tmp_path, monkeypatch, command):
    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied", str(tmp_path))

    monkeypatch.setattr("tempfile.NamedTemporaryFile", refuse)  # root may write anywhere
    code, out, err = run(*command.split(), tmp_path, "-m", model)
    assert (code, out) == (2, "")
    assert command.split()[1] in err
    assert "Permission denied" in err


def test_plan_shows_equal_segments_in_one_line(run, model):
    code, out, _ = run("plan", "--length", 2**26, "-m", model)
    assert code == 0
    assert "0 to 32767" in out
    assert "67,108,864 positions" in out
    assert out.count("\n") < 10


def test_calibrate_says_where_its_table_is(run, model, tmp_path, monkeypatch):
    monkeypatch.setitem(mamba_jax.calibrate.__kwdefaults__, "lengths", (16,))
    monkeypatch.setitem(mamba_jax.calibrate.__kwdefaults__, "chunk_sizes", (16,))
    code, out, err = run("calibrate", "-m", model, "--rounds", 1, "--folder", tmp_path / "tables", "--json")
    assert code == 0
    assert strict_json(out)["calibrations"]
    (table,) = (tmp_path / "tables").glob("*.json")
    assert f"kept in {table}; deleting it undoes this" in err


def test_what_the_arguments_alone_do_not_tell_is_1(run, model, bare_model, tmp_path):
    (tmp_path / "empty.txt").touch()
    (tmp_path / "bytes.txt").write_bytes(b"\xff")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text("[]")
    (tmp_path / "not.safetensors").write_bytes(b"x" * 100)
    for args, message in [
        (["info", "-m", tmp_path / "absent"], "no such folder"),
        (["info", "-m", tmp_path], "no config.json"),
        (["generate", PROMPT, "-m", bare_model], "tokenizer"),
        (["generate", PROMPT, "-m", model, "--tokenizer", tmp_path], "tokenizer"),
        (["generate", PROMPT, "-m", model, "--policy", "layers:64"], "layers"),
        (["perplexity", "--text", tmp_path / "empty.txt", "-m", model], "text: got 0 tokens, wanted"),
        (["perplexity", "--text", tmp_path / "bytes.txt", "-m", model], "no UTF-8 text"),
        (["longbench", "--data", tmp_path, "-m", model, "--out", tmp_path / "out"], "dataset2prompt.json"),
        (["longbench", "--merge", tmp_path / "run", "--out", tmp_path / "out"], "run.json: got []"),
        (["longbench", "--merge", model, "--out", tmp_path / "out"], "holds no run"),
        (["perplexity", "--text", __file__, "-m", model, "--out", tmp_path / "run"], "run.json: got []"),
        (["layers", tmp_path / "empty.txt", "-m", model], "got an empty text"),
        (["parity", "--against", "transformers", "--text", tmp_path / "empty.txt", "-m", model], "text: got ''"),
        (["parity", "--against", tmp_path / "not.safetensors", "-m", model], "not safetensors"),
        (["convert", model, model, "--layout", "hf"], "not overwritten"),
    ]:
        code, out, err = run(*args)
        assert (code, out) == (1, ""), args
        assert err.startswith("error: "), args
        assert message in err, args


def test_no_prompt_at_a_terminal(run, monkeypatch):
    stdin = io.TextIOWrapper(io.BytesIO())
    monkeypatch.setattr(stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys, "stdin", stdin)
    code, out, err = run("generate")
    assert (code, out) == (2, "")
    assert "stdin" in err


def test_stdin_that_is_no_text(run, model):
    code, _, err = run("generate", "-m", model, stdin=b"\xff\xfe")
    assert code == 1
    assert "stdin: got bytes that are no UTF-8 text" in err


def test_stdout_that_cannot_show_a_character(model, tmp_path, monkeypatch):
    folder = str(tmp_path / "é\udcff")
    shutil.copytree(model, folder)
    for args, shown in [(["score", "é🙂!", "-m", model], b'"?'), (["info", "-m", folder], b"??")]:
        out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
        monkeypatch.setattr(sys, "stdout", out)
        with pytest.raises(SystemExit) as end:
            cli.main(args)
        out.flush()
        assert end.value.code in (None, 0)
        assert shown in out.buffer.getvalue()


# As a process


def process(*args, **options):
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "-m", "mamba_jax.cli", *args],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def test_version_and_light_help():
    with process("--version") as version:
        out, err = version.communicate(timeout=120)
    assert (version.returncode, err) == (0, "")
    assert out == f"mamba-jax {mamba_jax.__version__} (jax {jax.__version__})\n"
    code = (
        "import sys; from mamba_jax import cli\n"
        "try: cli.main(['generate', '--help'])\n"
        "finally: assert not {'transformers', 'torch', 'huggingface_hub'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def test_a_reader_that_leaves(model):
    """`mamba-jax generate ... | head -c 1` ends without a traceback."""
    read, write = os.pipe()
    os.close(read)
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "mamba_jax.cli", "generate", PROMPT, "-m", model, "--max-new-tokens", "8"],
        env=environment,
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        timeout=240,
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (1, "")


def test_a_closed_stderr_is_no_error(model):
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    for arguments in ("generate x --max-new-tokens 2", "score abc", "info"):
        shell = f"{sys.executable} -m mamba_jax.cli {arguments} -m {model} 2>&-"
        done = subprocess.run(
            ["sh", "-c", shell], env=environment, stdout=subprocess.PIPE, text=True, check=False, timeout=240
        )
        assert (done.returncode, bool(done.stdout)) == (0, True)


def test_a_closed_stdout_is_an_error():
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    shell = f"{sys.executable} -m mamba_jax.cli info >&-"
    done = subprocess.run(["sh", "-c", shell], env=environment, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "error: stdout is closed\n")


def test_interrupt(model):
    with process("generate", PROMPT, "-m", model, "--max-new-tokens", "60000000") as running:
        first = running.stdout.read(1)  # it streams
        running.send_signal(signal.SIGINT)
        _, err = running.communicate(timeout=240)
    assert first
    assert running.returncode == 130
    assert "Traceback" not in err
