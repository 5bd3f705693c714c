"""The published model of a staleness-aware admission gate, run on the shipped gate: its figures, and what `wait` adds.

The model works in rounds: admit to capacity, count latencies down, completed groups become accepted, then batches of 8
are consumed in completion order, each moving the version by one. G = 1, W = S, no horizon.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pytest

from async_rl.orchestrator.gate import CapacityGate
from async_rl.orchestrator.planner import BatchPlanner

BATCH_SIZE = 8


@dataclass
class Rounds:
    ages: list[int]
    admissions: list[int]
    most_pending: int

    @property
    def max_age(self) -> int:
        return max(self.ages)


def constant(rounds: int) -> Iterator[int]:
    while True:
        yield rounds


def drawn(low: int, high: int) -> Iterator[int]:
    rng = np.random.default_rng(0)
    while True:
        yield int(rng.integers(low, high))


def make_gate(max_staleness: int | None, max_concurrent: int = 10**6) -> CapacityGate:
    return CapacityGate(
        batch_size=BATCH_SIZE,
        group_size=1,
        max_concurrent=max_concurrent,
        max_staleness=max_staleness,
        admit_ahead=10**6 if max_staleness is None else max_staleness,
        oversample_factor=1.0,
        max_steps=None,
    )


def play(
    latency: Iterator[int],
    *,
    max_staleness: int | None,
    rounds: int = 60,
    max_concurrent: int = 64,
    start_version: int = 0,
    forget: int = 0,
    wait: bool = False,
) -> Rounds:
    """Run the rounds; `forget` versions were lost from the accepted count at a resume, `wait` asks the planner."""
    # A count that forgot r versions is a bound that is looser by r, with versions counted from there.
    gate = make_gate(None if max_staleness is None else max_staleness + forget, max_concurrent)
    planner = BatchPlanner(batch_size=BATCH_SIZE, max_staleness=max_staleness, stale_policy="wait" if wait else "allow")
    version = start_version
    left: dict[int, int] = {}
    head: dict[int, int] = {}
    completed: list[int] = []
    result = Rounds([], [], 0)
    next_id = 0

    def completion_order() -> list[int]:
        return completed[:BATCH_SIZE] if len(completed) >= BATCH_SIZE else []

    choose: Callable[[], list[int]] = (lambda: list(planner.plan(version).groups)) if wait else completion_order
    for _ in range(rounds):
        admissions = gate.capacity(version - forget, version - forget).groups
        for _ in range(admissions):
            gate.admit(next_id)
            planner.admitted(next_id, version)
            left[next_id], head[next_id] = next(latency), version
            next_id += 1
        result.admissions.append(admissions)
        result.most_pending = max(result.most_pending, gate.running_groups + gate.kept_groups)
        for group in list(left):
            left[group] -= 1
            if left[group] == 0:
                del left[group]
                gate.keep(group)
                planner.keep(group, head[group])
                completed.append(group)
        while batch := choose():
            for group in batch:
                result.ages.append(version - head[group])
                completed.remove(group)
                gate.end(group)
                planner.end(group)
            version += 1
    return result


@pytest.mark.parametrize("max_staleness", [0, 1, 2, 4])
@pytest.mark.parametrize("wait", [False, True])
def test_a_constant_latency_reaches_the_bound_and_never_passes_it(max_staleness, wait):
    assert play(constant(3), max_staleness=max_staleness, wait=wait).max_age == max_staleness


@pytest.mark.parametrize(("max_staleness", "max_age"), [(1, 2), (2, 4), (4, 7)])
def test_the_gate_alone_leaks_under_drawn_latencies_and_the_planner_does_not(max_staleness, max_age):
    alone = play(drawn(1, 6), max_staleness=max_staleness)
    assert alone.max_age == max_age
    assert abs(np.mean(alone.ages) - max_staleness) < 1
    assert play(drawn(1, 6), max_staleness=max_staleness, wait=True).max_age == max_staleness


def test_the_leak_grows_with_the_spread_of_the_latency():
    assert play(drawn(1, 3), max_staleness=2).max_age < play(drawn(1, 12), max_staleness=2).max_age


@pytest.mark.parametrize("max_concurrent", [16, 32, 64, 128, 256])
def test_without_the_bound_term_concurrency_sets_the_age(max_concurrent):
    result = play(constant(3), max_staleness=None, rounds=80, max_concurrent=max_concurrent)
    assert result.max_age == max_concurrent // BATCH_SIZE - 1


@pytest.mark.parametrize("max_concurrent", [16, 64, 256])
def test_the_tighter_of_bound_and_concurrency_sets_the_age(max_concurrent):
    result = play(constant(3), max_staleness=2, rounds=80, max_concurrent=max_concurrent)
    assert result.max_age == min(2, max_concurrent // BATCH_SIZE - 1)


@pytest.mark.parametrize(
    ("max_concurrent", "forget", "first_round", "max_age"),
    [(10**6, 40, 344, 42), (10**6, 0, 24, 2), (64, 40, 64, 7), (64, 0, 24, 2)],
)
def test_a_resume_at_version_40(max_concurrent, forget, first_round, max_age):
    result = play(constant(3), max_staleness=2, start_version=40, forget=forget, max_concurrent=max_concurrent)
    assert result.admissions[0] == first_round
    assert result.max_age == max_age


def test_the_shipped_gate_can_not_forget_the_versions_before_a_resume():
    with pytest.raises(ValueError, match="at a resume, to the checkpoint's version"):
        make_gate(2).capacity(trained=0, served=40)


def test_capacity_alone():
    assert make_gate(4, max_concurrent=12).capacity(0, 0).groups == 12


@pytest.mark.parametrize("max_staleness", [0, 1, 2, 4])
def test_the_pending_limit(max_staleness):
    limit = (max_staleness + 1) * BATCH_SIZE
    assert make_gate(max_staleness).capacity(0, 0).groups == limit
    assert play(drawn(1, 6), max_staleness=max_staleness).most_pending == limit
