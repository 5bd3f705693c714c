"""WeightWatcher: what is loaded is what is served, in order, with a deadline, and nothing is leaked."""

import asyncio
import threading

import pytest
from loop_kit import ByHand, FakeEngine, FakeSource, at_once, eventually, finished, patient, running, step, train, waits

from async_rl.orchestrator.watcher import LoadError

# CASES 9


@pytest.mark.parametrize("failing", [0, 1])
def test_a_failed_load_names_engine_and_version_and_bumps_nothing(failing):
    async def on_load(version):
        if version == 1:
            raise OSError("no shared memory left")

    engines = [FakeEngine("vllm-0"), FakeEngine("vllm-1")]
    engines[failing].on_load = on_load
    with running(at_once, engines=engines) as orchestrator:
        step(orchestrator, publish=False)
        source = FakeSource(1)
        orchestrator.fleet.publish(1, source)
        with pytest.raises(
            LoadError, match=f"engine vllm-{failing}: loading version 1 failed: no shared memory"
        ) as raised:
            orchestrator.fleet.wait_served(1, patient())
        assert isinstance(raised.value.__cause__, OSError)
        assert orchestrator.snapshot()["served_version"] == 0
        with pytest.raises(LoadError):
            orchestrator.next_batch(patient())  # no silent training on
        with pytest.raises(LoadError):
            orchestrator.check()
        eventually(lambda: source.released)


def test_a_load_that_hangs_is_an_error():
    async def on_load(version):
        while version == 1:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                return

    with running(at_once, engines=[FakeEngine("vllm-0", on_load=on_load)], load_timeout_s=0.2) as orchestrator:
        step(orchestrator)
        with pytest.raises(
            LoadError, match=r"engine vllm-0: loading version 1 did not finish within load_timeout_s=0\.2"
        ):
            orchestrator.fleet.wait_served(1, patient())
        assert orchestrator.snapshot()["served_version"] == 0


def test_the_version_moves_only_after_the_load_returned():
    allowed = threading.Event()

    async def on_load(version):
        while version == 1 and not allowed.is_set():
            await asyncio.sleep(0.001)

    engine = FakeEngine(on_load=on_load)
    with running(at_once, engines=[engine], max_staleness=0) as orchestrator:
        step(orchestrator)
        eventually(lambda: "loading version 1" in waits(orchestrator).get("watcher", ""))
        assert orchestrator.snapshot()["served_version"] == 0
        assert orchestrator.outcomes()["admitted"] == 2  # at S = 0 nothing is admitted on the old version
        allowed.set()
        orchestrator.fleet.wait_served(1, patient())
        assert engine.version == 1
        assert step(orchestrator).ages() == [0, 0]


def test_only_the_newest_is_loaded_and_every_source_is_released_once_read():
    allowed = threading.Event()

    async def on_load(version):
        while version == 1 and not allowed.is_set():
            await asyncio.sleep(0.001)

    engines = [FakeEngine("a", on_load=on_load), FakeEngine("b")]
    with running(at_once, engines=engines, max_staleness=4, admit_ahead=4, max_steps=10) as orchestrator:
        sources = [FakeSource(v) for v in range(1, 5)]
        for source in sources:
            batch = orchestrator.next_batch(patient())
            orchestrator.batch_trained(batch)
            orchestrator.fleet.publish(source.version, source)
            if source.version == 1:
                eventually(lambda: "loading version 1" in waits(orchestrator).get("watcher", ""))
        assert [s.released for s in sources] == [False, True, True, False]
        assert [s.reserved for s in sources] == [True, False, False, False]  # before the engine has begun to read it
        allowed.set()
        orchestrator.fleet.wait_served(4, patient())
        assert [s.reserved for s in sources] == [True, False, False, True]
        assert [s.released for s in sources] == [True, True, True, False]  # the newest is for an engine that comes back
        assert engines[0].loads == [0, 1, 4]
        assert engines[1].loads == [0, 4]  # version 1 was replaced before its turn
        told = []
        eventually(
            lambda: told.extend(e.value for e in orchestrator.events() if e.name == "policy_loaded") or 4 in told
        )
        assert told == [0, 4]
    assert sources[-1].released


def test_what_is_published_after_the_end_is_released():
    with running(at_once) as orchestrator:
        orchestrator.close(5.0)
        source = FakeSource(9)
        orchestrator.fleet.publish(9, source)
        assert source.released


# sampling_policy


def test_under_trajectory_sampling_no_trajectory_mixes_versions():
    engine = FakeEngine()

    async def rollout(task, engine):
        head = engine.version
        await asyncio.sleep(0.002)
        return finished(task, engine, head=head)

    with running(
        rollout, engines=[engine], sampling_policy="trajectory", max_staleness=2, max_steps=10
    ) as orchestrator:
        batches = train(orchestrator)
        assert len(batches) == 10
        assert all(t.head == t.tail for b in batches for t in b.trajectories)
        assert max(t.tail for b in batches for t in b.trajectories) > 0


def test_under_trajectory_sampling_the_engine_closes_drains_loads_and_reopens():
    by_hand = ByHand()
    with running(by_hand, sampling_policy="trajectory", batch_size=1, group_size=1, max_staleness=2) as orchestrator:
        by_hand.wait_started(3)
        by_hand.finish(0)
        step(orchestrator)
        eventually(lambda: orchestrator.snapshot()["engines_open"] == 0)
        assert orchestrator.snapshot()["limited_by"] == "engines"
        assert orchestrator.snapshot()["served_version"] == 0
        by_hand.finish(1)
        by_hand.finish(2)
        orchestrator.fleet.wait_served(1, patient())
        assert {t.group_id for t in by_hand.wait_started(4)} == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("policy", "versions_alive", "drains"),
    [("auto", 1, False), ("auto", 2, False), ("segment", 1, False), ("trajectory", 1, True), ("trajectory", 2, False)],
)
def test_when_a_load_waits_for_the_rollouts(policy, versions_alive, drains):
    by_hand = ByHand()
    engines = [FakeEngine(versions_alive=versions_alive)]
    settings = {"batch_size": 1, "group_size": 1, "max_staleness": 1}
    with running(by_hand, engines=engines, sampling_policy=policy, **settings) as orchestrator:
        by_hand.wait_started(2)
        by_hand.finish(0)
        step(orchestrator)
        if drains:
            eventually(lambda: "to be free for a load" in waits(orchestrator).get("watcher", ""))
            assert engines[0].version == 0
        else:
            orchestrator.fleet.wait_served(1, patient())
        by_hand.finish(1)
        orchestrator.fleet.wait_served(1, patient())


def test_with_replicas_one_engine_drains_while_the_other_takes_groups():
    by_hand = ByHand()
    engines = [FakeEngine("a"), FakeEngine("b")]
    settings = {"batch_size": 2, "group_size": 1, "max_staleness": 3, "sampling_policy": "trajectory"}
    with running(by_hand, engines=engines, **settings) as orchestrator:
        by_hand.wait_started(6)
        for group in (0, 1):
            by_hand.finish(group)
        step(orchestrator)
        eventually(lambda: orchestrator.snapshot()["engines_open"] == 1)
        for group in (2, 4):  # what is left on engine a
            by_hand.finish(group)
        eventually(lambda: engines[0].version == 1)
        assert engines[1].version == 0
        for group in (3, 5):
            by_hand.finish(group)
        orchestrator.fleet.wait_served(1, patient())


# hold_loads


def test_no_load_is_applied_while_loads_are_held():
    engine = FakeEngine()
    with running(at_once, engines=[engine]) as orchestrator:
        with orchestrator.fleet.hold_loads():
            step(orchestrator)
            eventually(lambda: "to be free for a load" in waits(orchestrator).get("watcher", ""))
            assert engine.loads == [0]
        orchestrator.fleet.wait_served(1, patient())


def test_holding_waits_for_the_load_that_is_going_on():
    allowed, order = threading.Event(), []

    async def on_load(version):
        while version == 1 and not allowed.is_set():
            await asyncio.sleep(0.001)
        order.append(f"loaded {version}")

    with running(at_once, engines=[FakeEngine(on_load=on_load)]) as orchestrator:
        step(orchestrator)
        eventually(lambda: "loading version 1" in waits(orchestrator).get("watcher", ""))
        threading.Timer(0.05, allowed.set).start()
        with orchestrator.fleet.hold_loads():
            order.append("held")
        assert order == ["loaded 0", "loaded 1", "held"]
