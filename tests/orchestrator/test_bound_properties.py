"""The age bound and the books under everything that can delay or lose a group: random worlds on a virtual clock."""

from dataclasses import replace
from itertools import count, islice

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from virtual_loop import VirtualLoop
from virtual_world import LAWS, World, fate, skipped

from async_rl.orchestrator.planner import BatchPlanner


@st.composite
def worlds(draw, *, max_s=5, policy="wait", kill=False, data_ends=False, dying=False) -> World:
    S, B, G = draw(st.integers(0, max_s)), draw(st.integers(1, 5)), draw(st.integers(1, 4))  # noqa: N806
    W = draw(st.integers(0, S))  # noqa: N806
    steps = draw(st.integers(3, 12))
    return World(
        S=S,
        B=B,
        G=G,
        W=W,
        f=draw(st.sampled_from([1.0, 1.3, 2.0])) if W < S else 1.0,
        C=draw(st.sampled_from([G, 3 * G + 1, B * G, 4 * B * G, 10**9])),
        policy=policy,
        law=draw(st.sampled_from(sorted(LAWS))),
        steps=draw(st.sampled_from([None, 3])) if data_ends else steps,
        prompts=draw(st.integers(0, 30)) if data_ends else None,
        short_ok=draw(st.booleans()),
        filtered=draw(st.sampled_from([0.0, 0.2, 0.6])),
        fails=draw(st.sampled_from([0.0, 0.1, 0.4])),
        max_retries=draw(st.integers(0, 2)),
        quorum=draw(st.none() | st.integers(1, G)),
        straggler_timeout_s=draw(st.sampled_from([0.0, 0.5, 3.0])),
        lags_s=draw(st.lists(st.sampled_from([0.0, 0.3, 3.0]), min_size=1, max_size=3).map(tuple)),
        drain=draw(st.booleans()),
        deaths=draw(st.sampled_from([0.3, 1.0] if dying else [0.0, 0.0, 0.2])),
        skips=draw(st.sampled_from([0.0, 0.0, 0.3])),
        pauses=draw(st.sampled_from([0.0, 0.3])),
        late_tokens=draw(st.booleans()),
        train_s=draw(st.sampled_from([0.0, 0.1, 1.0, 5.0])),
        kill_at=draw(st.integers(0, steps - 1)) if kill else None,
        checkpoint_every=draw(st.integers(1, 4)),
        seed=draw(st.integers(0, 10**6)),
    )


def examples(number: int):
    """Always the same ones, so that a red CI means a change and not luck."""
    return settings(max_examples=number, derandomize=True, suppress_health_check=list(HealthCheck))


# Under `wait` the loop asserts, after every event: age <= S, groups in the system <= (S + 1) * B, trajectories <= C and
# equal to its own count; and at the end: no deadlock, each group ended once, every place free, nothing left over.


@examples(2500)
@given(worlds())
def test_the_bound_is_exact_and_the_books_balance(world):
    VirtualLoop(world).run()


@examples(300)
@given(worlds(data_ends=True))
def test_data_that_ends(world):
    loop = VirtualLoop(world).run()
    if loop.trained != world.steps:
        assert loop.next_group == world.prompts
        survivors = sum(fate(world, g)[0] for g in range(world.prompts))
        batched = sum(len(groups) for _, groups, _ in loop.batches)
        assert batched == (survivors if world.short_ok else survivors - survivors % world.B)


@examples(300)
@given(worlds(max_s=0))
def test_without_staleness_the_order_is_the_synchronous_one(world):
    loop = VirtualLoop(world).run()
    survivors = (group for group in count() if fate(world, group)[0])
    expected, version = [], 0
    while version < world.steps:
        updated = not skipped(world, len(expected))
        expected.append((version, tuple(islice(survivors, world.B)), updated))
        version += updated
    assert loop.batches == expected
    assert set(loop.ages) == {0}


@examples(500)
@given(worlds(kill=True))
def test_a_kill_and_resume_keeps_the_bound_and_redoes_nothing_finished(world):
    loop = VirtualLoop(world).run()
    batched = [group for _, groups, _ in loop.batches for group in groups]
    assert len(batched) == len(set(batched))
    assert [version for version, _, updated in loop.batches if updated] == list(range(world.steps))


@examples(500)
@given(worlds(kill=True), st.integers(0, 6))
def test_a_resume_with_another_bound_keeps_that_bound_and_loses_nothing(world, resume_s):
    loop = VirtualLoop(replace(world, resume_s=resume_s)).run()
    batched = [group for _, groups, _ in loop.batches for group in groups]
    assert len(batched) == len(set(batched))
    assert [version for version, _, updated in loop.batches if updated] == list(range(world.steps))
    assert not loop.reissued or resume_s < world.S


@examples(600)
@given(worlds(dying=True), st.booleans())
def test_engines_that_die_and_return_break_nothing(world, all_slow):
    loop = VirtualLoop(replace(world, lags_s=(3.0,) * len(world.lags_s)) if all_slow else world).run()
    assert [version for version, _, updated in loop.batches if updated] == list(range(world.steps))


@examples(150)
@given(worlds(policy="mask"))
def test_mask_balances_and_ends(world):
    VirtualLoop(world).run()


@examples(100)
@given(worlds(policy="allow"))
def test_allow_balances_and_ends(world):
    VirtualLoop(world).run()


@pytest.mark.parametrize("S", [1, 2, 4])
def test_the_bound_is_reached_so_the_properties_say_something(S):  # noqa: N803
    assert max(VirtualLoop(World(S=S, B=4, W=S, law="pareto", steps=30)).run().ages) == S


def test_one_straggler_among_fast_rollouts():
    """CASES 12: a 4 s straggler among 0.02 s rollouts, S = 1, step 0.15 s: trained at age 1 at most."""
    law = lambda rng: 4.0 if rng.random() < 0.02 else 0.02  # noqa: E731
    LAWS["case 12"] = law
    try:
        ages = {
            policy: max(
                VirtualLoop(World(S=1, W=1, B=4, law="case 12", train_s=0.15, steps=60, policy=policy)).run().ages
            )
            for policy in ("wait", "mask", "allow")
        }
    finally:
        del LAWS["case 12"]
    assert ages["wait"] == 1
    assert ages["allow"] > 10


def test_half_of_the_groups_filtered_and_slow_steps():
    """CASES 13: S = 0 with half of the groups filtered and slow steps: age 0 always."""
    loop = VirtualLoop(World(S=0, W=0, B=4, filtered=0.5, train_s=20.0, steps=30)).run()
    assert set(loop.ages) == {0}
    assert "filtered" in loop.outcome.values()


class CompletionOrder(BatchPlanner):
    """What a gate without a planner does: the newest rollouts don't wait for the slow ones."""

    def _reason_to_wait(self, trained, max_staleness):
        return ""


class LooksAtNowOnly(BatchPlanner):
    """Waits only for what is due in this very step."""

    def _reason_to_wait(self, trained, max_staleness):
        due_now = [v for v in self._running if v + max_staleness <= trained]
        return "due" if due_now else ""


@pytest.mark.parametrize("broken", [CompletionOrder, LooksAtNowOnly])
def test_the_properties_catch_a_planner_that_breaks_the_rule(broken, monkeypatch):
    monkeypatch.setattr("virtual_loop.BatchPlanner", broken)
    caught = 0
    for seed in range(40):
        try:
            VirtualLoop(World(S=2, B=3, W=2, law="pareto", steps=30, train_s=0.3, seed=seed)).run()
        except (AssertionError, RuntimeError):
            caught += 1
    assert caught > 0


class OpensBehind(VirtualLoop):
    """An engine that comes back opens with whatever it has loaded."""

    def on_return(self, engine, version):
        self.served[engine] = version
        self.alive[engine] = True


def test_the_properties_catch_an_engine_that_comes_back_with_old_weights():
    world = World(S=1, W=1, B=2, deaths=0.5, lags_s=(0.0, 3.0), train_s=0.1, steps=30)
    caught = 0
    for seed in range(40):
        try:
            OpensBehind(replace(world, seed=seed)).run()
        except (AssertionError, ValueError):
            caught += 1
        VirtualLoop(replace(world, seed=seed)).run()
    assert caught > 0
