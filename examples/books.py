"""The training text of the default model: public-domain books to clean documents, a byte-level BPE, and token ids."""

import json
import lzma
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT = "<|endoftext|>"
FOOTNOTE = "↩"  # ends every footnote of the books; their notes are citations, not prose
TYPED = str.maketrans({"“": '"', "”": '"', "‘": "'", "’": "'", "…": "..."})  # noqa: RUF001 - as typed at a prompt


def read_documents(path: Path) -> list[str]:
    """Read a file of documents separated by `<|endoftext|>`: one chapter or story each.

    Footnotes go, and typographic quotes become the ASCII ones that prompts are typed with.

    Args:
        path: a UTF-8 text file, xz-compressed if its name ends in .xz.

    Returns:
        The documents, in the order of the file; paragraphs are separated by an empty line.

    Raises:
        ValueError: if no text is left.
    """
    raw = path.read_bytes()
    text = (lzma.decompress(raw) if path.suffix == ".xz" else raw).decode("utf-8").translate(TYPED)
    documents = []
    for document in text.split(END_OF_TEXT):
        paragraphs = [p for p in document.strip().split("\n\n") if p and FOOTNOTE not in p]
        if paragraphs:
            documents.append("\n\n".join(paragraphs))
    if not documents:
        raise ValueError(f"books: {path} holds no text, wanted documents separated by {END_OF_TEXT}")
    return documents


def split_documents(documents: list[str], every: int = 80) -> tuple[list[str], list[str]]:
    """Hold out whole documents for validation: one in `every`, from the middle of each run, so all books take part.

    Returns:
        The training documents and the validation documents; at least one of the latter.

    Raises:
        ValueError: if there are fewer than two documents.
    """
    if len(documents) < 2:
        raise ValueError(f"documents: got {len(documents)}, wanted at least 2 to hold one out")
    held_out = set(range(min(every // 2, len(documents) - 1), len(documents), every))
    train = [text for i, text in enumerate(documents) if i not in held_out]
    return train, [documents[i] for i in sorted(held_out)]


def train_tokenizer(documents: list[str], vocab_size: int) -> Tokenizer:
    """Learn a lossless byte-level BPE; id 0 is `<|endoftext|>`.

    Raises:
        ValueError: if `vocab_size` cannot hold the 256 bytes and the end of text, or does not fit uint16.
    """
    if not 257 <= vocab_size <= 2**16:
        raise ValueError(f"vocab_size: got {vocab_size}, wanted 257..65536")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write the tokenizer as transformers' AutoTokenizer reads it."""
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def encode(tokenizer: Tokenizer, documents: list[str]) -> NDArray[np.uint16]:
    """Token ids of all documents in a row, `<|endoftext|>` before, between and after them; encodes on all cores."""
    end = [tokenizer.token_to_id(END_OF_TEXT)]
    ids = [np.array(end, np.uint16)]
    for encoding in tokenizer.encode_batch(documents, add_special_tokens=False):
        ids.append(np.array(encoding.ids + end, np.uint16))
    return np.concatenate(ids)


def token_bytes(tokenizer: Tokenizer) -> NDArray[np.int32]:
    """Bytes of text that each token id stands for: a character of a byte-level token is one byte; 0 for end of text."""
    sizes = np.zeros(tokenizer.get_vocab_size(), np.int32)
    for token, i in tokenizer.get_vocab().items():
        sizes[i] = 0 if token == END_OF_TEXT else len(token)
    return sizes
