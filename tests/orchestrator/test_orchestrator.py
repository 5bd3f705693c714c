"""The control plane as a whole: steps, ages, failures, ends, recovery, with real threads and steered rollouts."""

import asyncio
import itertools
import random
import sqlite3
import threading
import time
from collections import Counter
from dataclasses import replace

import pytest
from loop_kit import (
    ByHand,
    FakeEngine,
    FakeSource,
    at_once,
    eventually,
    finished,
    make_prompts,
    make_settings,
    patient,
    running,
    step,
    train,
    waits,
)

from async_rl.orchestrator.ledger import Ledger
from async_rl.orchestrator.ledger_null import NullLedger
from async_rl.orchestrator.orchestrator import Orchestrator
from async_rl.orchestrator.records import Flight, Landing, RecordedBatch, Recovery
from async_rl.types import Group, Prompt, Segment, Trajectory

OUTCOMES = ("trained", "filtered", "failed", "dropped", "saved")


def jitter(scale_s, seed=0):
    """Rollouts of heavy-tailed length, a function of the task."""

    async def rollout(task, engine):
        head = engine.version
        await asyncio.sleep(random.Random(task.seed ^ seed).paretovariate(1.5) * scale_s)
        return finished(task, engine, head=head)

    return rollout


# Steps and ages


@pytest.mark.parametrize("staleness", [0, 1, 2, 4])
@pytest.mark.parametrize("policy", ["segment", "trajectory"])
def test_every_age_is_within_the_bound(staleness, policy):
    settings = {"max_staleness": staleness, "sampling_policy": policy, "max_steps": 12, "batch_size": 3}
    with running(jitter(0.001), **settings) as orchestrator:
        batches = train(orchestrator)
        assert [b.version for b in batches] == list(range(12))
        assert all(0 <= age <= staleness for b in batches for age in b.ages())
        assert {b.max_staleness for b in batches} == {staleness}
        books = orchestrator.outcomes()
        assert books["trained"] == 36
        assert books["admitted"] == 36  # the horizon admits nothing that no step could train


def test_s_0_is_the_synchronous_order():
    """CASES 11."""
    with running(jitter(0.001), max_staleness=0, batch_size=3, max_steps=4) as orchestrator:
        batches = train(orchestrator)
        assert [sorted(g.id for g in b.groups) for b in batches] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]
        assert all(b.ages() == [0, 0, 0] for b in batches)


def test_a_straggler_is_trained_in_time():
    """CASES 12, ten times faster."""

    async def rollout(task, engine):
        head = engine.version
        await asyncio.sleep(0.4 if task.group_id == 3 else 0.002)
        return finished(task, engine, head=head)

    with running(rollout, max_staleness=1, batch_size=2, max_steps=8) as orchestrator:
        trained = {}
        for _ in range(8):
            batch = step(orchestrator)
            time.sleep(0.015)
            trained |= {g.id: batch.version - g.head for g in batch.groups}
        assert trained[3] <= 1
        assert max(trained.values()) <= 1
        assert len(trained) == 16


def test_half_filtered_at_s_0_stays_at_age_0():
    """CASES 13."""

    async def rollout(task, engine):
        head = engine.version
        await asyncio.sleep(0.001)
        return finished(task, engine, reward=float(task.sample_index * (task.group_id % 2)), head=head)

    with running(rollout, max_staleness=0, filter_zero_variance=True, max_steps=6) as orchestrator:
        batches = []
        for _ in range(6):
            batches.append(step(orchestrator))
            time.sleep(0.005)
        assert all(b.ages() == [0, 0] for b in batches)
        assert all(g.id % 2 == 1 for b in batches for g in b.groups)
        assert orchestrator.outcomes()["filtered"] > 0


def test_age_counts_from_the_oldest_token():
    """CASES 15."""
    segments = (Segment(3, 0, 4), Segment(4, 4, 5), Segment(5, 5, 9))
    spanning = Trajectory(0, 0, [1] * 9, [1] * 9, [0.0] * 9, segments, 0, 1.0)
    external = replace(spanning, segments=(Segment(None, 0, 9),))  # CASES 16
    recovery = Recovery(
        version=5,
        next_group_id=2,
        kept=(
            Group(0, Prompt("toy/0/0", "toy", {}), 3, (spanning,)),
            Group(1, Prompt("toy/0/1", "toy", {}), 3, (external,)),
        ),
    )
    with running(
        at_once, start_version=5, recovered=recovery, max_staleness=2, max_steps=6, group_size=1
    ) as orchestrator:
        batch = step(orchestrator)
        assert [(g.head, g.tail) for g in batch.groups] == [(3, 5), (None, None)]
        assert batch.ages() == [2]
        assert batch.groups[0].trajectories[0].segments == segments


def test_an_engine_that_stamps_older_than_the_admission_is_a_failure():
    """DESIGN promise 4: head >= v at admission."""

    async def rollout(task, engine):
        return finished(task, engine, head=2)

    with (
        running(rollout, start_version=3, max_staleness=2) as orchestrator,
        pytest.raises(ValueError, match="has head version 2, older than version 3 at its admission"),
    ):
        train(orchestrator)


def test_mask_takes_stale_tokens_out_of_the_loss_and_allow_takes_everything():
    by_hand = ByHand()
    ahead = {"batch_size": 1, "group_size": 1, "max_concurrent": 9, "admit_ahead": 1, "max_steps": 9}
    with running(by_hand, stale_policy="mask", max_staleness=1, **ahead) as orchestrator:
        for group in (0, 2, 3):  # group 1 is a straggler of version 0, and nobody waits for it
            by_hand.wait_started(min(group + 1, 3))
            if group:
                by_hand.wait_started(group + 1)
            by_hand.finish(group)
            step(orchestrator)
            orchestrator.fleet.wait_served(orchestrator.snapshot()["trained_version"], patient())
        by_hand.finish(1)
        late = step(orchestrator).groups[0]
        assert (late.id, late.head, late.tail) == (1, 0, 3)
        assert late.trajectories[0].loss_mask == [0, 0, 1]  # the token of version 0 is out, that of version 3 is in


def test_a_batch_without_an_update_gives_its_places_back():
    with running(at_once, max_staleness=0, max_steps=2) as orchestrator:
        batch = orchestrator.next_batch(patient())
        orchestrator.batch_dropped(batch, "non-finite loss")
        assert orchestrator.snapshot()["trained_version"] == 0
        again = step(orchestrator)
        assert again.version == 0
        assert {g.id for g in again.groups}.isdisjoint(g.id for g in batch.groups)
        assert orchestrator.outcomes()["dropped"] == 2
        assert not [e for e in orchestrator.events() if e.name == "empty_batch"]


def test_a_batch_without_a_trainable_token_is_an_empty_batch():
    async def rollout(task, engine):
        return replace(finished(task, engine), loss_mask=[0, 0, 0])

    with running(rollout) as orchestrator:
        orchestrator.batch_dropped(orchestrator.next_batch(patient()), "no trainable token")
        (report,) = [e.value for e in orchestrator.events() if e.name == "empty_batch"]
        assert "no trainable token" in str(report)


def test_a_batch_must_be_ended_before_the_next():
    with running(at_once) as orchestrator:
        batch = orchestrator.next_batch(patient())
        with pytest.raises(RuntimeError, match="version 0 was neither trained nor dropped"):
            orchestrator.next_batch(patient())
        orchestrator.batch_trained(batch)
        with pytest.raises(RuntimeError, match="not the batch that next_batch"):
            orchestrator.batch_trained(batch)


def test_an_advantage_function_of_another_shape_is_refused():
    with running(at_once) as orchestrator:
        orchestrator._batches._advantages = lambda rewards: [[0.0]]
        with pytest.raises(ValueError, match=r"\[1\] numbers per group for \[2, 2\] rewards"):
            orchestrator.next_batch(patient())


# Empty batches (promise 13)


def test_no_signal_is_reported_with_the_rewards():
    async def rollout(task, engine):
        await asyncio.sleep(0.001)
        return finished(task, engine, reward=1.0)

    with running(rollout, filter_zero_variance=True, batch_size=3, group_size=2) as orchestrator:
        reports = []

        def poll():
            patience()
            reports.extend(e.value for e in orchestrator.events() if e.name == "empty_batch")
            if len(reports) >= 2:
                raise StopIteration

        patience = patient()
        with pytest.raises(StopIteration):
            orchestrator.next_batch(poll)
        assert reports[0].groups == 3
        assert reports[0].rewards == {1.0: 6}
        assert not reports[0].outage
        assert str(reports[0]).startswith("no signal: 3 groups in a row")
        assert orchestrator.outcomes()["filtered"] >= 6


def test_a_kept_group_in_between_is_no_empty_batch():
    by_hand = ByHand()
    with running(by_hand, filter_zero_variance=True, batch_size=2, group_size=2, max_staleness=0) as orchestrator:
        by_hand.wait_started(4)
        for group, rewards in ((0, (1.0, 1.0)), (1, (0.0, 1.0)), (2, (1.0, 1.0)), (3, (1.0, 1.0))):
            by_hand.wait_started(2 * group + 2)
            before = sum(orchestrator.outcomes()[o] for o in ("filtered", "kept"))
            for sample, reward in enumerate(rewards):
                by_hand.finish(group, sample, reward=reward)
            eventually(lambda b=before: sum(orchestrator.outcomes()[o] for o in ("filtered", "kept")) > b)
            reports = [e for e in orchestrator.events() if e.name == "empty_batch"]
            assert len(reports) == (1 if group == 3 else 0)


# Failures reach the trainer (CASES 7)


def break_the(part, orchestrator):
    def bug(*_):
        raise AssertionError(f"a bug in the {part}")

    if part == "rollout":
        orchestrator._train_sink.land = bug
    elif part == "dispatcher":
        orchestrator._dispatcher._prompts.at = bug
    elif part == "metrics":
        orchestrator._metrics.sample = bug
    elif part == "watcher":
        orchestrator.fleet._watcher._next = bug
    elif part == "ledger":
        orchestrator._ledger._commit = bug


@pytest.mark.parametrize("part", ["rollout", "dispatcher", "metrics", "watcher", "ledger"])
def test_a_bug_in_any_thread_is_raised_while_the_trainer_waits(part, tmp_path):
    async def rollout(task, engine):
        await asyncio.sleep(0.01)
        return finished(task, engine)

    with running(rollout, resume=False, ledger=Ledger(tmp_path / "run.db"), max_steps=None) as orchestrator:
        break_the(part, orchestrator)
        orchestrator.fleet.publish(0, FakeSource(0))
        orchestrator.resume()
        with pytest.raises(AssertionError, match=f"a bug in the {part}"):
            train(orchestrator)
        with pytest.raises(AssertionError, match=f"a bug in the {part}"):
            orchestrator.check()


def test_a_thread_that_ends_early_is_a_failure():
    with running(at_once) as orchestrator:
        orchestrator._rollout_threads[0].stop()
        with pytest.raises(RuntimeError, match="thread 'rollout-0' of the control plane ended while the run goes on"):
            orchestrator._main.wait("nothing", lambda: False, patient())


def test_the_first_failure_wins():
    with running(at_once) as orchestrator:
        orchestrator._supervisor.fail(ValueError("first"))
        orchestrator._supervisor.fail(ValueError("second"))
        with pytest.raises(ValueError, match="first"):
            orchestrator.next_batch(patient())


def test_poll_runs_often_and_what_it_raises_ends_the_wait():
    """CASES 10."""
    calls = []

    def poll():
        calls.append(time.monotonic())
        if len(calls) == 6:
            raise InterruptedError("SIGTERM")

    with running(ByHand()) as orchestrator, pytest.raises(InterruptedError):
        orchestrator.next_batch(poll)
    assert max(b - a for a, b in itertools.pairwise(calls)) < 5


# Ends


@pytest.mark.parametrize(("last_batch", "trained", "dropped"), [("drop", 6, 1), ("train", 7, 0)])
def test_the_data_ends(last_batch, trained, dropped, caplog):
    prompts = make_prompts(rows=7, epochs=1)
    with running(at_once, prompts=prompts, last_batch=last_batch, max_steps=100, max_staleness=2) as orchestrator:
        batches = train(orchestrator)
        assert sorted(g.prompt.data["n"] for b in batches for g in b.groups)[:6] == list(range(6))
        books = orchestrator.outcomes()
        assert (books["trained"], books["dropped"], books["admitted"]) == (trained, dropped, 7)
        assert f"last_batch={last_batch}" in caplog.text
        assert orchestrator.next_batch(patient()) is None


def test_every_prompt_is_trained_exactly_epochs_times():
    prompts = make_prompts(rows=6, epochs=3)
    with running(jitter(0.0005), prompts=prompts, max_steps=100, max_staleness=2) as orchestrator:
        batches = train(orchestrator)
        assert Counter(g.prompt.data["n"] for b in batches for g in b.groups) == dict.fromkeys(range(6), 3)


def test_drain_saves_what_finishes_in_time(tmp_path):
    by_hand = ByHand()
    ledger = Ledger(tmp_path / "run.db")
    with running(by_hand, ledger=ledger, group_size=1, batch_size=3, max_staleness=0) as orchestrator:
        by_hand.wait_started(3)
        by_hand.finish(1)
        threading.Timer(0.05, by_hand.finish, (2,)).start()
        assert orchestrator.drain(0.3, patient()) == 2
        assert orchestrator.outcomes()["running"] == 1
    assert ledger.balance().ended == {"saved": 3}
    recovery = Ledger(tmp_path / "run.db").recover(0)
    assert [g.id for g in recovery.kept] == [1, 2]
    assert [i for i, _ in recovery.unfinished] == [0]


def test_drain_is_over_as_soon_as_nothing_runs():
    with running(at_once, max_steps=1, max_staleness=0) as orchestrator:
        step(orchestrator)
        assert orchestrator.drain(600.0, patient()) == 0


def test_close_is_bounded_and_names_what_would_not_stop(caplog):
    """DESIGN promise 8: user code that blocks the event loop can't hold up the end."""
    blocked, done = threading.Event(), threading.Event()

    async def rollout(task, engine):
        blocked.set()
        done.wait(600)

    orchestrator = Orchestrator(
        make_settings(rollout_threads=1), engines=[FakeEngine()], prompts=make_prompts(), rollout=rollout,
        advantages=lambda r: r, ledger=NullLedger(),
    )  # fmt: skip
    orchestrator.start()
    orchestrator.fleet.publish(0, FakeSource(0))
    orchestrator.resume()
    assert blocked.wait(10)
    began_s = time.monotonic()
    assert orchestrator.close(0.5) == ["rollout-0"]
    assert time.monotonic() - began_s < 60
    assert "done.wait(600)" in caplog.text  # where it hangs
    done.set()
    eventually(lambda: not [t for t in threading.enumerate() if t.name == "rollout-0"])
    assert orchestrator.close(0.1) == []
    assert orchestrator.outcomes()["saved"] == orchestrator.outcomes()["admitted"]


def test_what_lands_after_the_end_is_ignored():
    by_hand = ByHand()
    with running(by_hand, batch_size=1, group_size=1, max_staleness=0) as orchestrator:
        by_hand.wait_started(1)
        orchestrator.close(5.0)
        slot = orchestrator.fleet.slots[0]
        flight = Flight(
            0, Prompt("toy/0/0", "toy", {}), 0, slot, 0, by_hand, (), {0: kept_group(0, 0).trajectories[0]}, 1
        )
        orchestrator._land(Landing(finished=[flight]))
        assert orchestrator.outcomes()["saved"] == 1
        assert orchestrator.outcomes()["kept"] == 0


def test_close_before_start_and_in_the_middle_of_a_batch():
    orchestrator = Orchestrator(
        make_settings(), engines=[FakeEngine()], prompts=make_prompts(), rollout=at_once, advantages=lambda r: r,
        ledger=NullLedger(),
    )  # fmt: skip
    assert orchestrator.close(1.0) == []
    with running(at_once) as orchestrator:
        orchestrator.next_batch(patient())


# Evaluation


def test_evaluation_counts_against_nothing_and_reports_failures():
    in_the_air, most = 0, 0

    async def evaluation(task, engine):
        nonlocal in_the_air, most
        in_the_air += 1
        most = max(most, in_the_air)
        await asyncio.sleep(0.001)
        in_the_air -= 1
        if task.prompt.id == "eval/toy/1" and task.sample_index == 2:
            raise ValueError("no answer")
        return finished(task, engine, reward=float(len(task.prompt.id)))

    with running(ByHand(), max_concurrent=5, rollout_threads=1, max_retries=1) as orchestrator:
        prompts = [Prompt(f"eval/toy/{i}", "toy", {"n": i}) for i in range(4)]
        before = orchestrator.outcomes()
        results = orchestrator.evaluate(0, prompts, 3, evaluation, patient())
        assert [r.prompt.id for r in results] == [p.id for p in prompts]
        assert [len(r.trajectories) for r in results] == [3, 2, 3, 3]
        assert [t.sample_index for t in results[1].trajectories] == [0, 1]
        assert results[1].failures == ("ValueError: no answer",)
        assert most == 5
        assert orchestrator.outcomes()["trained"] == before["trained"]
        assert orchestrator.outcomes()["kept"] == 0


def test_evaluation_repeats_with_the_same_seeds():
    seeds = []

    async def evaluation(task, engine):
        seeds.append((task.prompt.id, task.sample_index, task.seed))
        return finished(task, engine)

    prompts = [Prompt(f"eval/toy/{i}", "toy", {}) for i in range(3)]
    with running(ByHand(), resume=False) as orchestrator:
        for _ in range(2):
            orchestrator.evaluate(0, prompts, 2, evaluation, patient())
    assert sorted(seeds[:6]) == sorted(seeds[6:])
    assert len({seed for *_, seed in seeds}) == 6


def test_evaluation_broken_off_leaves_nothing_for_the_next():
    started = threading.Event()

    async def slow(task, engine):
        started.set()
        await asyncio.sleep(0.05)
        return finished(task, engine, reward=-1.0)

    def poll():
        if started.is_set():
            raise StopIteration

    prompts = [Prompt("eval/toy/0", "toy", {})]
    with running(ByHand(), resume=False) as orchestrator:
        with pytest.raises(StopIteration):
            orchestrator.evaluate(0, prompts, 2, slow, poll)
        (result,) = orchestrator.evaluate(0, prompts, 4, slow, patient())
        assert len(result.trajectories) == 4


# What a run shows


def test_snapshot_metrics_and_waits():
    by_hand = ByHand()
    with running(by_hand, batch_size=2, group_size=2, max_staleness=0, metrics_interval_s=0.01) as orchestrator:
        by_hand.wait_started(4)
        now = orchestrator.snapshot()
        assert (now["running"], now["running_trajectories"], now["kept"]) == (2.0, 4.0, 0.0)
        assert (now["limited_by"], now["waiting_for"]) == ("concurrency", "")
        seen = []
        threading.Timer(0.1, lambda: [by_hand.finish(g, s) for g in (0, 1) for s in (0, 1)]).start()
        batch = orchestrator.next_batch(lambda: seen.append(orchestrator.snapshot()["waiting_for"]))
        assert "2 more groups" in seen
        orchestrator.batch_trained(batch)
        metrics = orchestrator.drain_metrics()
        assert metrics["rollout/finished"] == 4
        assert metrics["rollout/groups_kept"] == 2
        assert metrics["rollout/trainable_tokens"] == 8
        assert metrics["time/wait_for_batch_s"] > 0.05
        assert metrics["time/load_s"] >= 0
        assert 0 < metrics["queue/running"] <= 2
        shares = [value for name, value in metrics.items() if name.startswith("limit/")]
        assert sum(shares) == pytest.approx(1.0, abs=0.05)
        assert "concurrency" in orchestrator.limits()
        assert "rollout/finished" not in orchestrator.drain_metrics()  # an interval is told once
        assert waits(orchestrator)["metrics"].startswith("the next reading of the gauges")


def test_events_tell_of_groups_and_loads():
    with running(at_once, max_steps=2, max_staleness=0) as orchestrator:
        train(orchestrator)
        orchestrator.fleet.wait_served(2, patient())
        eventually(lambda: len(orchestrator._events) == 7)
        events = orchestrator.events()
        assert [e.value for e in events if e.name == "policy_loaded"] == [0, 1, 2]
        assert sorted(e.value.id for e in events if e.name == "rollout_end") == [0, 1, 2, 3]
        assert orchestrator.events() == []


# Settings


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_retries": -1}, "max_retries=-1 must be >= 0"),
        ({"rollout_threads": 0}, "rollout_threads=0 must be >= 1"),
        ({"rollout_timeout_s": 0}, "rollout_timeout_s=0 must be > 0"),
        ({"sampling_policy": "token"}, "sampling_policy='token' must be one of auto, segment, trajectory"),
        ({"group_completion": "quorum"}, "quorum needs min_group_size"),
        ({"min_group_size": 2}, "remove min_group_size or set group_completion=quorum"),
        (
            {"group_completion": "quorum", "min_group_size": 3, "straggler_timeout_s": 1.0},
            r"min_group_size=3 must be in \[1, group_size=2\]",
        ),
        ({"filter_zero_variance": True, "group_size": 1}, "would filter every group"),
    ],
)
def test_impossible_settings_name_the_key(changes, message):
    with pytest.raises(ValueError, match=message):
        make_settings(**changes)


# Recovery (CASES 14, 17, 18, 19)


def kept_group(group_id, version, samples=1):
    prompt = make_prompts().at(group_id)
    trajectories = tuple(
        Trajectory(i, 0, [1, 2], [0, 1], [0.0, -0.5], (Segment(version, 1, 2),), 1, float(i)) for i in range(samples)
    )
    return Group(group_id, prompt, version, trajectories)


def test_the_first_step_after_a_resume_admits_no_more_than_the_bound():
    """CASES 14: version 40, B = 8, S = 2 admits at most 24 groups (elsewhere: 344)."""
    by_hand = ByHand()
    recovery = Recovery(
        version=40,
        next_group_id=344,
        kept=tuple(kept_group(i, 39) for i in range(320, 325)),
        unfinished=tuple((i, {}) for i in range(325, 330)),
        ended={"trained": 320},
    )
    settings = {"batch_size": 8, "group_size": 1, "max_staleness": 2, "admit_ahead": 2, "max_concurrent": 10**6}
    with running(by_hand, start_version=40, recovered=recovery, max_steps=100, **settings) as orchestrator:
        eventually(lambda: waits(orchestrator).get("dispatcher", "").startswith("capacity (limited by bound)"))
        assert orchestrator.snapshot()["running"] == 19
        assert orchestrator.snapshot()["kept"] == 5
        eventually(lambda: len(by_hand.started) == 19)
        assert {t.group_id for t in by_hand.started} == {*range(325, 330), *range(344, 358)}  # CASES 18
        assert all(t.prompt.data["n"] == t.group_id for t in by_hand.started)


def test_recorded_batches_are_trained_again_before_anything_is_admitted(tmp_path):
    ledger = Ledger(tmp_path / "run.db")
    with running(at_once, ledger=ledger, max_steps=4, max_staleness=0) as orchestrator:
        first = train(orchestrator)
    reopened = Ledger(tmp_path / "run.db")
    by_hand = ByHand()
    recovery = reopened.recover(2)
    settings = {"ledger": reopened, "start_version": 2, "recovered": recovery, "max_steps": 5, "max_staleness": 0}
    with running(by_hand, **settings) as orchestrator:
        for before in first[2:]:
            eventually(lambda: "replay" in waits(orchestrator).get("dispatcher", ""))
            batch = step(orchestrator, publish=False)
            assert batch.version == before.version
            assert [g.id for g in batch.groups] == [g.id for g in before.groups]
            assert batch.advantages == before.advantages
            assert [t.logprobs for t in batch.trajectories] == [t.logprobs for t in before.trajectories]
        assert "replay" in waits(orchestrator)["dispatcher"]  # trained again, but the engines serve version 2 still
        assert by_hand.started == []
        orchestrator.fleet.publish(4, FakeSource(4))
        assert {t.group_id for t in by_hand.wait_started(4)} == {8, 9}
        for group in (8, 9):
            for sample in (0, 1):
                by_hand.finish(group, sample)
        assert step(orchestrator).version == 4
    assert reopened.balance().ended == {"trained": 10}
    assert reopened.balance().open == 0


def test_a_running_group_is_run_again_without_its_finished_samples():
    by_hand = ByHand()
    landed = {1: kept_group(0, 6, samples=2).trajectories[1]}
    recovery = Recovery(version=7, next_group_id=1, unfinished=((0, landed),))
    settings = {"batch_size": 1, "group_size": 2, "max_staleness": 1, "max_steps": 8}
    with running(by_hand, start_version=7, recovered=recovery, **settings) as orchestrator:
        (task,) = by_hand.wait_started(1)
        assert (task.group_id, task.sample_index) == (0, 0)
        assert orchestrator.snapshot()["running_trajectories"] == 1  # a finished sample holds no place
        by_hand.finish(0, 0)
        batch = step(orchestrator)
        assert [t.head for t in batch.trajectories] == [7, 6]
        assert batch.ages() == [1]


def test_a_run_stopped_before_it_went_on_does_not_wait_for_what_is_not_in_the_air():
    """A drain of a run that was resumed, and stopped again while it trains recorded batches."""
    landed = {1: kept_group(2, 6, samples=2).trajectories[1]}
    recovery = Recovery(
        version=7,
        next_group_id=3,
        batches=tuple(RecordedBatch([i], lambda i=i: (kept_group(i, 7, samples=2),)) for i in (0, 1)),
        unfinished=((2, landed),),
    )
    settings = {"batch_size": 1, "group_size": 2, "max_staleness": 2, "max_steps": 20}
    with running(ByHand(), start_version=7, recovered=recovery, **settings) as orchestrator:
        step(orchestrator)
        assert orchestrator.drain(600.0, patient()) == 0


def test_a_group_whose_samples_all_finished_before_the_kill_is_kept_at_once():
    landed = dict(enumerate(kept_group(0, 7, samples=2).trajectories))
    recovery = Recovery(version=7, next_group_id=1, unfinished=((0, landed),))
    with running(ByHand(), start_version=7, recovered=recovery, batch_size=1, max_steps=8) as orchestrator:
        assert [g.id for g in step(orchestrator).groups] == [0]


def test_recovery_must_match_the_weights_and_the_data():
    def build(**changes):
        return Orchestrator(
            make_settings(), engines=[FakeEngine()], prompts=make_prompts(rows=2, epochs=1), rollout=at_once,
            advantages=lambda r: r, ledger=NullLedger(), **changes,
        )  # fmt: skip

    with pytest.raises(ValueError, match="recovered at version 3, but the weights are those of 2"):
        build(start_version=2, recovered=Recovery(3, 0))
    with pytest.raises(ValueError, match="group 7 of the run's record has no prompt"):
        build(recovered=Recovery(0, 8, unfinished=((7, {}),)))


def snapshot_of(path, copy):
    """What kill -9 would leave: every transaction committed so far, no other."""
    with sqlite3.connect(path) as source, sqlite3.connect(copy) as target:
        source.backup(target)
    target.close()
    source.close()
    return copy


@pytest.mark.parametrize("seed", range(6))
def test_killed_at_any_moment_and_resumed_nothing_is_lost_or_trained_twice(seed, tmp_path):
    """CASES 17 and promise 10, with checkpoints at random versions."""
    rng = random.Random(seed)
    steps, width, size = 8, 3, 2
    settings = {"max_steps": steps, "batch_size": width, "group_size": size, "max_staleness": rng.choice([0, 1, 2])}
    settings["rollout_threads"] = 1
    trained: dict[int, list[int]] = {}
    path, version = tmp_path / "run-0.db", 0
    recovered, landed_before = None, set()
    for life in range(4):
        ledger = Ledger(path)
        if life:
            recovered = ledger.recover(version)
            landed_before = {(g.id, t.sample_index) for b in recovered.batches for g in b for t in g.trajectories}
            landed_before |= {(g.id, t.sample_index) for g in recovered.kept for t in g.trajectories}
            landed_before |= {(i, sample) for i, landed in recovered.unfinished for sample in landed}
        ran: list[tuple[int, int]] = []
        latency = jitter(0.001, seed)

        async def rollout(task, engine, ran=ran, latency=latency):
            ran.append((task.group_id, task.sample_index))
            return await latency(task, engine)

        last = life == 3
        with running(rollout, ledger=ledger, start_version=version, recovered=recovered, **settings) as orchestrator:
            goal = steps if last else min(version + rng.randint(1, 3), steps)
            for _ in range(goal - version):
                batch = step(orchestrator)
                assert all(age <= settings["max_staleness"] for age in batch.ages())
                trained[batch.version] = [g.id for g in batch.groups]
                assert orchestrator.outcomes()["running"] + orchestrator.outcomes()["kept"] <= 9 * width
            if not last:
                time.sleep(rng.random() * 0.004)
                eventually(
                    lambda p=path, v=goal: v == 0 or _ended_batches(p) >= v
                )  # a checkpoint is written after its step
                path = snapshot_of(path, tmp_path / f"run-{life + 1}.db")
                version = rng.randint(max(version, goal - 2), goal)
        assert not landed_before & set(ran), "a finished sample was generated again"
        assert len(ran) == len(set(ran))
    assert sorted(i for ids in trained.values() for i in ids) == list(range(steps * width))
    assert ledger.balance().ended == {"trained": steps * width}
    assert ledger.balance().open == 0


def _ended_batches(path):
    with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as db:
        return db.execute("SELECT count(DISTINCT version) FROM batches WHERE outcome = 'trained'").fetchone()[0]
