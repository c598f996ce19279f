"""What files and callers say, as an error message of one line can hold it, however much of it there is."""

from collections.abc import Sequence
from typing import Any

_LONGEST = 200  # characters of one thing
_MOST = 10  # things that are listed before the rest is counted


def clip(text: object, longest: int = _LONGEST) -> str:
    """A text, cut in the middle if it is long, with escapes for what is not printable."""
    text, half = str(text), longest // 2
    if len(text) > longest:
        text = f"{text[:half]}[... {len(text) - 2 * half} characters ...]{text[-half:]}"
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def reason(error: Exception) -> str:
    """What an error of another library says, on one line and without the full stop."""
    return clip(" ".join(str(error).split()), 1000).rstrip(".") or type(error).__name__


def shown(value: Any) -> str:
    """The `repr` of a value, cut if it is long."""
    try:
        return clip(repr(value))
    except ValueError:  # more digits than Python prints
        return f"an integer of {value.bit_length()} bits" if isinstance(value, int) else "what cannot be shown"
    except RecursionError:
        return f"a {type(value).__name__} nested too deep to be shown"


def some(names: Sequence[object], separator: str = ", ") -> str:
    """The first of some names, each cut if it is long, and how many more there are."""
    rest = [f"and {len(names) - _MOST} more"] if len(names) > _MOST else []
    return separator.join([*(clip(name) if isinstance(name, str) else shown(name) for name in names[:_MOST]), *rest])
