"""Dispatcher and rollout threads: admission that wakes by itself, deadlines, retries, quorum, failure budget."""

import asyncio
import threading

import pytest
from loop_kit import (
    ByHand,
    FakeEngine,
    FakeSource,
    at_once,
    eventually,
    finished,
    make_prompts,
    patient,
    running,
    step,
    train,
    waits,
)

from async_rl.orchestrator.seeds import sampling_seed
from async_rl.orchestrator.sinks import RolloutFailureError


def outcome(orchestrator, name):
    return orchestrator.outcomes()[name]


# CASES 1


def test_a_rollout_that_hangs_is_retried_then_fails_its_group_and_slows_no_other():
    attempts = []

    async def rollout(task, engine):
        if task.group_id == 1 and task.sample_index == 0:
            attempts.append(task)
            while True:  # user code that ignores its cancellation
                try:
                    await asyncio.sleep(3600)
                except asyncio.CancelledError:
                    if len(attempts) == 3:
                        raise
        return finished(task, engine)

    with running(rollout, rollout_timeout_s=0.1, max_retries=2, max_steps=4, max_staleness=4) as orchestrator:
        batches = train(orchestrator)
        trained = [g.id for b in batches for g in b.groups]
        assert 1 not in trained
        assert len(trained) == 8
        assert [t.attempt for t in attempts] == [0, 1, 2]
        assert len({t.seed for t in attempts}) == 3
        assert {t.prompt.data["n"] for t in attempts} == {1}
        assert outcome(orchestrator, "failed") == 1
        assert orchestrator.drain_metrics()["rollout/retries"] == 2


def test_a_quorum_goes_on_without_the_straggler():
    by_hand = ByHand()
    quorum = {"group_completion": "quorum", "min_group_size": 2, "straggler_timeout_s": 0.05}
    with running(by_hand, batch_size=1, group_size=3, max_staleness=0, max_steps=1, **quorum) as orchestrator:
        by_hand.wait_started(3)
        by_hand.finish(0, 2, reward=5.0)
        by_hand.finish(0, 0, reward=1.0)
        batch = step(orchestrator)
        assert [(t.sample_index, t.reward) for t in batch.trajectories] == [(0, 1.0), (2, 5.0)]
        assert batch.advantages == ((-2.0, 2.0),)
        assert orchestrator.drain_metrics()["rollout/stragglers_cancelled"] == 1
        assert orchestrator.snapshot()["running_trajectories"] == 0


def test_a_quorum_out_of_reach_fails_the_group():
    by_hand = ByHand()
    quorum = {"group_completion": "quorum", "min_group_size": 2, "straggler_timeout_s": 9.0, "max_retries": 0}
    with running(by_hand, batch_size=1, group_size=3, max_staleness=0, max_steps=1, **quorum) as orchestrator:
        by_hand.wait_started(3)
        by_hand.fail(0, 0)
        by_hand.fail(0, 1)
        eventually(lambda: outcome(orchestrator, "failed") == 1)
        assert {t.group_id for t in by_hand.wait_started(6)[3:]} == {1}  # its places came back


# CASES 2


def test_a_reward_that_always_raises_ends_the_run_with_its_traceback():
    calls = []

    async def rollout(task, engine):
        calls.append(task)
        raise ZeroDivisionError("the reward is broken")

    with running(rollout, max_failures=8) as orchestrator, pytest.raises(RolloutFailureError) as raised:
        train(orchestrator)
    assert isinstance(raised.value.__cause__, ZeroDivisionError)
    assert raised.value.__cause__.__traceback__.tb_frame.f_code.co_name == "_run"
    assert "ZeroDivisionError: the reward is broken" in str(raised.value)
    assert len(calls) < 100


@pytest.mark.parametrize("allowed", [0, 2, 16])
def test_so_many_failures_in_a_row_are_put_up_with_and_one_more_ends_the_run(allowed):
    by_hand = ByHand()
    settings = {"batch_size": 1, "group_size": 1, "max_staleness": 0, "max_failures": allowed, "max_retries": 99}
    with running(by_hand, **settings) as orchestrator:
        for attempt in range(allowed + 1):
            by_hand.wait_started(attempt + 1)
            orchestrator.check()
            by_hand.fail(0, attempt=attempt)
        told = rf"{allowed + 1} rollout attempts in a row failed \(max_failures={allowed}\)"
        with pytest.raises(RolloutFailureError, match=told):
            orchestrator.next_batch(patient())


def test_successes_in_between_keep_the_budget():
    async def rollout(task, engine):
        if task.attempt == 0 and task.sample_index == 0:
            raise ValueError("every other attempt fails")
        return finished(task, engine)

    with running(rollout, max_failures=4, max_concurrent=2, max_steps=20) as orchestrator:
        assert len(train(orchestrator)) == 20


def test_a_fatal_error_ends_the_run_at_once():
    class DeadError(RuntimeError):
        fatal = True

    async def rollout(task, engine):
        raise DeadError("the engine is gone")

    with running(rollout, max_failures=1000) as orchestrator, pytest.raises(DeadError):
        train(orchestrator)


# CASES 3


def test_an_error_once_is_retried_and_counted():
    by_hand = ByHand()
    with running(by_hand, batch_size=1, max_staleness=0, max_steps=1) as orchestrator:
        by_hand.wait_started(2)
        by_hand.fail(0, 1, attempt=0)
        retried = by_hand.wait_started(3)[-1]
        assert (retried.sample_index, retried.attempt) == (1, 1)
        assert retried.seed == sampling_seed(0, "toy/0/0", 1, 1)
        by_hand.finish(0, 0)
        by_hand.finish(0, 1, attempt=1)
        assert [t.attempt for t in step(orchestrator).trajectories] == [0, 1]
        assert orchestrator.drain_metrics()["rollout/retries"] == 1


@pytest.mark.parametrize("error", [SystemExit(1), KeyboardInterrupt(), asyncio.CancelledError(), TimeoutError("tool")])
def test_whatever_user_code_raises_costs_one_attempt(error):
    async def rollout(task, engine):
        if (task.group_id, task.sample_index, task.attempt) == (0, 0, 0):
            raise error
        return finished(task, engine)

    with running(rollout, max_steps=2) as orchestrator:
        batches = train(orchestrator)
        (group,) = [g for b in batches for g in b.groups if g.id == 0]
        assert [t.attempt for t in group.trajectories] == [1, 0]


def test_a_failed_group_names_its_reason():
    class RewardError(ValueError):
        reason = "reward"

    async def rollout(task, engine):
        if task.group_id == 0:
            raise RewardError("reward is NaN")
        return finished(task, engine)

    with running(rollout, batch_size=1, max_failures=100, max_retries=1, max_steps=1) as orchestrator:
        eventually(lambda: outcome(orchestrator, "failed") == 1)
        step(orchestrator)
        reports = [e.value for e in orchestrator.events() if e.name == "empty_batch"]
        assert reports[0].failures == {"reward": 1}
        assert reports[0].outage
        assert "reward is NaN" in str(reports[0])


# CASES 6


def test_the_dispatcher_wakes_by_itself_when_a_version_comes():
    by_hand = ByHand()
    with running(by_hand, batch_size=1, group_size=1, max_staleness=0) as orchestrator:
        by_hand.wait_started(1)
        by_hand.finish(0)
        step(orchestrator, publish=False)
        eventually(lambda: waits(orchestrator).get("dispatcher", "").startswith("capacity (limited by bound)"))
        assert len(by_hand.started) == 1
        orchestrator.fleet.publish(1, FakeSource(1))  # nothing runs, nothing completes: only the version moves
        eventually(lambda: len(by_hand.started) == 2, seconds=2.0)


def test_nothing_is_admitted_before_admission_is_opened():
    by_hand = ByHand()
    with running(by_hand, resume=False, batch_size=1, group_size=1, max_staleness=0) as orchestrator:
        eventually(lambda: "paused" in waits(orchestrator).get("dispatcher", ""))
        assert by_hand.started == []
        orchestrator.resume()
        by_hand.wait_started(1)


def test_the_places_of_finished_samples_come_back_before_their_group_is_complete():
    by_hand = ByHand()
    with running(by_hand, batch_size=4, group_size=2, max_staleness=0, max_concurrent=4) as orchestrator:
        by_hand.wait_started(4)
        assert orchestrator.snapshot()["limited_by"] == "concurrency"
        by_hand.finish(0, 0)
        by_hand.finish(1, 0)
        assert {t.group_id for t in by_hand.wait_started(6)} == {0, 1, 2}


# Several engines and event loops


def test_groups_go_to_the_least_busy_open_engine_and_stay_there():
    used: dict[int, set[str]] = {}

    async def rollout(task, engine):
        used.setdefault(task.group_id, set()).add(engine.name)
        await asyncio.sleep(3600)

    engines = [FakeEngine("a"), FakeEngine("b")]
    with running(rollout, engines=engines, batch_size=4, group_size=3, max_staleness=0) as orchestrator:
        eventually(lambda: orchestrator.snapshot()["in_the_air"] == 12 and len(used) == 4)
        assert all(len(names) == 1 for names in used.values())
        assert sorted(name for names in used.values() for name in names) == ["a", "a", "b", "b"]


def test_a_blocked_event_loop_does_not_block_the_other():
    blocked, done = threading.Event(), threading.Event()

    async def rollout(task, engine):
        if task.group_id == 0:
            blocked.set()
            done.wait(600)  # bad user code: blocks its event loop
        return finished(task, engine)

    with running(rollout, rollout_threads=2, batch_size=1, group_size=1, max_staleness=2, max_steps=4) as orchestrator:
        assert blocked.wait(60)
        batch = orchestrator.next_batch(patient())
        assert batch.groups[0].id == 1
        done.set()


def test_slow_data_and_data_that_raises():
    class Rows(list):
        def __getitem__(self, i):
            if i == 3:
                raise OSError("the disk with the data is gone")
            return super().__getitem__(i)

    prompts = make_prompts()
    prompts._rows = [Rows(prompts._rows[0])]
    with (
        running(at_once, prompts=prompts) as orchestrator,
        pytest.raises(OSError, match="disk with the data") as raised,
    ):
        train(orchestrator)
    assert "dispatcher" in raised.value.__notes__[0]
