"""Text to token ids and back, whole or piece by piece.

Ids come from transformers' tokenizers, which are imported only when one is loaded. Decoding here means the text the
tokenizer's own decoder gives, special tokens left out and spaces left alone, so that the text of a longer sequence
continues the text of a shorter one and can be streamed.
"""

import bisect
import contextlib
import copy
import functools
import itertools
import os
import re
import threading
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence, Sized
from pathlib import Path
from typing import Any, Protocol

from mamba_jax.arguments import as_path
from mamba_jax.checkpoints.files import CONFIG_FILES, TOKENIZER_FILES, TOKENIZER_MARKS, has_tokenizer
from mamba_jax.messages import reason

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_LOADING = threading.Lock()
_CANNOT_LOAD = (
    "tokenizer: cannot load one from {source}: {error}. Pass the argument `tokenizer` (command line: --tokenizer PATH) "
    "with a folder or a hub id that has one"
)
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
    """Load the tokenizer of a folder or a hub id with transformers' AutoTokenizer; again only if its files changed.

    Args:
        source: a folder with tokenizer files, one of those files, or a hub id such as "EleutherAI/gpt-neox-20b". The
            network is used for a hub id only.

    Returns:
        A transformers tokenizer.

    Raises:
        ValueError: if there is no tokenizer, or it cannot be read; the message names the source.
    """
    path = as_path("tokenizer", source, "a folder, or a hub id such as 'owner/name'")
    if path.is_file():
        path = path.parent
    if path.is_dir():
        if not has_tokenizer(path):
            raise ValueError(
                f"tokenizer: {source} holds none of {', '.join(TOKENIZER_MARKS)}. Pass the argument `tokenizer` "
                "(command line: --tokenizer PATH) with a folder or a hub id that has one"
            )
        return _auto_tokenizer(str(path.resolve()), _files_of(path))
    if source.startswith((".", "/", "~")) or source.count("/") > 1:
        raise ValueError(f"tokenizer: there is no folder {source}")
    folder = _hub_folder(source)
    return _auto_tokenizer(str(folder), _files_of(folder))


def _files_of(folder: Path) -> tuple[tuple[str, int, int, int], ...]:
    """What tells a tokenizer from one that lay in the folder before: its files, their inodes, sizes and times.

    Raises:
        ValueError: if one is no regular file; transformers might wait for it for ever.
    """
    found = [(name, folder / name) for name in (*TOKENIZER_FILES, *CONFIG_FILES)]
    if waiting := [file for _, file in found if file.exists() and not file.is_file()]:
        raise ValueError(f"tokenizer: {waiting[0]} is not a regular file")
    stats = [(name, file.stat()) for name, file in found if file.is_file()]
    return tuple((name, stat.st_ino, stat.st_size, stat.st_mtime_ns) for name, stat in stats)


@functools.lru_cache(maxsize=16)
def _hub_folder(repository: str) -> Path:
    from mamba_jax.checkpoints.hub import find_tokenizer

    try:
        return find_tokenizer(repository)
    except (OSError, ValueError) as error:
        raise ValueError(_CANNOT_LOAD.format(source=repository, error=reason(error))) from error


@functools.lru_cache(maxsize=16)
def _auto_tokenizer(folder: str, files: tuple[tuple[str, int, int, int], ...]) -> Tokenizer:
    del files  # they tell the cache when to forget
    with _LOADING:  # what transformers imports on demand, two threads cannot import at once
        with _without_advice():
            from transformers import AutoTokenizer

        try:
            # Naming trust_remote_code keeps transformers from asking at the terminal whether to run a hub's code.
            return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # tokenizers raises nothing narrower
            raise ValueError(_CANNOT_LOAD.format(source=folder, error=reason(error))) from error


@contextlib.contextmanager
def _without_advice() -> Iterator[None]:
    """Keep transformers from lamenting on stderr, when it is imported, that torch is missing."""
    name = "TRANSFORMERS_NO_ADVISORY_WARNINGS"
    before = os.environ.get(name)
    os.environ[name] = "1" if before is None else before
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)


def check_unicode(name: str, text: str) -> None:
    """Refuse half of a surrogate pair, which no file in UTF-8 holds; Python puts it where bytes were no text.

    Raises:
        ValueError: if the text, an argument of that name, has one.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        got = f"{text[error.start]!r} at character {error.start}"
        raise ValueError(f"{name}: got {got}, wanted valid Unicode") from error


def encode(tokenizer: Tokenizer, text: str, name: str = "text") -> list[int]:
    """Token ids of a text, whole: special tokens are added if, and only if, the tokenizer's own settings add them.

    Args:
        tokenizer: gives the ids.
        text: the text.
        name: of the argument that it came in, for errors.

    Raises:
        ValueError: if the text is no valid Unicode (it holds half of a surrogate pair), or has characters of which the
            tokenizer makes no token at all.
    """
    check_unicode(name, text)
    ids = list(tokenizer(text, verbose=False)["input_ids"])
    if text and not ids:
        raise ValueError(f"{name}: got {text!r:.80}, of which the tokenizer makes no token, wanted at least one")
    return ids


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
    if isinstance(tokenizer, Sized) and isinstance(tokenizer, Hashable):
        return _vocab_size(tokenizer, len(tokenizer))
    return max(tokenizer.get_vocab().values()) + 1


@functools.lru_cache(maxsize=4)
def _vocab_size(tokenizer: Tokenizer, length: int) -> int:
    del length  # tells when a token was added
    return max(tokenizer.get_vocab().values()) + 1


class StopStrings:
    """Cuts a streamed text before the first stop string in it, wherever the borders of its pieces lie.

    The first is the one that ends first; of two that end at the same character, the longer. Text that may turn out
    to begin a stop string is held back until that is settled.

    Attributes:
        wanted: the stop strings.
        matched: the stop string found, or None so far.
    """

    def __init__(self, stop: str | Iterable[str]) -> None:
        self.wanted = (stop,) if isinstance(stop, str) else tuple(stop) if isinstance(stop, Iterable) else (stop,)
        if not all(isinstance(item, str) and item for item in self.wanted):
            raise ValueError(f"stop: got {stop!r:.80}, wanted strings of at least one character")
        for item in self.wanted:
            check_unicode("stop", item)
        self.matched: str | None = None
        self._held = ""

    def push(self, text: str) -> str:
        """Take the next piece and return the text that is now known to precede every stop string."""
        if self.matched is not None:
            return ""
        text = self._held + text
        found = [(start + len(item), start, item) for item in self.wanted if (start := text.find(item)) >= 0]
        if found:
            _, start, self.matched = min(found)
            self._held = ""
            return text[:start]
        held = max((_overlap(text, item) for item in self.wanted), default=0)
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

    The pieces joined are what the ids add to the text of the ids before them (some tokenizers give the first token of
    a text no space), up to the first stop string. A character split over tokens is held back until it is whole. Tokens
    like <0xE2> are held back until another kind of token follows: tokenizers that have them decode such a run at once,
    and one bad byte spoils all of it. The cost of a push grows with the ids pushed, not with those before.

    Attributes:
        matched: the stop string found, or None so far; after one, `push` and `finish` give no more text.
        kept: number of ids pushed, up to and including the one that completed the stop string.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: str | Sequence[str] = (),
        *,
        before: Sequence[int] = (),
        skip_special_tokens: bool = True,
    ) -> None:
        """Begin after the ids `before`, whose text is not given; a character that they leave unfinished is."""
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        added = tokenizer.added_tokens_decoder
        self._skipped = {i for i, token in added.items() if token.special} if skip_special_tokens else set()
        self._stop = StopStrings(stop)
        self._window = self._end_of(before)  # the last ids decoded
        self._given = self._decode(self._window)  # the part of the window's text that was given out, or came before
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
        for token_id, token in zip(ids, self._tokens(ids), strict=True):
            self._pushed += 1
            if token is None:
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

    def _tokens(self, ids: Sequence[int]) -> list[str | None]:
        """The tokens of ids; None for one that gives no text: it is special, or unknown."""
        tokens = self._tokenizer.convert_ids_to_tokens(list(ids))
        return [None if i in self._skipped else token for i, token in zip(ids, tokens, strict=True)]

    def _end_of(self, ids: Sequence[int]) -> list[int]:
        """The last ids: a run of byte tokens, if there is one, and a few more before it."""
        found: list[int] = []
        in_run, more = True, 0
        for token_id in reversed(ids):
            (token,) = self._tokens([token_id])
            if token is None:
                continue
            in_run = in_run and _BYTE_TOKEN.fullmatch(token) is not None
            more += not in_run
            if more > _CONTEXT:
                break
            found.append(int(token_id))
        return found[::-1]

    def _advance(self, new: list[tuple[int, int]], *, final: bool) -> str:
        """Decode (number of ids pushed, id) pairs after the window and return the text that became certain."""
        before = copy.copy(self._stop)
        window = self._window + [token_id for _, token_id in new]
        text = self._decode(window)
        # Bytes are decoded from the left, so only the last U+FFFD can still turn into something else.
        open_end = int(text.endswith(_REPLACEMENT) and not final)
        certain = text[: len(text) - open_end]
        added = self._added(certain)
        piece = self._stop.push(added)
        if self.matched is not None:
            self._kept = self._completed_by(new, before) if new else self._pushed
        self._window = window
        if added:
            self._given = certain
        if len(window) > _WINDOW:
            self._window = window[-_CONTEXT:]
            text = self._decode(self._window)
            self._given = text[: len(text) - open_end]
        return piece

    def _added(self, text: str) -> str:
        """What a text of the window has beyond the part given; ids before may end in a character that is whole now."""
        same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(self._given, text, strict=False))
        return text[sum(1 for _ in same) :]

    def _completed_by(self, new: list[tuple[int, int]], before: StopStrings) -> int:
        """Number of ids pushed up to the first one of `new` after which the text holds a stop string."""

        def holds_stop(count: int) -> bool:
            matcher = copy.copy(before)
            matcher.push(self._added(self._decode(self._window + [token_id for _, token_id in new[:count]])))
            return matcher.matched is not None

        return new[bisect.bisect_left(range(1, len(new)), True, key=holds_stop)][0]

    def _decode(self, ids: list[int]) -> str:
        return decode(self._tokenizer, ids, skip_special_tokens=self._skip_special_tokens) if ids else ""
