"""Generation: batches against rows alone, modes, stops, limits, options, edge cases, compilations."""

import dataclasses
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mamba_jax
from mamba_jax import MambaConfig, TextInfo, forward, generate, init_cache, prefill, score, step, stream
from mamba_jax.programs import BLOCK, TABLE
from mamba_jax.scheduler.policies import Guarded, PerLayer, Static
from mamba_jax.scheduler.segments import plan_segments
from tests.small_tokenizers import byte_fallback, byte_level, words
from tests.tiny import KINDS, tiny_params

RNG = np.random.default_rng(1)
PROMPTS = [RNG.integers(0, 101, n).tolist() for n in (7, 1, 19, 2)]


def greedy(params, prompt, count):
    """Greedy tokens by the whole forward pass, one at a time."""
    ids = np.array([[*prompt, *[0] * count]])  # of one length, so that one program reads them
    for i in range(len(prompt), ids.shape[1]):
        ids[0, i] = np.argmax(forward(params, ids)[0, i - 1, : params.config.vocab_size])
    return ids[0, len(prompt) :].tolist()


@pytest.fixture(scope="module")
def params():
    return tiny_params("mamba2", n_layer=1)


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_are_those_of_the_forward_pass(kind):
    params = tiny_params(kind, n_layer=1)
    assert generate(params, PROMPTS[0], max_new_tokens=5).tokens == greedy(params, PROMPTS[0], 5)


@pytest.mark.parametrize("kind", ["mamba1", "mamba2"])
def test_u01_u75_each_row_of_a_batch_is_that_prompt_alone(kind):
    params = tiny_params(kind, n_layer=1)
    batch = generate(params, PROMPTS, max_new_tokens=20, logprobs=True)
    for prompt, row in zip(PROMPTS, batch, strict=True):
        alone = generate(params, prompt, max_new_tokens=20, logprobs=True)
        assert row.tokens == alone.tokens
        np.testing.assert_allclose(row.logprobs, alone.logprobs, atol=1e-5)


def test_u75_a_twin_changes_nothing_in_bfloat16():
    params = tiny_params("mamba2", "bfloat16", n_layer=1)
    first, second = generate(params, [PROMPTS[0], PROMPTS[0]], max_new_tokens=10, logprobs=True)
    alone = generate(params, PROMPTS[0], max_new_tokens=10, logprobs=True)
    assert first.tokens == second.tokens
    assert first.logprobs == second.logprobs
    assert first.tokens == alone.tokens
    np.testing.assert_allclose(first.logprobs, alone.logprobs, atol=0.05)


@pytest.mark.parametrize("options", [{}, {"temperature": 0.8, "top_k": 20, "repetition_penalty": 1.3, "seed": 5}])
def test_modes_agree(params, options):
    want = generate(params, PROMPTS, max_new_tokens=6, **options)
    for mode in ("host", "recompute"):
        got = generate(params, PROMPTS, max_new_tokens=6, mode=mode, **options)
        assert [row.tokens for row in got] == [row.tokens for row in want]


def test_more_tokens_than_one_block(params):
    count = BLOCK + 6
    long = generate(params, PROMPTS[0], max_new_tokens=count)
    assert len(long.tokens) == count
    assert long.tokens[:BLOCK] == generate(params, PROMPTS[0], max_new_tokens=BLOCK).tokens
    assert long.finish_reason == "length"


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("count", [0, 1])
def test_u69_no_token_and_one_token(params, batch, count):
    rows = generate(params, PROMPTS[:batch], max_new_tokens=count, return_cache=True)
    for prompt, row in zip(PROMPTS, rows, strict=False):
        assert row.tokens == greedy(params, prompt, count)
        logits, cache = prefill(params, [prompt + row.tokens])
        np.testing.assert_allclose(row.next_logits, logits[0], atol=1e-4)
        jax.tree.map(lambda got, want: np.testing.assert_allclose(got, want, atol=1e-5), row.cache, cache)


def test_u69_a_negative_limit_is_an_error(params):
    for count in (-1, 2**26 + 1, 10**30):
        with pytest.raises(ValueError, match=f"max_new_tokens: got {count}"):
            generate(params, PROMPTS[0], max_new_tokens=count)


def test_u67_rows_stop_at_their_own_stop_token_and_the_loop_with_the_last(params):
    free = generate(params, PROMPTS, max_new_tokens=200, stop_token_ids=[])
    stops = [free[0].tokens[4], free[2].tokens[6]]
    rows = generate(params, PROMPTS, max_new_tokens=200, stop_token_ids=stops, return_cache=True)
    for prompt, row, whole in zip(PROMPTS, rows, free, strict=True):
        ends = [i for i, token in enumerate(whole.tokens) if token in stops]
        count = ends[0] + 1 if ends else 200
        assert row.tokens == whole.tokens[:count]
        assert row.finish_reason == ("stop" if ends else "length")
        logits, _ = prefill(params, [prompt + row.tokens])
        np.testing.assert_allclose(row.next_logits, logits[0], atol=1e-3)  # the cache stands where the row ended


def test_u67_nothing_runs_after_every_row_has_stopped(params):
    stop = generate(params, PROMPTS[0], max_new_tokens=5, stop_token_ids=[]).tokens[4]
    calls = []
    original = mamba_jax.generate.__globals__["program"]

    def counting(kind, *args, **options):
        run = original(kind, *args, **options)
        if kind == "decode":
            return lambda *call: calls.append(kind) or run(*call)
        return run

    mamba_jax.generate.__globals__["program"] = counting
    try:
        row = generate(params, PROMPTS[0], max_new_tokens=1024, stop_token_ids=[stop])
    finally:
        mamba_jax.generate.__globals__["program"] = original
    assert len(row.tokens) <= 5
    assert len(calls) <= 2  # the block that stopped, and the one launched behind it


def test_the_checkpoint_s_eos_ids_stop_unless_turned_off(params):
    token = generate(params, PROMPTS[0], max_new_tokens=3).tokens[2]
    params = dataclasses.replace(params, text=TextInfo(eos_token_ids=(token,)))
    assert generate(params, PROMPTS[0], max_new_tokens=30).finish_reason == "stop"
    assert len(generate(params, PROMPTS[0], max_new_tokens=30, stop_token_ids=[]).tokens) == 30


def test_sampling_depends_on_the_seed_and_the_row_alone(params):
    options = {"temperature": 1.5, "max_new_tokens": 12}
    batch = generate(params, PROMPTS, seed=3, **options)
    for prompt, row in zip(PROMPTS, batch, strict=True):
        assert generate(params, prompt, seed=3, **options).tokens == row.tokens
    assert generate(params, PROMPTS[0], seed=4, **options).tokens != batch[0].tokens
    seeds = generate(params, [PROMPTS[0]] * 2, seed=[3, 4], **options)
    assert seeds[0].tokens == batch[0].tokens
    assert seeds[0].tokens != seeds[1].tokens


def test_u74_rbg_as_default_generator_changes_nothing(params):
    options = {"temperature": 1.5, "max_new_tokens": 8, "seed": 11}
    want = [row.tokens for row in generate(params, PROMPTS, **options)]
    with jax.default_prng_impl("rbg"):
        assert [row.tokens for row in generate(params, PROMPTS, **options)] == want


def test_padding_of_the_vocabulary_is_never_sampled():
    params = tiny_params("mamba2", n_layer=1)
    hidden = mamba_jax.embed(params, PROMPTS[0])[-1]
    params = dataclasses.replace(params, lm_head=params.lm_head.at[101:].set(100.0 * hidden))
    assert int(np.argmax(forward(params, [PROMPTS[0]])[0, -1])) >= 101
    for options in ({}, {"temperature": 5.0}):
        tokens = generate(params, PROMPTS[0], max_new_tokens=50, **options).tokens
        assert max(tokens) < 101


def test_u77_u76_options_and_lengths_compile_nothing_new(params, caplog):
    generate(params, PROMPTS[0], max_new_tokens=2, return_cache=True)
    generate(params, PROMPTS[0], max_new_tokens=2, temperature=1.0)
    before = len(TABLE.compilations)
    with caplog.at_level(logging.INFO, logger="mamba_jax"):
        for options in (
            {},
            {"temperature": 0.7},
            {"temperature": 0.7, "top_k": 5},
            {"temperature": 0.7, "top_p": 0.9, "min_p": 0.01},
            {"repetition_penalty": 1.2},
            {"logprobs": True},
            {"stop_token_ids": [1, 2, 3]},
            {"max_new_tokens": 70},
            {"return_cache": True},
        ):
            for length in (1, 15, 16):
                generate(params, [3] * length, **({"max_new_tokens": 3} | options))
    assert TABLE.compilations[before:] == []
    assert not caplog.records


def test_fifty_random_lengths_compile_at_most_a_dozen_programs():
    params = tiny_params("mamba2", n_layer=1, d_model=8, d_inner=16, headdim=8, d_state=8, vocab_size=50)
    before = len(TABLE.compilations)
    for length in np.random.default_rng(0).integers(1, 3001, 50):
        generate(params, [1] * int(length), max_new_tokens=1)
    assert len(TABLE.compilations) - before <= 12


def test_weights_are_arguments_so_another_model_of_the_shape_compiles_nothing(params):
    generate(params, PROMPTS[0], max_new_tokens=2)
    before = len(TABLE.compilations)
    other = tiny_params("mamba2", n_layer=1, seed=7, text=TextInfo(eos_token_ids=(5,), bos_token_id=3))
    assert (
        generate(other, PROMPTS[0], max_new_tokens=12).tokens != generate(params, PROMPTS[0], max_new_tokens=12).tokens
    )
    assert len(TABLE.compilations) == before


def test_u07_u11_any_length_around_the_segments(params):
    for length in (1, 15, 16, 17, 31, 33, 66, 127, 129, 300):
        ids = RNG.integers(0, 101, length)
        got = generate(params, ids, max_new_tokens=0, return_cache=True)
        want, cache = prefill(params, ids[None])
        np.testing.assert_allclose(got.next_logits, want[0], atol=2e-4)
        jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, atol=2e-5), got.cache, cache)


def test_logits_that_are_not_finite_are_an_error(params):
    broken = dataclasses.replace(params, norm_f=params.norm_f.at[0].set(jnp.nan))
    with pytest.raises(FloatingPointError, match="not finite"):
        generate(broken, PROMPTS[0], max_new_tokens=2)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "empty list"),
        ([[]], "no token"),
        ([[1], []], "no token"),
        ([200], "ids from 200 to 200, wanted 0 to 103"),
        ([-1], "ids from -1"),
        ([1.5], "wanted a string, token ids"),
        ([[1, "a"]], "wanted a string, token ids"),
        ("text", "no tokenizer"),
        (None, "wanted a string, token ids"),
        (7, "wanted a string, token ids"),
        (b"abc", "wanted a string, token ids"),
        (bytearray(b"abc"), r"prompt: got bytearray\(b'abc'\), wanted a string, token ids"),
        (memoryview(b"abc"), "prompt: got <memory at .*wanted a string, token ids"),
        ([b"abc"], "prompt: got b'abc', wanted a string, token ids"),
        ([bytearray(b"abc")], "wanted a string, token ids"),
        ([memoryview(b"abc")], "wanted a string, token ids"),
        (np.array(3), "wanted a string, token ids"),
        ([True, False], "wanted a string, token ids"),
    ],
)
def test_bad_prompts_are_refused(params, prompt, message):
    with pytest.raises(ValueError, match=message):
        generate(params, prompt)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1.0}, "temperature"),
        ({"top_k": 0}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"min_p": 2.0}, "min_p"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"stop_token_ids": [104]}, "stop_token_ids"),
        ({"stop_token_ids": 5}, "stop_token_ids"),
        ({"stop": "x"}, "stop"),
        ({"mode": "fast"}, "mode"),
        ({"seed": [1, 2]}, "seed"),
        ({"max_new_tokens": 1.5}, "max_new_tokens"),
        ({"max_new_tokens": True}, "max_new_tokens"),
        ({"temperature": "1"}, "temperature: got '1'"),
        ({"temperature": None}, "temperature: got None"),
        ({"temperature": [0.5]}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"temperature": 10**400}, "temperature"),
        ({"top_p": "a"}, "top_p: got 'a'"),
        ({"top_k": True}, "top_k"),
        ({"repetition_penalty": None}, "repetition_penalty: got None"),
        ({"stop": 1}, "stop: got 1"),
        ({"stop_token_ids": np.array(0)}, "stop_token_ids: got array"),
        ({"stop_token_ids": [True]}, "stop_token_ids"),
        ({"seed": None}, "seed: got None"),
        ({"seed": [True]}, "seed"),
        ({"seed": jax.random.key(0)}, "seed"),
        ({"seed": 2**64}, "seed"),
        ({"seed": b"\x01"}, r"seed: got b'\\x01'"),
        ({"stop_token_ids": ""}, "stop_token_ids: got ''"),
        ({"stop_token_ids": bytearray(b"a")}, "stop_token_ids: got bytearray"),
        ({"tokenizer": 5}, "tokenizer: got 5"),
        ({"policy": 3}, "policy: got 3, wanted a policy"),
        ({"policy": []}, r"policy: got \[\], wanted a policy"),
        ({"policy": b"static:64"}, "policy: got b'static:64', wanted a policy"),
        ({"policy": Static}, "policy: got <class .*Static'>, wanted a policy"),
        ({"policy": np.array(["static:64"])}, "policy: got array"),
        ({"policy": "layers:64,64"}, "policy: got 'layers:64,64' with 2 chunk sizes, wanted one for each of 1 layers"),
        ({"policy": "careful:layers:64,64,64"}, "policy: got 'layers:64,64,64' with 3 chunk sizes"),
        ({"policy": Guarded(PerLayer((64, 32)))}, "policy: got 'layers:64,32' with 2 chunk sizes"),
    ],
)
def test_bad_options_are_refused(params, options, message):
    with pytest.raises(ValueError, match=message):
        generate(params, [1], **options)


def test_numbers_may_come_in_any_type(params):
    want = generate(params, [1], max_new_tokens=4, temperature=0.5, seed=3, stop_token_ids=[7]).tokens
    for integer in (np.int64, np.uint8, jnp.int32, np.array):
        got = generate(
            params,
            [integer(1)],
            max_new_tokens=integer(4),
            temperature=jnp.float32(0.5),
            seed=integer(3),
            stop_token_ids={integer(7).item()},
        )
        assert got.tokens == want
    for array in (np.array, jnp.array, tuple):
        options = {"seed": array([3]), "stop_token_ids": array([7]), "temperature": np.float32(0.5)}
        assert generate(params, [array([1])], max_new_tokens=4, **options)[0].tokens == want


def test_numbers_may_come_in_arrays_of_other_libraries(params):
    torch = pytest.importorskip("torch")
    want = generate(params, [1, 2], max_new_tokens=4, temperature=0.5, seed=3, stop_token_ids=[7]).tokens
    options = {
        "max_new_tokens": torch.tensor(4),
        "temperature": torch.tensor(0.5),
        "seed": torch.tensor([3]),
        "stop_token_ids": torch.tensor([7]),
    }
    for prompt in (torch.tensor([1, 2]), [torch.tensor(1), torch.tensor(2)]):
        assert generate(params, prompt, **options).tokens == want
    for prompts in (torch.tensor([[1, 2]]), [torch.tensor([1, 2])]):
        assert generate(params, prompts, **options)[0].tokens == want
        assert score(params, prompts)[0].tokens == [1, 2]
    assert forward(params, torch.tensor([[1, 2]]), lengths=torch.tensor([2]), chunk_size=torch.tensor(2)).shape[1] == 2
    for bad in (torch.tensor([0.5]), torch.tensor([True]), torch.tensor(1), torch.zeros(2, dtype=torch.bfloat16)):
        with pytest.raises(ValueError, match=r"^prompt: got .*wanted a string, token ids"):
            generate(params, bad)
        with pytest.raises(ValueError, match=r"^tokens: got .*wanted integers"):
            forward(params, bad[None])
    for name in ("max_new_tokens", "seed", "top_k"):
        with pytest.raises(ValueError, match=f"^{name}: got tensor"):
            generate(params, [1], **{name: torch.tensor(0.5)})
    with pytest.raises(ValueError, match=r"^temperature: got tensor"):
        generate(params, [1], temperature=torch.zeros(1, dtype=torch.bfloat16)[0])
    torch_weights = dataclasses.replace(params, embedding=torch.zeros(3))
    with pytest.raises(ValueError, match=r"^params.embedding: got torch.float32\[3\]"):
        generate(torch_weights, [1])
    cache = init_cache(params.config, 1, params.dtype)
    cache = dataclasses.replace(cache, conv=tuple(torch.zeros(x.shape) for x in cache.conv))
    with pytest.raises(ValueError, match=r"^cache.conv\[0\]: got torch.float32"):
        step(params, [1], cache)


def test_a_text_without_tokens_is_no_empty_prompt(params):
    """It would be read as the BOS token alone, which is another text."""
    params = dataclasses.replace(params, text=TextInfo(bos_token_id=3))
    nothing = {"tokenizer": words()}
    for call, name in (
        (generate, "prompt"),
        (stream, "prompt"),
        (score, "texts"),
        (mamba_jax.embed, "texts"),
        (mamba_jax.perplexity, "text"),
    ):
        with pytest.raises(ValueError, match=f"^{name}: got '  ', of which the tokenizer makes no token"):
            call(params, "  ", **nothing)
    empty, bos = (generate(params, prompt, max_new_tokens=2, **nothing) for prompt in ("", [3]))
    assert empty.tokens == bos.tokens


def test_errors_name_the_argument_they_are_about(params):
    for call in (score, mamba_jax.embed):
        with pytest.raises(ValueError, match=r"^texts: got an empty list"):
            call(params, [])
    with pytest.raises(ValueError, match=r"^logprobs: not an option of stream"):
        stream(params, "a", logprobs=True, tokenizer=byte_level())
    eos = dataclasses.replace(params, text=TextInfo(eos_token_ids=(999,)))
    with pytest.raises(ValueError, match=r"^params.text.eos_token_ids: got \(999,\)"):
        generate(eos, [1])
    with pytest.raises(ValueError, match=r"^params: got a str"):
        generate("state-spaces/mamba2-130m", [1])


def test_a_model_edited_without_its_config_leaves_the_programs_alone():
    params = tiny_params("mamba1", vocab_size=97, pad_vocab_size_multiple=97)
    for edited in (
        params.replace(layers=params.layers[:1]),
        params.replace(embedding=jnp.pad(params.embedding, ((0, 10), (0, 0)))),
    ):
        before = len(TABLE.compilations)
        with pytest.raises(ValueError, match=r"params: not the weights of params.config"):
            generate(edited, [1], max_new_tokens=2)
        assert len(TABLE.compilations) == before
    assert generate(params, [1], max_new_tokens=2).tokens == greedy(params, [1], 2)


@pytest.mark.parametrize("dtype", ["int8", bool, "complex64", "float8_e4m3fn", "float64", None, "no such"])
def test_weights_have_no_other_dtype(params, dtype):
    for call in (
        lambda: mamba_jax.cast_params(params, dtype),
        lambda: mamba_jax.init_params(params.config, jax.random.key(0), dtype),
        lambda: mamba_jax.param_shapes(params.config, dtype),
    ):
        with pytest.raises(ValueError, match=r"dtype: got .*, wanted one of bfloat16, float16, float32"):
            call()


def test_a_key_is_wanted_for_random_weights(params):
    for bad in (0, None, jax.random.split(jax.random.key(0))):
        with pytest.raises(ValueError, match=r"key: got .* wanted a single key"):
            mamba_jax.init_params(params.config, bad)
    raw = mamba_jax.init_params(params.config, jax.random.PRNGKey(3))
    typed = mamba_jax.init_params(params.config, jax.random.key(3))
    jax.tree.map(np.testing.assert_array_equal, raw, typed)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norm_eps": "1"}, "norm_eps: got '1'"),
        ({"norm_eps": float("nan")}, "norm_eps"),
        ({"norm_eps": -1}, "norm_eps"),
        ({"bcdt_norm_eps": -1}, "bcdt_norm_eps"),
        ({"conv_bias": "no"}, "conv_bias: got 'no', wanted True or False"),
        ({"tie_embeddings": 0}, "tie_embeddings"),
        ({"residual_in_fp32": None}, "residual_in_fp32"),
        ({"dt_limit": None}, "dt_limit: got None"),
        ({"dt_limit": [0.0, 1.0]}, "dt_limit"),
        ({"dt_limit": (0,)}, "dt_limit"),
        ({"dt_limit": ("0", "1")}, "dt_limit"),
        ({"dt_limit": (0.0, float("nan"))}, "dt_limit"),
    ],
)
def test_a_config_checks_its_types(params, changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(params.config, **changes)


def test_an_empty_prompt_is_the_bos_token_where_there_is_one(params):
    params = dataclasses.replace(params, text=TextInfo(bos_token_id=9))
    assert generate(params, [[]], max_new_tokens=5)[0].tokens == generate(params, [9], max_new_tokens=5).tokens


@pytest.fixture(scope="module")
def speaking():
    """A tiny model whose vocabulary is a byte-level tokenizer's."""
    tokenizer = byte_level()
    return tiny_params("mamba2", n_layer=1, vocab_size=len(tokenizer)), tokenizer


def test_u73_streamed_pieces_joined_are_the_text(speaking):
    params, tokenizer = speaking
    options = {"max_new_tokens": 90, "temperature": 1.0, "seed": 2, "tokenizer": tokenizer}
    pieces = list(stream(params, "It was", **options))
    whole = generate(params, "It was", **options)
    assert "".join(pieces) == whole.text
    assert whole.text == tokenizer.decode(whole.tokens, skip_special_tokens=True)
    assert len(pieces) > 1


def test_stop_strings_end_text_and_tokens_across_token_borders(speaking):
    params, tokenizer = speaking
    options = {"temperature": 1.0, "seed": 2, "tokenizer": tokenizer, "stop_token_ids": []}
    whole = generate(params, "It was", max_new_tokens=90, **options)
    middle = len(whole.text) // 2
    stop = whole.text[middle : middle + 3]
    row = generate(params, "It was", max_new_tokens=90, stop=stop, return_cache=True, logprobs=True, **options)
    assert row.text == whole.text[: whole.text.index(stop)]
    assert row.finish_reason == "stop"
    assert row.tokens == whole.tokens[: len(row.tokens)]
    assert len(row.logprobs) == len(row.tokens)
    want, _ = prefill(params, [tokenizer("It was")["input_ids"] + row.tokens])
    np.testing.assert_allclose(row.next_logits, want[0], atol=1e-3)
    assert "".join(stream(params, "It was", max_new_tokens=90, stop=[stop], **options)) == row.text
    batch = generate(params, ["It was", "Go"], max_new_tokens=90, stop=stop, **options)
    assert batch[0].text == row.text


def test_score_agrees_with_the_forward_pass_and_with_generation(params):
    scores = score(params, PROMPTS)
    for prompt, got in zip(PROMPTS, scores, strict=True):
        assert got.tokens == prompt
        assert got.logprobs[0] is None
        logits = jax.nn.log_softmax(forward(params, [prompt])[0])
        want = [float(logits[i, token]) for i, token in enumerate(prompt[1:])]
        np.testing.assert_allclose(got.logprobs[1:], want, atol=1e-4)
    row = generate(params, PROMPTS[0], max_new_tokens=20, logprobs=True)
    continued = score(params, PROMPTS[0] + row.tokens)
    np.testing.assert_allclose(continued.logprobs[len(PROMPTS[0]) :], row.logprobs, atol=1e-4)


def test_a_long_text_scores_like_its_forward_pass(params):
    ids = RNG.integers(0, 101, 700)
    got = score(params, ids)
    logits = jax.nn.log_softmax(forward(params, ids[None])[0])
    np.testing.assert_allclose(got.logprobs[1:], logits[np.arange(699), ids[1:]], atol=2e-4)
    assert got.total == pytest.approx(float(np.sum(got.logprobs[1:])))


def test_embed_gives_the_final_hidden_states(params):
    states = mamba_jax.embed(params, PROMPTS)
    for prompt, got in zip(PROMPTS, states, strict=True):
        _, hidden = forward(params, [prompt], output_hidden_states=True)
        np.testing.assert_allclose(got, hidden[-1][0], atol=1e-5)


def test_u82_u85_u86_long_prompts_use_the_programs_of_short_ones(params):
    short = generate(params, RNG.integers(0, 101, 2048), max_new_tokens=2)
    before = len(TABLE.compilations)
    long = generate(params, RNG.integers(0, 101, 5 * 2048), max_new_tokens=2)
    assert len(TABLE.compilations) == before  # so no buffer of any program is longer, nor any step slower
    assert len(short.tokens) == len(long.tokens) == 2
    largest = MambaConfig(
        layer="mamba2", vocab_size=50288, d_model=2560, n_layer=64, d_inner=5120, d_state=128, headdim=64
    )
    assert max(plan_segments(10**6)) * largest.in_proj_width < 2**31  # the widest tensor of the 2.7B model


def test_u71_there_is_always_a_limit(params):
    assert len(generate(params, PROMPTS[0], stop_token_ids=[]).tokens) == 128


def test_u43_a_blanket_cast_is_refused_and_cast_params_keeps_what_must_stay(params):
    blanket = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    with pytest.raises(ValueError, match=r"layers\.0\.dt_bias: got bfloat16\[4\], wanted float32\[4\]"):
        generate(blanket, PROMPTS[0])
    cast = mamba_jax.cast_params(params, "bfloat16")
    assert cast.layers[0].A_log.dtype == jnp.float32
    np.testing.assert_array_equal(cast.layers[0].A_log, params.layers[0].A_log)
    assert cast.layers[0].in_proj.dtype == jnp.bfloat16
    generate(cast, PROMPTS[0], max_new_tokens=1)


def test_weights_that_are_no_jax_arrays_are_refused(params):
    with pytest.raises(ValueError, match=r"params.embedding: got float32\[104, 24\] in a ndarray"):
        generate(jax.tree.map(np.asarray, params), PROMPTS[0])


def test_the_text_continues_the_prompt_s():
    tokenizer = byte_fallback()  # gives the first token of a text no space
    (space,) = tokenizer.convert_tokens_to_ids(["▁"])
    params = tiny_params("mamba2", n_layer=1, vocab_size=len(tokenizer))
    lm_head = (0.0 * params.lm_head).at[space].set(mamba_jax.embed(params, "a", tokenizer=tokenizer)[-1])
    params = dataclasses.replace(params, lm_head=lm_head)
    ids = tokenizer("a")["input_ids"]
    assert generate(params, ids, max_new_tokens=1, tokenizer=tokenizer).tokens == [space]
    for prompt in ("a", ids):
        assert generate(params, prompt, max_new_tokens=1, tokenizer=tokenizer).text == " "
        assert list(stream(params, prompt, max_new_tokens=1, tokenizer=tokenizer)) == [" "]
        stopped = generate(params, prompt, max_new_tokens=1, tokenizer=tokenizer, stop=" ")
        assert (stopped.text, stopped.finish_reason) == ("", "stop")


def test_a_stop_string_among_held_back_bytes_ends_tokens_reason_and_cache():
    tokenizer = byte_fallback()  # decodes a run of byte tokens only when another kind of token follows
    newline = tokenizer.convert_tokens_to_ids("<0x0A>")
    params = tiny_params("mamba2", n_layer=1, vocab_size=len(tokenizer))
    byte_ids = [i for i, token in enumerate(tokenizer.convert_ids_to_tokens(range(len(tokenizer)))) if "<0x" in token]
    lm_head = params.lm_head.at[jnp.array(byte_ids)].set(0.0)
    lm_head = lm_head.at[newline].set(100 * mamba_jax.embed(params, [5, 6])[-1])
    params = dataclasses.replace(params, lm_head=lm_head)
    row = generate(params, [5, 6], max_new_tokens=5, stop="\n", tokenizer=tokenizer, return_cache=True)
    assert (row.tokens, row.text, row.finish_reason) == ([newline], "", "stop")
    np.testing.assert_allclose(row.next_logits, prefill(params, [[5, 6, newline]])[0][0], rtol=1e-4, atol=1e-3)
    last = generate(params, [5, 6], max_new_tokens=1, stop="\n", tokenizer=tokenizer)
    assert (last.text, last.finish_reason) == ("", "stop")


def test_a_huge_temperature_samples_no_padding_of_the_vocabulary():
    params = tiny_params("mamba1", n_layer=1, vocab_size=50, pad_vocab_size_multiple=64)
    assert max(generate(params, [1], max_new_tokens=20, temperature=3e38).tokens) < 50


def test_scores_and_embeddings_that_are_not_finite_are_an_error(params):
    broken = dataclasses.replace(params, norm_f=params.norm_f * jnp.nan)
    for call in (score, mamba_jax.embed):
        with pytest.raises(FloatingPointError, match="not finite"):
            call(broken, PROMPTS[0])
    with pytest.raises(FloatingPointError, match="not finite"):
        generate(broken, PROMPTS[0], max_new_tokens=0, return_cache=True)


@pytest.mark.parametrize("prompt", [np.array([3, 5]), (3, 5), jnp.array([3, 5]), [np.int64(3), 5]])
def test_ids_may_come_in_any_sequence(params, prompt):
    assert generate(params, prompt, max_new_tokens=3).tokens == generate(params, [3, 5], max_new_tokens=3).tokens
