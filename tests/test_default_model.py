"""The model that ships with the package: its size, its tokenizer, how well it reads and what it writes."""

import json
import math
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import mamba_jax
from mamba_jax.text import decode, encode, load_tokenizer

FOLDER = Path(mamba_jax.__file__).parent / "default_model"
TRAIN_SCRIPT = Path(__file__).parents[1] / "examples" / "train_default.py"
MAX_BYTES = 12_000_000
END_OF_TEXT = 0

# Bits for each byte of text; chance is 3.4 (12 bits for each token of 3.5 bytes).
MAX_BITS_PER_BYTE = 1.6

# Openings of novels that the training text does not hold: Jerome K. Jerome, Three Men in a Boat (1889), and Jane
# Austen, Sense and Sensibility (1811).
PASSAGES = (
    "There were four of us—George, and William Samuel Harris, and myself, and Montmorency. We were sitting in my room, "
    "smoking, and talking about how bad we were—bad from a medical point of view I mean, of course.",
    "The family of Dashwood had long been settled in Sussex. Their estate was large, and their residence was at "
    "Norland Park, in the centre of their property, where, for many generations, they had lived in so respectable a "
    "manner as to engage the general good opinion of their surrounding acquaintance. The late owner of this estate was "
    "a single man, who lived to a very advanced age, and who for many years of his life, had a constant companion and "
    "housekeeper in his sister.",
)
PROMPTS = ("It was a dark night", "The old man looked at her, and", '"I have never seen')

# The 4000 commonest words of the training text. They are 87% of the words of real chapters, 70% of those of the
# training text's tokens in random order, and 40% of those of tokens drawn at random.
COMMON_WORDS = frozenset((Path(__file__).parent / "common_words.txt").read_text().split())
MIN_COMMON = 0.82


@pytest.fixture(scope="module")
def params():
    return mamba_jax.load(FOLDER)


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(str(FOLDER))


def words(text: str) -> list[str]:
    return [word.lower() for word in re.findall(r"[A-Za-z]+(?:'[a-z]+)?", text)]


def common_share(text: str) -> float:
    found = words(text)
    return sum(word in COMMON_WORDS for word in found) / len(found)


def test_fits_the_size_limit():
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) <= MAX_BYTES


def test_is_a_bfloat16_mamba2_that_ends_its_texts(params):
    assert params.config.layer == "mamba2"
    assert params.dtype == "bfloat16"
    assert params.text.eos_token_ids == (END_OF_TEXT,)


def test_tokenizer_agrees_with_the_model(params, tokenizer):
    assert len(tokenizer) == params.config.vocab_size
    assert tokenizer.eos_token_id == tokenizer.bos_token_id == END_OF_TEXT
    assert encode(tokenizer, "") == []


@pytest.mark.parametrize(
    "text",
    [*PASSAGES, "  two  spaces\n\n\tand a tab ", "“quotes”, ñandú, 日本, 😀", "\x00\x7f", "x" * 1000],
    ids=["jerome", "austen", "spaces", "unicode", "control", "long"],
)
def test_tokenizer_loses_nothing(tokenizer, text):
    assert decode(tokenizer, encode(tokenizer, text)) == text


def test_tokenizer_knows_the_language(tokenizer):
    text = " ".join(PASSAGES)
    assert len(text.encode()) / len(encode(tokenizer, text)) > 3.3


@pytest.mark.parametrize("text", PASSAGES, ids=["jerome", "austen"])
def test_reads_english(params, tokenizer, text):
    total = mamba_jax.score(params, [END_OF_TEXT, *encode(tokenizer, text)]).total
    assert -total / math.log(2) / len(text.encode()) < MAX_BITS_PER_BYTE


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_writes_english_words(params, temperature):
    results = mamba_jax.generate(params, PROMPTS, max_new_tokens=60, temperature=temperature, seed=1)
    text = " ".join(prompt + result.text for prompt, result in zip(PROMPTS, results, strict=True))
    assert len(words(text)) > 60
    assert common_share(text) >= MIN_COMMON, text


def test_sampling_does_not_repeat_itself(params):
    result = mamba_jax.generate(params, PROMPTS[0], max_new_tokens=120, temperature=0.7, seed=1, stop_token_ids=[])
    assert len(set(words(result.text))) > 40, result.text


def test_common_words_tell_noise_from_english(tokenizer):
    noise = np.random.default_rng(0).integers(1, len(tokenizer), 400)
    assert common_share(decode(tokenizer, noise.tolist())) < MIN_COMMON - 0.2


def test_the_training_script_trains(tmp_path):
    """A tiny model on a tiny text, through the same command that trained the shipped one."""
    books, out = tmp_path / "books.txt", tmp_path / "model"
    books.write_text("\n<|endoftext|>\n".join([*PASSAGES * 4, f"{PASSAGES[0]}\n\nA note. ↩"]), encoding="utf-8")
    options = {"books": books, "out": out, "steps": 40, "block": 10, "vocab-size": 300, "layers": 1, "d-model": 32}
    options |= {"headdim": 16, "d-state": 8, "batch": 4, "groups": 2, "seq-len": 32, "chunk-size": 16}
    arguments = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    result = subprocess.run(
        [sys.executable, str(TRAIN_SCRIPT), *arguments], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr

    rows = json.loads((out / "training_log.json").read_text())["rows"]
    assert [row["step"] for row in rows] == [10, 20, 30, 40]
    assert rows[-1]["train_loss"] < rows[0]["train_loss"] - 0.5
    assert rows[-1]["validation_loss"] < rows[0]["validation_loss"] - 0.5
    trained = mamba_jax.load(out)
    assert trained.config.vocab_size == 300
    assert mamba_jax.generate(trained, "It was", max_new_tokens=3).text
    assert "BPE of 300 tokens" in (out / "README.md").read_text(encoding="utf-8")
