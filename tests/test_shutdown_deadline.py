"""ShutdownDeadline: what has a time of its own does not count, and gets no more than that."""

import time

import pytest

from async_rl import shutdown
from async_rl.shutdown import ShutdownDeadline


@pytest.fixture
def ended(monkeypatch):
    """Why the process would have been ended."""
    reasons = []
    monkeypatch.setattr(shutdown, "end_process", lambda what, code, before_exit: reasons.append(what))
    return reasons


@pytest.fixture
def deadline(ended):
    deadline = ShutdownDeadline(0.5)
    deadline.start()
    yield deadline
    deadline.end()


def test_what_has_a_time_of_its_own_is_not_counted(deadline, ended):
    with deadline.extended(30.0):
        time.sleep(0.7)
    assert not ended
    assert 0 < deadline.remaining_s <= 0.5


def test_it_gets_no_more_than_that(deadline, ended):
    with deadline.extended(0.05):
        time.sleep(0.4)
    assert [what.startswith("MainThread is in ") for what in ended] == [True]


def test_before_the_end_began_anything_may_take_its_time(ended):
    deadline = ShutdownDeadline(0.05)
    with deadline.extended(0.05):
        time.sleep(0.2)
    assert not ended
    assert deadline.remaining_s == 0.05
