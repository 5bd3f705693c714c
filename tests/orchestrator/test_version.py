"""PolicyVersion: monotone, waitable, followed."""

import threading

import pytest

from async_rl.orchestrator.version import PolicyVersion


def test_it_starts_where_told_and_only_grows():
    version = PolicyVersion(40, name="trained version")
    version.advance_to(41)
    version.advance_to(41)
    assert version.value == 41
    with pytest.raises(ValueError, match="trained version can't go back from 41 to 40"):
        version.advance_to(40)
    with pytest.raises(ValueError, match="at least 0"):
        PolicyVersion(-1)


def test_a_waiter_wakes_when_the_version_is_reached():
    version = PolicyVersion()
    assert not version.wait_at_least(1, timeout_s=0.0)
    reached = []
    waiter = threading.Thread(target=lambda: reached.append(version.wait_at_least(2, timeout_s=10.0)))
    waiter.start()
    version.advance_to(1)
    version.advance_to(2)
    waiter.join(10.0)
    assert reached == [True]


def test_subscribers_hear_each_change_once_and_may_use_the_version():
    version = PolicyVersion()
    heard = []

    def follow(value: int) -> None:
        # From another thread: this would block for ever if the lock were still held.
        reader = threading.Thread(target=lambda: heard.append((value, version.value)))
        reader.start()
        reader.join(10.0)

    version.subscribe(follow)
    version.advance_to(3)
    version.advance_to(3)
    version.advance_to(4)
    assert heard == [(3, 3), (4, 4)]
