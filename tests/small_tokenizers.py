"""Small tokenizers of the kinds that Mamba checkpoints come with, made in memory."""

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CORPUS = [
    "It was a dark night and the wind was high, so they waited for the morning.",
    "She said: 'Where are you going?' He did not answer; he went on without a word.",
    "naïve café, déjà vu, 北京 and 東京, 🙂🙂 🚀 and some 1234 numbers.",
] * 4
EOS = "<|endoftext|>"


def byte_level(vocab_size: int = 320) -> PreTrainedTokenizerFast:
    """Byte-level BPE, as GPT-NeoX: its tokens may hold parts of a character."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=EOS)


def byte_fallback() -> PreTrainedTokenizerFast:
    """BPE over characters with tokens like <0xE2> for the rest, as sentencepiece models: drops the first space."""
    byte_tokens = [f"<0x{i:02X}>" for i in range(256)]
    characters = sorted(set("".join(CORPUS)) - set("北京東🙂🚀") | {"▁"})
    vocab = {token: i for i, token in enumerate(["<s>", "</s>", *byte_tokens, *characters])}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


def words() -> PreTrainedTokenizerFast:
    """Whole words joined by spaces: no decoder at all."""
    vocab = {word: i for i, word in enumerate(dict.fromkeys(["<unk>", EOS, *" ".join(CORPUS).split()]))}
    backend = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token=EOS)
