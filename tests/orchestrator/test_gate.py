"""CapacityGate: the formula case by case, the books, and what it refuses."""

import pytest

from async_rl.orchestrator.gate import Capacity, CapacityGate


def make_gate(**overrides) -> CapacityGate:
    settings = {
        "batch_size": 8,
        "group_size": 1,
        "max_concurrent": 10**6,
        "max_staleness": 4,
        "admit_ahead": 4,
        "oversample_factor": 1.0,
        "max_steps": None,
    }
    return CapacityGate(**{**settings, **overrides})


@pytest.mark.parametrize(
    ("C", "B", "G", "S", "W", "f", "max_steps", "trained", "served", "running", "kept", "expected"),
    [
        # concurrency: whole groups only; it is named first in a tie
        (12, 8, 1, 4, 4, 1.0, None, 0, 0, 0, 0, (12, "concurrency")),
        (12, 8, 1, 4, 4, 1.0, None, 0, 0, 12, 0, (0, "concurrency")),
        (31, 8, 4, 4, 4, 1.0, None, 0, 0, 3, 0, (4, "concurrency")),
        (40, 8, 1, 4, 4, 1.0, None, 0, 0, 0, 0, (40, "concurrency")),
        # the bound: (S + v + 1) * B - (accepted + running)
        (10**6, 8, 1, 0, 0, 1.0, None, 0, 0, 0, 0, (8, "bound")),
        (10**6, 8, 1, 1, 1, 1.0, None, 0, 0, 0, 0, (16, "bound")),
        (10**6, 8, 1, 2, 2, 1.0, None, 0, 0, 5, 6, (13, "bound")),
        (10**6, 8, 1, 4, 4, 1.0, None, 0, 0, 40, 0, (0, "bound")),
        (10**6, 8, 1, 2, 2, 1.0, None, 40, 40, 0, 0, (24, "bound")),
        (10**6, 8, 1, 2, 2, 1.0, None, 40, 38, 0, 0, (8, "bound")),  # the served version counts, not the trained one
        (10**6, 8, 1, 2, 2, 1.0, None, 3, 0, 0, 0, (0, "bound")),
        # how far ahead: v * B + ceil((W + 1) * B * f)
        (10**6, 8, 1, 4, 1, 1.0, None, 0, 0, 0, 0, (16, "ahead")),
        (10**6, 8, 1, 4, 1, 1.0, None, 2, 1, 3, 2, (3, "ahead")),
        (10**6, 8, 1, 4, 1, 1.5, None, 0, 0, 0, 0, (24, "ahead")),
        (10**6, 10, 1, 4, 0, 1.1, None, 0, 0, 0, 0, (11, "ahead")),  # 10 * 1.1 is above 11 in floating point
        (10**6, 8, 1, 4, 3, 2.0, None, 0, 0, 0, 0, (40, "bound")),  # oversampling never passes the bound
        (10**6, 8, 1, None, 9, 1.0, None, 0, 0, 0, 0, (80, "ahead")),  # stale_policy=allow: no bound term
        (10**6, 8, 1, None, 1, 3.0, None, 0, 0, 0, 0, (48, "ahead")),
        # the horizon
        (10**6, 8, 1, 4, 4, 1.0, 5, 3, 3, 4, 2, (10, "horizon")),
        (10**6, 8, 1, 4, 4, 1.0, 5, 5, 5, 0, 0, (0, "horizon")),
        (10**6, 8, 1, 2, 2, 1.0, 3, 0, 0, 0, 0, (24, "bound")),
    ],
)
def test_the_capacity_formula(C, B, G, S, W, f, max_steps, trained, served, running, kept, expected):  # noqa: N803
    gate = make_gate(
        max_concurrent=C,
        batch_size=B,
        group_size=G,
        max_staleness=S,
        admit_ahead=W,
        oversample_factor=f,
        max_steps=max_steps,
    )
    for group_id in range(running):
        gate.admit(group_id)
    for group_id in range(running, running + kept):
        gate.restore_kept(group_id)
    assert gate.capacity(trained, served) == Capacity(*expected)


def test_places_come_back_one_trajectory_at_a_time_and_the_rest_with_the_group():
    gate = make_gate(group_size=4, max_concurrent=8)
    gate.admit(7)
    gate.admit(8)
    assert (gate.running_groups, gate.running_trajectories) == (2, 8)
    assert gate.capacity(0, 0) == (0, "concurrency")
    gate.trajectory_ended(7)
    gate.trajectory_ended(8)
    assert gate.running_trajectories == 6
    for _ in range(3):
        gate.trajectory_ended(7)
    assert gate.capacity(0, 0) == (1, "concurrency")
    gate.keep(7)
    gate.keep(8)  # a quorum: its cancelled stragglers give their places back
    assert (gate.running_groups, gate.running_trajectories, gate.kept_groups) == (0, 0, 2)
    gate.end(7)
    assert gate.kept_groups == 1


def test_a_running_group_that_fails_or_is_filtered_gives_everything_back():
    gate = make_gate(group_size=2, max_concurrent=4)
    before = gate.capacity(0, 0)
    gate.admit(0)
    gate.trajectory_ended(0)
    gate.end(0)
    assert gate.capacity(0, 0) == before
    assert gate.running_trajectories == 0


def test_a_trained_batch_counts_the_same_before_and_after_it_ends():
    gate = make_gate(max_staleness=1, admit_ahead=1)
    for group_id in range(16):
        gate.admit(group_id)
        gate.keep(group_id)
    assert gate.capacity(0, 0).groups == 0
    for group_id in range(8):
        gate.end(group_id)
    assert gate.capacity(1, 0).groups == 0  # trained but not served yet: no room
    assert gate.capacity(1, 1).groups == 8


def test_unknown_and_repeated_groups_are_errors_that_name_the_group():
    gate = make_gate(group_size=2, max_concurrent=4)
    for action in (gate.end, gate.keep, gate.trajectory_ended):
        with pytest.raises(LookupError, match="group 3"):
            action(3)
    gate.admit(3)
    with pytest.raises(ValueError, match="group 3 is in the system already"):
        gate.admit(3)
    gate.trajectory_ended(3)
    gate.trajectory_ended(3)
    with pytest.raises(LookupError, match="no trajectory left"):
        gate.trajectory_ended(3)
    gate.keep(3)
    with pytest.raises(LookupError, match="kept already"):
        gate.keep(3)
    with pytest.raises(ValueError, match="group 3 is in the system already"):
        gate.restore_kept(3)
    gate.end(3)
    with pytest.raises(LookupError, match="never admitted, or ended before"):
        gate.end(3)


def test_a_resume_that_forgot_the_trained_version_is_refused():
    with pytest.raises(ValueError, match="served version 40 is ahead of trained version 0"):
        make_gate(max_staleness=2, admit_ahead=2).capacity(0, 40)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"group_size": 0}, "group_size must be at least 1"),
        ({"group_size": 8, "max_concurrent": 7}, "raise max_concurrent to at least 8"),
        ({"max_staleness": -1, "admit_ahead": 0}, "max_staleness must be at least 0"),
        ({"admit_ahead": -1}, "admit_ahead must be at least 0"),
        ({"admit_ahead": 5}, "admit_ahead=5 has no effect above max_staleness=4"),
        ({"oversample_factor": 0.5}, "oversample_factor must be at least 1"),
        ({"oversample_factor": float("nan")}, "oversample_factor must be at least 1"),
        ({"oversample_factor": float("inf"), "admit_ahead": 1}, "oversample_factor must be at least 1"),
        ({"oversample_factor": 1.5}, "lower admit_ahead below 4"),
        ({"max_staleness": 0, "admit_ahead": 0, "oversample_factor": 1.5}, "set oversample_factor=1"),
        ({"max_steps": 0}, "max_steps must be at least 1"),
    ],
)
def test_impossible_settings_are_refused_with_the_fix(overrides, message):
    with pytest.raises(ValueError, match=message):
        make_gate(**overrides)


def test_more_groups_than_the_bound_allows_are_refused_however_they_came_in():
    """CASES 14: version 40, B = 8, S = 2: 24 groups at most, those restored at a resume included."""
    gate = make_gate(max_staleness=2, admit_ahead=2)
    for group_id in range(20):
        gate.restore_kept(group_id)
    assert gate.capacity(40, 40) == (4, "bound")
    for group_id in range(20, 24):
        gate.admit(group_id)
    for enter in (gate.admit, gate.restore_kept):
        with pytest.raises(RuntimeError, match=r"group 24 .* beside 24 others.*max_staleness=2 and batch_size=8"):
            enter(24)
    gate.end(0)
    gate.admit(24)
