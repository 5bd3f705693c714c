"""The stall watchdog: what counts as progress, what the report says, and that the run fails."""

import asyncio
import threading
import time

import pytest
from loop_kit import ByHand, FakeEngine, FakeSource, at_once, eventually, make_settings, patient, running, step, train

from async_rl.orchestrator.stacks import describe_threads
from async_rl.orchestrator.stall import StallClock, StallError


def test_a_stall_is_so_many_seconds_without_progress():
    clock = StallClock(10.0, now_s=100.0)
    assert not clock.stalled(101.0)
    for second in range(102, 110):
        assert not clock.stalled(float(second))
    clock.note("a rollout ended")
    assert not clock.stalled(110.0)
    for second in range(111, 120):
        assert not clock.stalled(float(second))
    assert clock.stalled(120.0)
    assert (clock.last, clock.idle_s) == ("a rollout ended", 10.0)


def test_a_process_that_was_stopped_for_an_hour_did_not_stall():
    clock = StallClock(1800.0, now_s=0.0)
    assert not clock.stalled(3600.0)
    assert clock.idle_s == 4 * clock.look_every_s


def test_a_timeout_must_be_positive():
    with pytest.raises(ValueError, match=r"stall_timeout_s=0 must be > 0"):
        make_settings(stall_timeout_s=0)


def in_the_tool(done):
    done.wait(30)


def test_a_stall_is_reported_and_fails_the_run(caplog):
    done, reports = threading.Event(), []

    async def a_tool_that_hangs():
        await asyncio.sleep(3600)

    async def rollout(task, engine):
        if task.group_id == 2:
            await a_tool_that_hangs()
        if task.group_id == 3:
            await asyncio.to_thread(in_the_tool, done)
        return await at_once(task, engine)

    try:
        with running(rollout, stall_timeout_s=0.5, on_stall=reports.append) as orchestrator:
            step(orchestrator)
            with pytest.raises(
                StallError,
                match=r"no rollout ended and no newer weights were loaded for [\d.]+ s "
                r"\(stall_timeout_s=0\.5\); the last that happened: ",
            ):
                train(orchestrator)
    finally:
        done.set()
    (report,) = reports
    for expected in (
        "MainThread: waits for a batch, for ",
        "dispatcher: waits for capacity (limited by ",
        "watcher: waits for a published version",
        "planner: 2 groups are due by version 1, the oldest is group 2",
        "running: 2.0",
        "in_the_air: 4.0",
        "limited_by: bound",
        "waiting_for: ",
        "in a_tool_that_hangs",  # where the tasks wait, inside of everything
        "task group 2 sample 0 attempt 0, group 2 sample 1 attempt 0",
        "in in_the_tool",  # and the threads
        "asyncio tasks in thread rollout-",
    ):
        assert expected in report, report
    assert report in caplog.text


def test_each_kind_of_progress_counts():
    by_hand = ByHand()
    settings = {"batch_size": 1, "group_size": 1, "max_staleness": 4, "admit_ahead": 4, "max_steps": 9}
    with running(by_hand, stall_timeout_s=0.6, max_retries=50, max_failures=99, **settings) as orchestrator:
        by_hand.wait_started(5)
        for attempt in range(4):  # failed attempts
            time.sleep(0.25)
            by_hand.fail(0, 0, attempt)
        time.sleep(0.25)
        by_hand.finish(0, 0, 4)
        for group_id in range(1, 4):
            by_hand.finish(group_id)
        for _ in range(4):
            step(orchestrator, publish=False)
        for version in range(1, 5):  # loads
            time.sleep(0.25)
            orchestrator.fleet.publish(version, FakeSource(version))
            orchestrator.fleet.wait_served(version, patient())
        time.sleep(0.25)
        by_hand.finish(4)
        time.sleep(0.25)
        orchestrator.check()
        step(orchestrator, publish=False)
        time.sleep(0.4)
        orchestrator.check()
        with pytest.raises(StallError, match="the last that happened: the batch of version 4 was trained"):
            orchestrator.next_batch(patient())


def test_a_stall_is_found_even_if_somebody_holds_the_lock_for_ever():
    reports, let_go = [], threading.Event()

    def hold(orchestrator):
        with orchestrator._room.lock:
            let_go.wait(20)

    try:
        with running(at_once, stall_timeout_s=0.3, on_stall=reports.append) as orchestrator:
            holder = threading.Thread(target=hold, args=(orchestrator,), name="holder")
            holder.start()
            eventually(lambda: reports)
            with pytest.raises(StallError):
                eventually(lambda: orchestrator.check())
            let_go.set()
            holder.join()
    finally:
        let_go.set()
    assert "somebody held the lock of the control plane for 2 s" in reports[0]
    assert "thread holder:" in reports[0]


def test_no_watchdog_without_a_timeout():
    engine = FakeEngine()
    with running(ByHand(), engines=[engine]) as orchestrator:
        time.sleep(0.3)
        orchestrator.check()


def test_equal_stacks_are_shown_once():
    done = threading.Event()
    threads = [threading.Thread(target=in_the_tool, args=(done,), name=f"tool-{n}") for n in range(8)]
    for thread in threads:
        thread.start()
    try:
        text = describe_threads()
        assert "thread tool-0, tool-1, tool-2, tool-3, tool-4 and 3 more:" in text
        assert text.count("in in_the_tool") == 1
    finally:
        done.set()
        for thread in threads:
            thread.join()
