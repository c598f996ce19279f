import concurrent.futures

import pytest

from mamba_jax import progress


def test_a_bar_inside_another_is_a_line_below_it_and_goes_away(capsys):
    with progress.track("Outer", 2, show=True) as outer:
        ((_, bar),) = progress._open
        with progress.track("Inner", 3, show=True) as inner:
            inner(2)
            assert [(task.description, task.completed) for task in bar.tasks] == [("Outer", 0), ("Inner", 2)]
        outer(1)
        assert [(task.description, task.completed) for task in bar.tasks] == [("Outer", 1)]
    assert not progress._open
    assert "Outer" in capsys.readouterr().err


def test_a_bar_whose_work_fails_is_closed():
    with pytest.raises(KeyError), progress.track("Outer", 2, show=True):
        raise KeyError
    assert not progress._open
    with progress.track("Outer", 2, show=False) as advance:
        advance(1)
        assert not progress._open


def test_while_a_thread_shows_a_bar_others_show_none():
    with progress.track("Mine", 2, show=True) as mine, concurrent.futures.ThreadPoolExecutor(1) as pool:
        ((_, bar),) = progress._open

        def other():
            with progress.track("Theirs", 5, show=True) as theirs:
                theirs(5)
                return [task.description for task in bar.tasks]

        assert pool.submit(other).result() == ["Mine"]
        mine(2)
    assert not progress._open
