import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from mamba_jax import text
from tests import small_tokenizers

TOKENIZERS = {
    "byte_level": small_tokenizers.byte_level(),
    "byte_fallback": small_tokenizers.byte_fallback(),
    "words": small_tokenizers.words(),
}
BYTES, FALLBACK = TOKENIZERS["byte_level"], TOKENIZERS["byte_fallback"]
TEXT = "It was naïve: 北京 🙂🚀  and then, 🙂 was high."


@pytest.fixture(params=TOKENIZERS)
def tokenizer(request):
    return TOKENIZERS[request.param]


def blocks(ids, sizes):
    """The ids cut into blocks whose sizes are drawn from `sizes`."""
    rng, out = random.Random(str(ids)), []
    while ids:
        size = rng.choice(sizes)
        out.append(ids[:size])
        ids = ids[size:]
    return out


def stream(decoder, pushes):
    return [decoder.push(ids) for ids in pushes] + [decoder.finish()]


def byte_ids(data):
    """One byte-level token a byte."""
    alphabet = BYTES.backend_tokenizer.get_vocab()
    table = {}
    for i in range(256):
        token = bytes([i]).decode("latin-1")
        printable = (33 <= i <= 126) or (161 <= i <= 172) or (174 <= i <= 255)
        table[i] = alphabet[token] if printable else None
    shifted = [i for i in range(256) if table[i] is None]
    for n, i in enumerate(shifted):
        table[i] = alphabet[chr(256 + n)]
    return [table[i] for i in data]


# Encoding


def test_encode_decode_round_trip(tokenizer):
    words = "It was a dark night"
    assert text.decode(tokenizer, text.encode(tokenizer, words)) == words


def test_encode_adds_what_the_tokenizer_adds_and_no_more():
    assert text.encode(BYTES, "") == []
    assert text.encode(BYTES, "a") == [BYTES.convert_tokens_to_ids("a")]
    with_bos = small_tokenizers.byte_fallback()
    from tokenizers.processors import TemplateProcessing

    with_bos.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    assert text.encode(with_bos, "a")[0] == 0
    assert text.encode(with_bos, "a")[1:] == text.encode(FALLBACK, "a")


def test_encode_never_truncates():
    short = small_tokenizers.byte_level()
    short.model_max_length = 4
    short.backend_tokenizer.enable_truncation(4)
    assert text.encode(short, TEXT) == text.encode(BYTES, TEXT)
    assert len(text.encode(short, TEXT)) > 4


def test_vocab_size_is_the_highest_id_and_one():
    assert text.vocab_size(BYTES) == 320
    holed = small_tokenizers.words()
    from tokenizers import AddedToken

    holed.add_tokens([AddedToken("<|im_end|>", special=True)])
    assert text.vocab_size(holed) == max(holed.get_vocab().values()) + 1


def test_vocab_size_is_looked_up_once_and_again_after_an_added_token(monkeypatch):
    own = small_tokenizers.words()
    size, calls = text.vocab_size(own), []
    original = own.get_vocab
    monkeypatch.setattr(own, "get_vocab", lambda: calls.append(1) or original())
    assert text.vocab_size(own) == size
    assert not calls
    own.add_tokens(["another"])
    assert text.vocab_size(own) == size + 1


def test_decode_leaves_special_tokens_and_unknown_ids_out_and_spaces_alone():
    ids = text.encode(BYTES, "dark , night")
    assert text.decode(BYTES, [0, *ids, 100_000, 0]) == "dark , night"
    assert text.decode(BYTES, [*ids, 0], skip_special_tokens=False) == "dark , night<|endoftext|>"


# Streaming


@pytest.mark.parametrize("sizes", [(1,), (1, 2, 3), (7, 40), (1000,)])
def test_joined_pieces_equal_one_decode(tokenizer, sizes):
    ids = text.encode(tokenizer, TEXT * 3)
    assert "".join(stream(text.TextDecoder(tokenizer), blocks(ids, sizes))) == text.decode(tokenizer, ids)


@pytest.mark.parametrize("seed", range(20))
def test_joined_pieces_equal_one_decode_for_any_ids(tokenizer, seed):
    """Random ids are mostly broken UTF-8; special tokens and ids without a token are among them."""
    rng = random.Random(seed)
    ids = [rng.randrange(text.vocab_size(tokenizer) + 4) for _ in range(rng.randrange(1, 400))]
    expected = text.decode(tokenizer, ids)
    assert "".join(stream(text.TextDecoder(tokenizer), blocks(ids, (1, 1, 2, 5, 33)))) == expected
    shown = text.TextDecoder(tokenizer, skip_special_tokens=False)
    assert "".join(stream(shown, blocks(ids, (1, 3)))) == text.decode(tokenizer, ids, skip_special_tokens=False)


@pytest.mark.parametrize("split", [(2, 2), (1, 1, 1, 1), (1, 3), (3, 1)])
def test_no_piece_holds_part_of_a_character(split):
    ids = byte_ids("a🙂b".encode())
    pushes, rest = [ids[:1]], ids[1:5]
    for size in split:
        pushes.append(rest[:size])
        rest = rest[size:]
    decoder = text.TextDecoder(BYTES)
    assert stream(decoder, [*pushes, ids[5:]]) == ["a", *[""] * (len(split) - 1), "🙂", "b", ""]


def test_end_inside_a_character_is_flushed():
    ids = byte_ids("né🙂".encode())[:-1]
    decoder = text.TextDecoder(BYTES)
    assert decoder.push(ids) == "né"
    assert decoder.finish() == "\ufffd" == text.decode(BYTES, ids)[-1]


def test_two_streams_do_not_mix():
    one, two = byte_ids("🙂🙂".encode()), byte_ids("東京!!".encode())
    a, b = text.TextDecoder(BYTES), text.TextDecoder(BYTES)
    pieces = [(a.push([x]), b.push([y])) for x, y in zip(one, two, strict=True)]
    assert "".join(p for p, _ in pieces) + a.finish() == "🙂🙂"
    assert "".join(p for _, p in pieces) + b.finish() == "東京!!"


def test_broken_bytes_do_not_stop_the_stream():
    """Continuation bytes alone never make a character: each is U+FFFD as soon as the next one has come."""
    decoder = text.TextDecoder(BYTES)
    pieces = [decoder.push([i]) for i in byte_ids(b"\x80" * 200)]
    assert pieces == ["", *["\ufffd"] * 199]
    assert decoder.finish() == "\ufffd"


def test_run_of_byte_tokens_is_settled_by_the_token_after_it():
    euro = [FALLBACK.convert_tokens_to_ids(f"<0x{i:02X}>") for i in "€".encode()]
    bad, letter = FALLBACK.convert_tokens_to_ids("<0xFF>"), FALLBACK.convert_tokens_to_ids("a")
    assert stream(text.TextDecoder(FALLBACK), [euro, [letter]]) == ["", "€a", ""]
    assert text.decode(FALLBACK, [*euro, bad]) == "\ufffd" * 4  # so the euro sign was not certain
    assert stream(text.TextDecoder(FALLBACK), [euro, [bad], [letter]]) == ["", "", "\ufffd" * 4 + "a", ""]


class CountingTokenizer:
    """Counts the ids that are decoded."""

    def __init__(self, tokenizer):
        self._tokenizer, self.decoded = tokenizer, 0

    def __getattr__(self, name):
        return getattr(self._tokenizer, name)

    def decode(self, token_ids, **options):
        self.decoded += len(token_ids)
        return self._tokenizer.decode(token_ids, **options)


@pytest.mark.parametrize("data", ["plain words, " * 300, "🙂" * 800, None], ids=["words", "emoji", "broken"])
def test_cost_does_not_grow_with_the_text_so_far(data):
    ids = byte_ids(data.encode() if data else b"\x80" * 3000)
    counting = CountingTokenizer(BYTES)
    decoder = text.TextDecoder(counting)
    for token in ids:
        decoder.push([token])
    assert counting.decoded < 40 * len(ids)


def test_token_pieces_join_to_the_whole():
    ids = [*text.encode(BYTES, TEXT), 0]
    pieces = text.token_pieces(BYTES, ids)
    assert len(pieces) == len(ids)
    assert "".join(pieces) == TEXT + "<|endoftext|>"
    assert text.token_pieces(BYTES, byte_ids("é".encode())[:1]) == ["\ufffd"]
    assert text.token_pieces(BYTES, []) == []


# After a prompt


@pytest.mark.parametrize("cut", [1, 2, 9, 30])
def test_pieces_continue_the_text_of_the_ids_before_them(tokenizer, cut):
    ids = text.encode(tokenizer, "It was a dark night and the wind was high, so they waited for the morning.")
    for size in (1, 5, 100):
        decoder = text.TextDecoder(tokenizer, before=ids[:cut])
        got = "".join(stream(decoder, blocks(ids[cut:], (size,))))
        assert text.decode(tokenizer, ids[:cut]) + got == text.decode(tokenizer, ids)


def test_the_space_between_prompt_and_continuation_is_kept():
    space, w = FALLBACK.convert_tokens_to_ids(["▁", "w"])
    hello = text.encode(FALLBACK, "a")
    assert text.TextDecoder(FALLBACK, before=hello).push([space, w]) == " w"
    assert text.TextDecoder(FALLBACK).push([space, w]) == "w"  # as the first tokens of a text
    stopped = text.TextDecoder(FALLBACK, " w", before=hello)
    assert stopped.push([space, w]) == ""
    assert (stopped.matched, stopped.kept) == (" w", 2)


@pytest.mark.parametrize("sizes", [(1,), (2,), (100,)])
def test_a_character_that_the_prompt_begins_is_whole_in_the_continuation(sizes):
    euro = byte_ids("€".encode())
    for cut in (1, 2):
        rest = [*euro[cut:], *byte_ids(b"x")]
        before = [*byte_ids(b"a"), *euro[:cut]]
        assert "".join(stream(text.TextDecoder(BYTES, before=before), blocks(rest, sizes))) == "€x"
        fallback = [FALLBACK.convert_tokens_to_ids(f"<0x{i:02X}>") for i in "東€".encode()]
        rest = [*fallback[3 + cut :], *text.encode(FALLBACK, "b")[1:]]
        decoder = text.TextDecoder(FALLBACK, before=[*text.encode(FALLBACK, "a"), *fallback[: 3 + cut]])
        assert "".join(stream(decoder, blocks(rest, sizes))).endswith("€b")
    broken = [*byte_ids(b"a"), *euro[:1]]
    assert "".join(stream(text.TextDecoder(BYTES, before=broken), blocks(byte_ids(b"bc"), sizes))) == "bc"


# Stop strings


def cut(whole, stop):
    """The text before the stop string that ends first."""
    ends = [(whole.find(s) + len(s), whole.find(s)) for s in stop if s in whole]
    return whole[: min(ends)[1]] if ends else whole


STOPS = [["dark night"], ["k n", "night and"], ["was a dark", "dark"], ["high", "h"], ["🙂🚀"], ["\n\n"], ["ï"], []]


@pytest.mark.parametrize("stop", STOPS, ids=repr)
@pytest.mark.parametrize("sizes", [(1,), (1, 2, 5), (16,), (500,)])
def test_stop_string_wherever_the_borders_lie(tokenizer, stop, sizes):
    ids = text.encode(tokenizer, "It was a dark night and the wind was naïve 🙂🚀 and high, so they waited")
    decoder = text.TextDecoder(tokenizer, stop)
    got = "".join(stream(decoder, blocks(ids, sizes)))
    whole = text.decode(tokenizer, ids)
    assert got == cut(whole, stop)
    hits = [n for n in range(1, len(ids) + 1) if any(s in text.decode(tokenizer, ids[:n]) for s in stop)]
    assert decoder.kept == (hits[0] if hits else len(ids))
    assert (decoder.matched is None) == (not hits)


def test_partial_match_is_held_back_and_given_out_when_it_fails():
    matcher = text.StopStrings(["</s>", "<end>"])
    assert matcher.push("a<") == "a"
    assert matcher.push("/s") == ""
    assert matcher.push("<") == "</s"
    assert matcher.push("en") == ""
    assert matcher.finish() == "<en"
    assert matcher.matched is None


def test_matched_text_never_leaves_the_matcher():
    matcher = text.StopStrings(["abab"])
    assert [matcher.push(c) for c in "xabaabab more"] == ["x", "", "", "", "aba", *[""] * 8]
    assert matcher.matched == "abab"
    assert matcher.finish() == ""


def test_of_two_stop_strings_the_one_that_ends_first_counts():
    for pieces in (["abcd"], list("abcd")):
        matcher = text.StopStrings(["abcd", "bc", "abc"])
        assert "".join(matcher.push(p) for p in pieces) == ""
        assert matcher.matched == "abc"


def test_stop_string_at_the_very_end_of_a_byte_run():
    ids = text.encode(FALLBACK, "a €")
    decoder = text.TextDecoder(FALLBACK, "€")
    assert decoder.push(ids) + decoder.finish() == "a "
    assert decoder.kept == len(ids)
    more = text.TextDecoder(FALLBACK, "€")
    assert "".join(stream(more, [[i] for i in [*ids, *text.encode(FALLBACK, "bcd")]])) == "a "
    assert more.kept == len(ids)


def test_stop_accepts_one_string_and_refuses_an_empty_one():
    assert text.StopStrings("ab").push("xab") == "x"
    for bad in ("", ["a", ""], [3], 1, b"a", [None], "\udcff", ["a", "b\ud800"]):
        with pytest.raises(ValueError, match="stop: got"):
            text.StopStrings(bad)


# Loading


def test_load_tokenizer_from_a_folder(tmp_path):
    BYTES.save_pretrained(tmp_path)
    loaded = text.load_tokenizer(str(tmp_path))
    assert text.encode(loaded, TEXT) == text.encode(BYTES, TEXT)
    assert text.load_tokenizer(str(tmp_path)) is loaded
    assert text.load_tokenizer(str(tmp_path / "tokenizer.json")) is loaded


def test_a_replaced_tokenizer_is_loaded_anew(tmp_path):
    BYTES.save_pretrained(tmp_path)
    before = text.load_tokenizer(str(tmp_path))
    FALLBACK.save_pretrained(tmp_path)
    after = text.load_tokenizer(str(tmp_path))
    assert text.encode(before, TEXT) == text.encode(BYTES, TEXT)
    assert text.encode(after, TEXT) == text.encode(FALLBACK, TEXT)


def test_load_tokenizer_beside_a_config_of_the_original_layout(tmp_path):
    BYTES.save_pretrained(tmp_path)
    config = {"d_model": 64, "n_layer": 2, "vocab_size": 320, "ssm_cfg": {}, "rms_norm": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer_config.json").unlink()
    assert text.encode(text.load_tokenizer(str(tmp_path)), TEXT) == text.encode(BYTES, TEXT)


def test_missing_tokenizer_is_named(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer: .*holds none of tokenizer.json.*--tokenizer") as error:
        text.load_tokenizer(str(tmp_path))
    assert str(tmp_path) in str(error.value)
    with pytest.raises(ValueError, match="no folder"):
        text.load_tokenizer(str(tmp_path / "absent"))
    for bad in ("", "a\0b", "x" * 5000):
        with pytest.raises(ValueError, match=r"tokenizer: got .*, wanted a folder"):
            text.load_tokenizer(bad)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="makes a FIFO")
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "config.json"])
def test_a_fifo_among_the_files_is_named_and_not_waited_for(tmp_path, name):
    BYTES.save_pretrained(tmp_path)
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    with pytest.raises(ValueError, match=f"tokenizer: {tmp_path / name} is not a regular file"):
        text.load_tokenizer(str(tmp_path))


def test_broken_tokenizer_is_named(tmp_path):
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0", "trunc')
    with pytest.raises(ValueError, match="tokenizer: cannot load one from") as error:
        text.load_tokenizer(str(tmp_path))
    assert str(tmp_path) in str(error.value)
    assert ".. Pass" not in str(error.value)
    assert "\n" not in str(error.value)


def test_unknown_hub_id_is_named(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="cannot load one from no-such/tokenizer"):
        text.load_tokenizer("no-such/tokenizer")


def test_loading_says_nothing_of_torch_and_leaves_the_environment_alone(tmp_path):
    BYTES.save_pretrained(tmp_path)
    code = (
        "import os, sys; from mamba_jax.text import load_tokenizer; before = dict(os.environ)\n"
        "load_tokenizer(sys.argv[1]); sys.exit(before != dict(os.environ))"
    )
    environment = {name: value for name, value in os.environ.items() if "ADVISORY" not in name}
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        cwd=Path(__file__).parents[1],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_import_is_light():
    code = "import sys, mamba_jax.text; sys.exit('transformers' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[1])
