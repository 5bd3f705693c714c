"""Engines that die: closed at once, started again, loaded, and their groups flown on (CASES 8)."""

import asyncio
import random
import threading
import time
from types import SimpleNamespace

import pytest
from loop_kit import (
    ByHand,
    FakeEngine,
    FakeSource,
    eventually,
    finished,
    patient,
    running,
    step,
    train,
    waits,
)

from async_rl.orchestrator.ledger import Ledger
from async_rl.orchestrator.restarts import EngineLostError
from async_rl.orchestrator.stall import StallClock
from async_rl.orchestrator.watcher import LoadError
from async_rl.types import Prompt


class DiedError(RuntimeError):
    engine_died = True
    fatal = True


class NotServingError(RuntimeError):
    """What an engine says that was started again: no request of its earlier life is known to it."""

    fatal = True


class Mortal(FakeEngine):
    """Dies when told to, and is a new engine once it was closed and started again.

    ``knows`` whether it tells by itself that it died; ``on_start(n)`` may await or raise at the n-th start.
    """

    def __init__(self, name="mortal-0", *, knows=False, on_start=None, **kwargs):
        super().__init__(name, **kwargs)
        self.knows = knows
        self.on_start = on_start
        self.dead = False
        self.closed = 0
        self.starts = 0
        self._lock = threading.Lock()

    @property
    def died(self):
        return DiedError(f"{self.name} is gone") if self.dead and self.knows else None

    def serve(self, life=None):
        """The version served to a request that came in its ``life``-th life."""
        with self._lock:
            if self.dead:
                raise DiedError(f"{self.name} is gone")
            if life not in (None, self.starts) or self.version < 0:
                raise NotServingError(f"{self.name} does not serve this")
            return self.version

    async def load_weights(self, version, source):
        if not self.dead:
            await super().load_weights(version, source)
        if self.dead:
            raise DiedError(f"{self.name} is gone")

    async def close(self):
        self.closed += 1

    async def start(self):
        self.starts += 1
        if self.on_start is not None:
            await self.on_start(self.starts)
        with self._lock:
            self.version = -1
            self.dead = False


def stamped(task, version, reward=None, head=None):
    return finished(task, SimpleNamespace(version=version), reward, head)


async def at_once(task, engine):
    return stamped(task, engine.serve())


async def long_or_dead(task, engine):
    """A rollout that notices a death at its next token."""
    life = engine.starts
    head = engine.serve(life)
    for _ in range(4):
        await asyncio.sleep(random.Random(task.seed).random() * 0.004)
        tail = engine.serve(life)
    return stamped(task, tail, head=head)


class MortalByHand(ByHand):
    """Rollouts ended by hand, or by the death of their engine; flown again, they end at the same word."""

    def __init__(self):
        super().__init__()
        self.deaths = []

    async def __call__(self, task, engine):
        life = engine.starts
        head = tail = engine.serve(life)
        future = self._future(*self._key(task))
        self.started.append(task)
        while not future.done():
            if engine.dead:
                self.deaths.append(task)
            tail = engine.serve(life)
            await asyncio.sleep(0.002)
        return stamped(task, tail, future.result(), head)


def slow_start(seconds):
    async def on_start(n):
        await asyncio.sleep(seconds)

    return on_start


def held_start():
    """A start that lasts until the test lets it end."""
    go = threading.Event()

    async def on_start(n):
        while not go.is_set():
            await asyncio.sleep(0.002)

    return go, on_start


@pytest.mark.parametrize("knows", [False, True])
def test_a_dead_engine_comes_back_with_the_current_weights_and_its_groups_end_once(knows, caplog):
    engine = Mortal(knows=knows)
    with running(long_or_dead, engines=[engine], max_steps=6) as orchestrator:
        step(orchestrator)
        step(orchestrator)
        orchestrator.fleet.wait_served(2, patient())
        engine.dead = True
        batches = train(orchestrator)
        assert [b.version for b in batches] == [2, 3, 4, 5]
        assert all(0 <= age <= 1 for b in batches for age in b.ages())
        assert orchestrator.outcomes()["trained"] == orchestrator.outcomes()["admitted"] == 12
        assert orchestrator.snapshot()["engine_restarts"] == 1
    assert (engine.closed, engine.starts) == (1, 1)
    assert 2 <= engine.loads[engine.loads.index(2) + 1] <= 4  # the version of then, although nobody published again
    assert (
        "engine mortal-0 died (mortal-0 is gone); starting it again (restart 1, max_engine_restarts=3)" in caplog.text
    )
    assert "engine mortal-0 is back after" in caplog.text


def test_a_death_is_no_failure_and_no_retry_and_keeps_what_landed():
    by_hand = MortalByHand()
    engine = Mortal()
    go, engine.on_start = held_start()
    settings = {"batch_size": 1, "group_size": 3, "max_staleness": 0, "max_retries": 0, "max_failures": 0}
    with running(by_hand, engines=[engine], **settings) as orchestrator:
        by_hand.wait_started(3)
        by_hand.finish(0, 1)
        eventually(lambda: orchestrator.snapshot()["running_trajectories"] == 2)
        engine.dead = True
        eventually(lambda: orchestrator.snapshot()["engines_open"] == 0)
        assert orchestrator.snapshot()["limited_by"] == "engines"
        assert orchestrator.snapshot()["running"] == 1
        assert orchestrator.snapshot()["running_trajectories"] == 2  # the places are kept, what landed has none
        assert len(by_hand.started) == 3
        go.set()
        again = by_hand.wait_started(5)[3:]
        assert [(t.group_id, t.sample_index, t.attempt) for t in again] == [(0, 0, 0), (0, 2, 0)]
        by_hand.finish(0, 0)
        by_hand.finish(0, 2)
        batch = step(orchestrator)
        assert [t.sample_index for t in batch.trajectories] == [0, 1, 2]
        assert orchestrator.drain_metrics().get("rollout/retries") is None


def test_a_sample_that_failed_for_good_is_not_flown_again():
    by_hand = MortalByHand()
    engine = Mortal()
    quorum = {"group_completion": "quorum", "min_group_size": 1, "straggler_timeout_s": 0.0}
    settings = {"batch_size": 1, "group_size": 3, "max_staleness": 0, "max_retries": 0, **quorum}
    with running(by_hand, engines=[engine], **settings) as orchestrator:
        by_hand.wait_started(3)
        by_hand.fail(0, 1)
        eventually(lambda: orchestrator.snapshot()["running_trajectories"] == 2)
        engine.dead = True
        again = by_hand.wait_started(5)[3:]
        assert [t.sample_index for t in again] == [0, 2]
        by_hand.finish(0, 2)
        assert [t.sample_index for t in step(orchestrator).trajectories] == [2]


def test_a_complete_quorum_goes_on_without_the_stragglers_of_a_dead_engine():
    by_hand = MortalByHand()
    engine = Mortal()
    quorum = {"group_completion": "quorum", "min_group_size": 1, "straggler_timeout_s": 0.3}
    with running(by_hand, engines=[engine], batch_size=1, group_size=2, max_staleness=0, **quorum) as orchestrator:
        by_hand.wait_started(2)
        by_hand.finish(0, 0)
        eventually(lambda: orchestrator.snapshot()["running_trajectories"] == 1)
        engine.dead = True
        by_hand.wait_started(3)  # the other one, again; it never ends
        assert [t.sample_index for t in step(orchestrator).trajectories] == [0]


def test_while_one_engine_is_down_the_other_takes_its_groups_and_every_load():
    by_hand = MortalByHand()
    go, on_start = held_start()
    engines = [Mortal("a", on_start=on_start), Mortal("b")]
    with running(by_hand, engines=engines, batch_size=2, group_size=1, max_staleness=1) as orchestrator:
        by_hand.wait_started(4)
        engines[0].dead = True
        again = by_hand.wait_started(6)[4:]
        eventually(lambda: orchestrator.snapshot()["engines_open"] == 1)
        assert {t.group_id for t in again} == {t.group_id for t in by_hand.deaths}
        assert len(by_hand.deaths) == 2
        for group in range(4):
            by_hand.finish(group)
        step(orchestrator)
        orchestrator.fleet.wait_served(1, patient())  # the dead one is not waited for
        assert engines[1].version == 1
        assert "engine a to come back" in waits(orchestrator)["restart-a"]
        go.set()
        eventually(lambda: engines[0].version == 1 and orchestrator.snapshot()["engines_open"] == 2)


def test_deaths_of_several_engines_at_random_moments(tmp_path):
    rng = random.Random(5)
    engines = [Mortal(f"e{i}", knows=bool(i % 2), on_start=slow_start(0.01 * i)) for i in range(3)]
    ledger = Ledger(tmp_path / "run.db")
    settings = {"max_staleness": 2, "max_steps": 60, "batch_size": 3, "max_engine_restarts": 10_000}
    over = threading.Event()

    def kill():
        while not over.wait(rng.random() * 0.05):
            rng.choice(engines).dead = True

    killer = threading.Thread(target=kill)
    with running(long_or_dead, engines=engines, ledger=ledger, **settings) as orchestrator:
        killer.start()
        try:
            batches = train(orchestrator)
        finally:
            over.set()
            killer.join()
        assert orchestrator.snapshot()["engine_restarts"] > 10
        trained = [g.id for b in batches for g in b.groups]
        assert len(trained) == len(set(trained)) == 180
        assert all(0 <= age <= 2 for b in batches for age in b.ages())
        assert [len(g.trajectories) for b in batches for g in b.groups] == [2] * 180
    assert ledger.balance().ended == {"trained": 180}


@pytest.mark.parametrize("policy", ["segment", "trajectory"])
def test_deaths_do_not_mix_versions_under_trajectory_sampling(policy):
    engine = Mortal()
    settings = {"sampling_policy": policy, "max_staleness": 2, "max_steps": 20, "max_engine_restarts": 10_000}
    with running(long_or_dead, engines=[engine], **settings) as orchestrator:
        mixed = []
        for n in range(20):
            if n % 4 == 1:
                engine.dead = True
            mixed += [t.head != t.tail for t in step(orchestrator).trajectories]
        assert orchestrator.snapshot()["engine_restarts"] >= 3
        assert policy == "segment" or not any(mixed)


def test_user_code_that_wraps_the_death_hides_nothing():
    async def rollout(task, engine):
        engine.dead = engine.dead or (task.group_id == 2 and not engine.starts)
        try:
            return stamped(task, engine.serve())
        except DiedError as error:
            raise ValueError("my environment failed") from error

    with running(rollout, engines=[Mortal()], max_retries=0, max_failures=0) as orchestrator:
        train(orchestrator)
        assert orchestrator.outcomes()["failed"] == 0
        assert orchestrator.snapshot()["engine_restarts"] == 1


def test_user_code_that_makes_a_result_of_the_death_is_not_believed():
    async def rollout(task, engine):
        version = engine.serve()
        engine.dead = engine.dead or (task.group_id == 2 and not engine.starts)
        try:
            engine.serve()
        except DiedError:
            return stamped(task, version, reward=-99.0)
        return stamped(task, version)

    with running(rollout, engines=[Mortal(knows=True)]) as orchestrator:
        assert min(min(g.rewards) for b in train(orchestrator) for g in b.groups) == 0.0
        assert orchestrator.snapshot()["engine_restarts"] == 1


def test_a_rollout_that_is_busy_elsewhere_is_given_up_with_its_engine():
    """A tool call that goes on for long would be thrown away at its next turn: it is flown again at once."""
    engine, calls = Mortal(knows=True), []

    async def rollout(task, engine):
        calls.append(task)
        if len(calls) == 1:
            await asyncio.sleep(3600)
        return stamped(task, engine.serve())

    with running(rollout, engines=[engine], batch_size=1, group_size=1, max_staleness=0) as orchestrator:
        eventually(lambda: len(calls) == 1)
        engine.dead = True
        assert step(orchestrator).groups[0].id == 0
        assert calls[0] == calls[1]


# loads


@pytest.mark.parametrize("version", [0, 1])
def test_an_engine_that_dies_over_a_load_is_no_failed_load(version):
    async def on_load(loaded):
        if loaded >= version and not engine.starts:
            engine.dead = True

    engine = Mortal(on_load=on_load)
    with running(at_once, engines=[engine]) as orchestrator:
        assert len(train(orchestrator)) == 5
        assert orchestrator.snapshot()["engine_restarts"] == 1


def test_an_engine_found_dead_meanwhile_makes_no_load_fail():
    """The load may end with whatever error; that the process died is known from elsewhere."""

    async def on_load(version):
        if version == 1 and not engine.starts:
            engine.dead = True
            eventually(lambda: orchestrator.snapshot()["engine_restarts"] == 1)
            raise OSError("broken pipe")

    engine = Mortal(on_load=on_load, knows=True)
    with running(at_once, engines=[engine]) as orchestrator:
        assert len(train(orchestrator)) == 5


def test_a_load_that_fails_after_a_restart_ends_the_run():
    async def on_load(version):
        if engine.starts:
            raise OSError("no")

    engine = Mortal(on_load=on_load, knows=True)
    with running(at_once, engines=[engine]) as orchestrator:
        step(orchestrator)
        engine.dead = True
        with pytest.raises(LoadError, match="engine mortal-0: loading version"):
            train(orchestrator)


# evaluation and other questions of the main thread


@pytest.mark.parametrize("others", [0, 1])
def test_an_evaluation_survives_the_death_of_its_engine_and_the_reload_passes_the_hold(others):
    by_hand = MortalByHand()
    engines = [Mortal("a"), *(Mortal(f"b{i}") for i in range(others))]
    prompts = [Prompt(f"eval/{i}", "toy", {}) for i in range(4)]
    with running(at_once, engines=engines, resume=False) as orchestrator:

        def die():
            by_hand.wait_started(2)
            engines[0].dead = True
            eventually(lambda: engines[0].starts == 1)
            by_hand.wait_started(3)
            for n in range(4):
                by_hand.finish(-1 - n)

        killer = threading.Thread(target=die)
        killer.start()
        with orchestrator.fleet.hold_loads():
            results = orchestrator.evaluate(0, prompts, 1, by_hand, patient())
        killer.join()
        assert [len(r.trajectories) for r in results] == [1, 1, 1, 1]
        assert not any(r.failures for r in results)
        orchestrator.resume()
        step(orchestrator)


def test_an_engine_that_comes_back_under_a_hold_loads_only_what_the_others_serve():
    engines = [Mortal("a", knows=True), Mortal("b")]
    with running(at_once, engines=engines) as orchestrator:
        with orchestrator.fleet.hold_loads():
            step(orchestrator)  # version 1 is published, and b goes on serving 0
            engines[0].dead = True
            eventually(lambda: engines[0].starts == 1)
            time.sleep(0.05)
            assert engines[0].loads == [0]
            assert orchestrator.snapshot()["engines_open"] == 1
        orchestrator.fleet.wait_served(1, patient())
        eventually(lambda: engines[0].loads == [0, 1])


def test_what_is_asked_of_an_engine_is_asked_again_once_it_is_back():
    engine, answers = Mortal(), []

    def work():
        answers.append(engine.version)
        if len(answers) == 1:
            engine.dead = True
        engine.serve()
        return "answer"

    with running(at_once, engines=[engine], resume=False) as orchestrator:
        with orchestrator.fleet.hold_loads():
            assert orchestrator.fleet.ask(engine, work, patient()) == "answer"
        assert answers == [0, 0]
        with pytest.raises(ZeroDivisionError):
            orchestrator.fleet.ask(engine, lambda: 1 // 0, patient())


def test_an_engine_that_is_away_is_not_waited_for_while_another_one_serves():
    """A server that died before its weights were compared stopped the run until somebody started it again."""
    may_start = threading.Event()

    async def slow(n):
        while n and not may_start.is_set():
            await asyncio.sleep(0.001)

    away, engine = Mortal("a", knows=True, on_start=slow), Mortal("b")

    def dies():
        away.dead = True
        away.serve()

    with running(at_once, engines=[away, engine], resume=False) as orchestrator:
        try:
            with orchestrator.fleet.hold_loads():
                assert orchestrator.fleet.ask(away, dies, patient()) is None
                assert orchestrator.fleet.ask(engine, lambda: "answer", patient()) == "answer"
        finally:
            may_start.set()


# the budget


@pytest.mark.parametrize("budget", [0, 2])
def test_more_deaths_than_the_budget_end_the_run_with_the_first_one(budget):
    engine = Mortal("vllm-3", knows=True)
    with running(at_once, engines=[engine], max_engine_restarts=budget, max_steps=100) as orchestrator:
        step(orchestrator)
        for n in range(budget):
            engine.dead = True
            eventually(lambda n=n: engine.starts == n + 1 and orchestrator.snapshot()["engines_open"] == 1)
        engine.dead = True
        with pytest.raises(
            EngineLostError,
            match=f"engine vllm-3 died and is not started again: {budget} restarts were made "
            rf"\(max_engine_restarts={budget}\). The first death: vllm-3 is gone",
        ) as raised:
            train(orchestrator)
        assert isinstance(raised.value.__cause__, DiedError)
        assert engine.starts == budget


def test_a_start_that_fails_is_a_death_too():
    async def on_start(n):
        raise OSError(f"no memory, {n}")

    engine = Mortal(knows=True, on_start=on_start)
    with running(at_once, engines=[engine], max_engine_restarts=1) as orchestrator:
        step(orchestrator)
        engine.dead = True
        with pytest.raises(EngineLostError, match=r"first death: mortal-0 is gone\. The last: no memory, 1"):
            train(orchestrator)


def test_two_witnesses_of_one_death_are_one_death():
    engine = Mortal(knows=True)
    with running(long_or_dead, engines=[engine], rollout_threads=4, max_engine_restarts=1, max_staleness=4) as o:
        step(o)
        engine.dead = True
        assert len(train(o)) == 4
        assert o.snapshot()["engine_restarts"] == 1


class Remote(Mortal):
    """A server that somebody else starts again."""

    restarts_itself = True
    start_timeout_s = 0.2


def test_a_server_that_restarts_itself_is_waited_for_and_costs_nothing_while_another_one_is_open(monkeypatch, caplog):
    monkeypatch.setattr("async_rl.orchestrator.restarts._RETRY_S", 0.02)

    async def on_start(n):
        if n < 30:
            raise OSError("connection refused")

    engines = [Remote("a", knows=True, on_start=on_start), Remote("b", knows=True)]
    with running(at_once, engines=engines, max_engine_restarts=0) as orchestrator:
        step(orchestrator)
        engines[0].dead = True
        eventually(lambda: engines[0].starts > 20)  # for longer than start_timeout_s
        step(orchestrator)
        eventually(lambda: orchestrator.snapshot()["engines_open"] == 2)
    assert "engine a died (a is gone); the run goes on with the others, and takes it back when it is up" in caplog.text
    assert "starting it again" not in caplog.text


def test_a_server_has_its_start_timeout_from_the_moment_when_the_last_other_one_closed(monkeypatch):
    monkeypatch.setattr("async_rl.orchestrator.restarts._RETRY_S", 0.02)

    async def never(n):
        raise OSError("connection refused")

    engines = [Remote("a", knows=True, on_start=never), Remote("b", knows=True, on_start=slow_start(0.1))]
    with running(at_once, engines=engines, max_engine_restarts=1) as orchestrator:
        engines[0].dead = True
        eventually(lambda: engines[0].starts > 20)
        engines[1].dead = True
        eventually(lambda: engines[1].starts == 1 and orchestrator.snapshot()["engines_open"] == 1)
        step(orchestrator)


def test_with_no_server_open_the_run_ends_after_the_start_timeout(monkeypatch, caplog):
    monkeypatch.setattr("async_rl.orchestrator.restarts._RETRY_S", 0.02)

    async def on_start(n):
        raise OSError("connection refused")

    engine = Remote("a", knows=True, on_start=on_start)
    with running(at_once, engines=[engine], max_engine_restarts=1) as orchestrator:
        step(orchestrator)
        engine.dead = True
        began_s = time.monotonic()
        told = (
            r"engine a died and did not come back within start_timeout_s=0\.2 s, .*The last: connection refused\. Start"
        )
        with pytest.raises(EngineLostError, match=told):
            train(orchestrator)
        assert time.monotonic() - began_s > 0.2
        assert engine.starts > 2
    assert "waiting for it to come back, up to start_timeout_s=0.2 s" in caplog.text
    assert "outage 1, max_engine_restarts=1" in caplog.text


def test_a_server_that_dies_too_often_with_no_other_open_ends_the_run():
    engine = Remote("a", knows=True)
    with running(at_once, engines=[engine], max_engine_restarts=0) as orchestrator:
        step(orchestrator)
        engine.dead = True
        told = r"engine a died and is not waited for: 0 outages were waited out \(max_engine_restarts=0\)"
        with pytest.raises(EngineLostError, match=told):
            train(orchestrator)


# the end


def test_the_run_can_end_while_an_engine_starts():
    _, on_start = held_start()
    engine = Mortal(knows=True, on_start=on_start)
    with running(at_once, engines=[engine]) as orchestrator:
        step(orchestrator)
        engine.dead = True
        eventually(lambda: engine.starts == 1)
        assert orchestrator.close(60.0) == []


def test_groups_in_flight_fly_on_during_a_drain():
    by_hand = MortalByHand()
    engine = Mortal()
    with running(by_hand, engines=[engine], batch_size=2, group_size=1, max_staleness=0) as orchestrator:
        by_hand.wait_started(2)

        def die():
            engine.dead = True
            by_hand.wait_started(4)
            by_hand.finish(0)
            by_hand.finish(1)

        threading.Timer(0.05, die).start()
        assert orchestrator.drain(20.0, patient()) == 2


def test_a_source_is_kept_for_an_engine_that_comes_back_until_there_is_a_newer_one():
    with running(at_once, engines=[Mortal()]) as orchestrator:
        step(orchestrator, publish=False)
        first, second = FakeSource(1), FakeSource(1)
        orchestrator.fleet.publish(1, first)
        orchestrator.fleet.wait_served(1, patient())
        assert not first.released
        orchestrator.fleet.publish(1, second)
        eventually(lambda: first.released)


def test_an_engine_that_dies_as_soon_as_it_is_back_is_no_progress():
    """Virtual clock: a minute for every death, load and return; nothing ends, so that the run stalls after ten."""
    engine, by_hand = Mortal(), MortalByHand()
    with running(by_hand, engines=[engine], max_engine_restarts=99, batch_size=1, group_size=1) as orchestrator:
        by_hand.wait_started(2)
        clock = orchestrator._stall._clock = StallClock(600.0, now_s=0.0)
        clock.look_every_s = 60.0
        stalled = []
        for minute in range(1, 14):
            flown = len(by_hand.started)
            engine.dead = True
            by_hand.wait_started(flown + 2)  # both groups are in the air again, on the engine that came back
            stalled.append(clock.stalled(60.0 * minute))
        assert stalled == [False] * 9 + [True] * 4
        assert engine.starts == 13
        assert clock.last == "the start"
        by_hand.finish(0)
        step(orchestrator)
        orchestrator.fleet.wait_served(1, patient())
        assert not clock.stalled(60.0 * 14)
        assert clock.last == "an engine loaded newer weights"
