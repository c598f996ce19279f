"""Text to token ids and back, whole or piece by piece.

Ids come from transformers' tokenizers, which are imported only when one is loaded. Decoding here means the text the
tokenizer's own decoder gives, special tokens left out and spaces left alone, so that the text of a longer sequence
continues the text of a shorter one and can be streamed.
"""

import bisect
import copy
import functools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from mamba_jax.checkpoints.files import TOKENIZER_MARKS, has_tokenizer

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_REPLACEMENT = "\ufffd"
# A decoder needs a few tokens before the new ones: a character spans at most four tokens, and a tokenizer may treat
# the first token of a text in its own way. The window grows to _WINDOW ids and is then cut back to _CONTEXT.
_CONTEXT, _WINDOW = 8, 32


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that is used here."""

    @property
    def added_tokens_decoder(self) -> Mapping[int, Any]:
        """Added tokens by id, each with a `special` flag."""

    def __call__(self, text: str, *, verbose: bool = ...) -> Mapping[str, Any]:
        """Give "input_ids"."""

    def decode(self, token_ids: list[int], **options: Any) -> Any:
        """Give the text of ids."""

    def get_vocab(self) -> dict[str, int]:
        """Every token with its id, added tokens included."""

    def convert_ids_to_tokens(self, ids: list[int]) -> Any:
        """Give the token of each id, None where there is none."""


def load_tokenizer(source: str) -> Tokenizer:
    """Load the tokenizer of a folder or a hub id with transformers' AutoTokenizer; loaded once per source.

    Args:
        source: a folder with tokenizer files, one of those files, or a hub id such as "EleutherAI/gpt-neox-20b". The
            network is used for a hub id only.

    Returns:
        A transformers tokenizer.

    Raises:
        ValueError: if there is no tokenizer, or it cannot be read; the message names the source.
    """
    path = Path(source).expanduser()
    if path.is_file():
        path = path.parent
    if path.is_dir():
        if not has_tokenizer(path):
            raise ValueError(
                f"tokenizer: {source} holds none of {', '.join(TOKENIZER_MARKS)}. Pass the argument `tokenizer` "
                "(command line: --tokenizer PATH) with a folder or a hub id that has one"
            )
        return _auto_tokenizer(str(path.resolve()), local=True)
    if source.startswith((".", "/", "~")) or source.count("/") > 1:
        raise ValueError(f"tokenizer: there is no folder {source}")
    return _auto_tokenizer(source, local=False)


@functools.lru_cache(maxsize=16)
def _auto_tokenizer(source: str, *, local: bool) -> Tokenizer:
    from transformers import AutoTokenizer

    try:
        # Naming trust_remote_code keeps transformers from asking at the terminal whether to run a hub's code.
        return AutoTokenizer.from_pretrained(source, local_files_only=local, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError, ImportError, AttributeError) as error:
        raise ValueError(
            f"tokenizer: cannot load one from {source}: {error}. Pass the argument `tokenizer` (command line: "
            "--tokenizer PATH) with a folder or a hub id that has one"
        ) from error


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """Token ids of a text, whole: special tokens are added if, and only if, the tokenizer's own settings add them.

    Raises:
        ValueError: if the text is no valid Unicode (it holds half of a surrogate pair).
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"text: got {text[error.start]!r} at character {error.start}, wanted valid Unicode") from error
    return list(tokenizer(text, verbose=False)["input_ids"])


def decode(tokenizer: Tokenizer, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
    """Text of token ids; ids that the tokenizer does not know give no text."""
    return tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)


def token_pieces(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """The text that each token adds, special tokens shown; joined, they are the text of the whole.

    A token that ends inside a character has the piece "" and the token that completes it has the character.
    """
    decoder = TextDecoder(tokenizer, skip_special_tokens=False)
    pieces = [decoder.push([token]) for token in ids]
    if pieces:
        pieces[-1] += decoder.finish()
    return pieces


def vocab_size(tokenizer: Tokenizer) -> int:
    """One more than the highest id that the tokenizer can give."""
    return max(tokenizer.get_vocab().values()) + 1


class StopStrings:
    """Cuts a streamed text before the first stop string in it, wherever the borders of its pieces lie.

    The first is the one that ends first; of two that end at the same character, the longer. Text that may turn out
    to begin a stop string is held back until that is settled.

    Attributes:
        matched: the stop string found, or None so far.
    """

    def __init__(self, stop: str | Sequence[str]) -> None:
        self._stop = (stop,) if isinstance(stop, str) else tuple(stop)
        if not all(isinstance(item, str) and item for item in self._stop):
            raise ValueError(f"stop: got {stop!r}, wanted strings of at least one character")
        self.matched: str | None = None
        self._held = ""

    def push(self, text: str) -> str:
        """Take the next piece and return the text that is now known to precede every stop string."""
        if self.matched is not None:
            return ""
        text = self._held + text
        found = [(start + len(item), start, item) for item in self._stop if (start := text.find(item)) >= 0]
        if found:
            _, start, self.matched = min(found)
            self._held = ""
            return text[:start]
        held = max((_overlap(text, item) for item in self._stop), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def finish(self) -> str:
        """Return what is held back, since no more text comes."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, item: str) -> int:
    """Length of the longest proper beginning of `item` that ends `text`."""
    for length in range(min(len(item) - 1, len(text)), 0, -1):
        if text.endswith(item[:length]):
            return length
    return 0


class TextDecoder:
    """Turns token ids into text as they come, giving only text that no later id can change.

    The pieces joined are `decode` of all ids, up to the first stop string. A character split over tokens is held back
    until it is whole. Tokens like <0xE2> are held back until another kind of token follows: tokenizers that have them
    decode such a run at once, and one bad byte spoils all of it. The cost of a push grows with the ids pushed, not
    with those before.

    Attributes:
        matched: the stop string found, or None so far; after one, `push` and `finish` give no more text.
        kept: number of ids pushed, up to and including the one that completed the stop string.
    """

    def __init__(
        self, tokenizer: Tokenizer, stop: str | Sequence[str] = (), *, skip_special_tokens: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        added = tokenizer.added_tokens_decoder
        self._skipped = {i for i, token in added.items() if token.special} if skip_special_tokens else set()
        self._stop = StopStrings(stop)
        self._window: list[int] = []  # the last ids decoded
        self._given = 0  # characters of the window's text that were given out
        self._held: list[tuple[int, int]] = []  # byte tokens held back: (number of ids pushed up to it, id)
        self._pushed = 0
        self._kept: int | None = None

    @property
    def matched(self) -> str | None:
        """The stop string found, or None so far."""
        return self._stop.matched

    @property
    def kept(self) -> int:
        """Number of ids pushed, up to and including the one that completed the stop string."""
        return self._pushed if self._kept is None else self._kept

    def push(self, ids: Sequence[int]) -> str:
        """Take the next ids and return the text that became certain; "" is common for a single id."""
        if self.matched is not None:
            return ""
        settled: list[tuple[int, int]] = []
        tokens = self._tokenizer.convert_ids_to_tokens(list(ids))
        for token_id, token in zip(ids, tokens, strict=True):
            self._pushed += 1
            if token is None or token_id in self._skipped:
                continue
            self._held.append((self._pushed, int(token_id)))
            if not _BYTE_TOKEN.fullmatch(token):
                settled += self._held
                self._held.clear()
        return self._advance(settled, final=False) if settled else ""

    def finish(self) -> str:
        """Return the text held back, since no more ids come; an unfinished character becomes U+FFFD."""
        if self.matched is not None:
            return ""
        held, self._held = self._held, []
        return self._advance(held, final=True) + self._stop.finish()

    def _advance(self, new: list[tuple[int, int]], *, final: bool) -> str:
        """Decode (number of ids pushed, id) pairs after the window and return the text that became certain."""
        before = copy.copy(self._stop)
        window = self._window + [token_id for _, token_id in new]
        text = self._decode(window)
        # Bytes are decoded from the left, so only the last U+FFFD can still turn into something else.
        open_end = int(text.endswith(_REPLACEMENT) and not final)
        end = len(text) - open_end
        piece = self._stop.push(text[self._given : end])
        if self.matched is not None:
            self._kept = self._completed_by(new, before) if new else self._pushed
        self._window, self._given = window, end
        if len(window) > _WINDOW:
            self._window = window[-_CONTEXT:]
            self._given = len(self._decode(self._window)) - open_end
        return piece

    def _completed_by(self, new: list[tuple[int, int]], before: StopStrings) -> int:
        """Number of ids pushed up to the first one of `new` after which the text holds a stop string."""

        def holds_stop(count: int) -> bool:
            text = self._decode(self._window + [token_id for _, token_id in new[:count]])
            matcher = copy.copy(before)
            matcher.push(text[self._given :])
            return matcher.matched is not None

        return new[bisect.bisect_left(range(1, len(new)), True, key=holds_stop)][0]

    def _decode(self, ids: list[int]) -> str:
        return decode(self._tokenizer, ids, skip_special_tokens=self._skip_special_tokens)
