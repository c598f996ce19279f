"""Bars on stderr with the time left, for what takes long: loading, compiling, reading long texts, long generations."""

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

_open: list[tuple[int, Any]] = []  # the bars that are shown now, with the threads that show them


def at_terminal() -> bool:
    """Whether stderr is a terminal; it may be closed."""
    return sys.stderr is not None and sys.stderr.isatty()


@contextlib.contextmanager
def track(
    label: str, total: int, *, in_bytes: bool = False, show: bool | None = None
) -> Iterator[Callable[[int], None]]:
    """Show a bar, which a terminal takes away when the work is done; gives the function that advances it.

    Inside another one it is a further line below that, which goes away when its own work is done. While a thread shows
    one, other threads show none.

    Args:
        label: what is going on.
        total: amount of work.
        in_bytes: the amount is bytes, shown with their speed.
        show: whether to show it; None does so where stderr is a terminal.
    """
    terminal = at_terminal()
    if not (terminal if show is None else show):
        yield lambda _: None
        return
    thread = threading.get_ident()
    if _open:
        owner, outer = _open[-1]
        if owner != thread:
            yield lambda _: None
            return
        task = outer.add_task(label, total=total)
        try:
            yield lambda count: outer.advance(task, count)
        finally:
            outer.remove_task(task)
        return
    from rich import progress as bars
    from rich.console import Console

    amount = (bars.DownloadColumn(), bars.TransferSpeedColumn()) if in_bytes else (bars.MofNCompleteColumn(),)
    columns = (bars.TextColumn("{task.description}"), bars.BarColumn(), *amount, bars.TimeRemainingColumn())
    with bars.Progress(*columns, console=Console(stderr=True), transient=terminal) as bar:
        task = bar.add_task(label, total=total)
        shown = (thread, bar)
        _open.append(shown)
        try:
            yield lambda count: bar.advance(task, count)
        finally:
            _open.remove(shown)
