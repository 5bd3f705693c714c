"""Evaluations beside training: what they may not touch, several engines, engines of their own."""

import asyncio
import threading
from collections import Counter

import pytest
from loop_kit import ByHand, FakeEngine, at_once, eventually, finished, patient, running, step, train

from async_rl.orchestrator.sinks import RolloutFailureError
from async_rl.types import Prompt

PROMPTS = [Prompt(f"eval/toy/{i}", "toy", {}) for i in range(4)]


async def failing(task, engine):
    raise ValueError("the evaluation is broken")


class Sampled:
    """An evaluation rollout that notes by which engine and version each sample was made."""

    def __init__(self):
        self.by = Counter()

    async def __call__(self, task, engine):
        self.by[engine.name, engine.version] += 1
        return finished(task, engine)


class Noting(FakeEngine):
    """Notes the training groups that it was given."""

    def __init__(self, name):
        super().__init__(name)
        self.groups = set()


async def noting(task, engine):
    engine.groups.add(task.group_id)
    return finished(task, engine)


class Stuck(FakeEngine):
    """Dies while it evaluates, once, and comes back."""

    died = None

    async def start(self):
        self.died = None

    async def close(self):
        pass


def test_failed_evaluation_samples_spend_nothing_of_the_training_budget_and_are_no_rollouts():
    with running(at_once, max_failures=0, max_retries=2, max_steps=3) as orchestrator:
        (result, *_) = orchestrator.evaluate(0, PROMPTS, 3, failing, patient())
        assert len(result.failures) == 3
        assert orchestrator.drain_metrics().get("rollout/retries", 0) == 0
        batches = train(orchestrator)
        assert [b.version for b in batches] == [0, 1, 2]
        assert [age for b in batches for age in b.ages() if age > 1] == []


def test_evaluation_samples_that_finish_do_not_refill_the_training_budget():
    by_hand = ByHand()
    settings = {"batch_size": 1, "group_size": 1, "max_staleness": 0, "max_retries": 9, "max_failures": 2}
    with running(by_hand, **settings) as orchestrator:
        for attempt in range(2):
            by_hand.fail(0, attempt=attempt)
            by_hand.wait_started(attempt + 2)
            orchestrator.evaluate(0, PROMPTS, 1, at_once, patient())
        by_hand.fail(0, attempt=2)
        with pytest.raises(RolloutFailureError, match="3 rollout attempts"):
            orchestrator.next_batch(patient())


def test_an_evaluation_is_spread_over_all_engines_that_serve_its_version():
    engines, sampled = [FakeEngine("a"), FakeEngine("b")], Sampled()
    with running(at_once, engines=engines, max_steps=9) as orchestrator:
        step(orchestrator)
        # Version 2 is published and has to wait.
        orchestrator.evaluate(1, PROMPTS, 2, sampled, patient(), ready=lambda: step(orchestrator))
        orchestrator.fleet.wait_served(2, patient())
    assert sampled.by == {("a", 1): 4, ("b", 1): 4}


def test_an_engine_for_evaluations_loads_what_is_evaluated_and_gets_no_group():
    mine, own, sampled = Noting("mine"), Noting("own"), Sampled()
    with running(noting, engines=[mine], eval_engines=[own], max_steps=6) as orchestrator:
        for evaluated in (False, True, False, True):
            version = step(orchestrator).version + 1
            orchestrator.fleet.wait_served(version, patient())
            if evaluated:
                orchestrator.evaluate(version, PROMPTS, 1, sampled, patient())
            assert [slot.open for slot in orchestrator.fleet.slots] == [True, False]
            assert orchestrator.snapshot()["engines_open"] == 1
            assert orchestrator.snapshot()["served_version"] == version
        train(orchestrator)
    assert (own.loads, own.groups) == ([2, 4], set())
    assert mine.loads[:5] == [0, 1, 2, 3, 4]
    assert len(mine.groups) == 12
    assert sampled.by == {("own", 2): 4, ("own", 4): 4}


def test_training_engines_load_and_roll_out_while_an_engine_of_its_own_evaluates():
    mine, own, by_hand, evaluation = FakeEngine("mine"), FakeEngine("own"), ByHand(), ByHand()
    settings = {"batch_size": 1, "group_size": 1, "max_staleness": 3, "max_concurrent": 4}
    with running(by_hand, engines=[mine], eval_engines=[own], sampling_policy="trajectory", **settings) as orchestrator:
        orchestrator.evaluate(0, PROMPTS, 1, at_once, patient())
        by_hand.wait_started(3)
        by_hand.finish(0)
        step(orchestrator)

        def beside():
            evaluation.wait_started(4)
            assert mine.loads == [0]  # it drains; the evaluation did not wait for that
            for group in (1, 2):
                by_hand.finish(group)
            eventually(lambda: mine.loads == [0, 1])
            by_hand.wait_started(4)
            for n in range(4):
                evaluation.finish(-5 - n)

        thread = threading.Thread(target=beside)
        thread.start()
        results = orchestrator.evaluate(1, PROMPTS, 1, evaluation, patient())
        thread.join()
        assert [t.head for r in results for t in r.trajectories] == [1, 1, 1, 1]
        assert own.loads == [0, 1]


def test_an_engine_of_its_own_that_dies_is_brought_back_at_the_version_evaluated():
    own = Stuck("own")

    async def dying(task, engine):
        if own.loads == [1]:
            own.died = RuntimeError("killed")
            await asyncio.sleep(60)
        return finished(task, engine)

    with running(at_once, engines=[FakeEngine("mine")], eval_engines=[own], max_steps=4) as orchestrator:
        step(orchestrator)
        results = orchestrator.evaluate(1, PROMPTS, 1, dying, patient())
        assert own.loads == [1, 1]
        assert [len(r.trajectories) for r in results] == [1, 1, 1, 1]
        assert orchestrator.snapshot()["engine_restarts"] == 1
        train(orchestrator)
