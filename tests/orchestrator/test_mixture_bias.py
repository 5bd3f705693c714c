"""What is trained is what was admitted: slow environments are not left behind, and a skew would be seen."""

import asyncio
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loop_kit import finished, running, step
from virtual_loop import VirtualLoop
from virtual_world import World

from async_rl.orchestrator.prompts import PromptStream

SHARES = {"fast": 3, "slow": 1}


def two_environments(seed=0, weights=SHARES):
    rows = {name: [{"n": n} for n in range(50)] for name in weights}
    return PromptStream(rows, epochs=None, shuffle=True, seed=seed, mixture=weights)


class TwoEnvironments(VirtualLoop):
    """The virtual loop with groups of two environments, one of them 60 times slower."""

    def __init__(self, world, weights=SHARES):
        self.stream = two_environments(world.seed, weights)
        super().__init__(world)

    def environment(self, group):
        return self.stream.at(group).environment

    def duration_s(self, attempt):
        return super().duration_s(attempt) * (60.0 if self.environment(attempt.group) == "slow" else 1.0)

    def mixture(self, groups):
        return Counter(self.environment(group) for group in groups)


@pytest.mark.parametrize("law", ["constant", "uniform", "lognormal"])
@pytest.mark.parametrize("staleness", [0, 1, 4])
def test_the_trained_mixture_is_the_admitted_one(staleness, law):
    world = World(S=staleness, B=8, G=2, W=min(staleness, 2), law=law, steps=40, train_s=5.0)
    loop = TwoEnvironments(world).run()
    trained = [group for _, groups, _ in loop.batches for group in groups]
    assert sorted(trained) == list(range(loop.next_group))  # every admitted group, none left over
    assert loop.mixture(trained) == loop.mixture(range(loop.next_group)) == {"fast": 240, "slow": 80}
    for step_number in range(1, 41):  # and at no time has one lagged behind by more than what the bound lets wait
        so_far = loop.mixture(trained[: 8 * step_number])
        assert abs(so_far["slow"] - 2 * step_number) <= (staleness + 1) * 8 / 4 + 2


@given(
    staleness=st.integers(0, 3),
    batch_size=st.integers(1, 6),
    weights=st.fixed_dictionaries({"fast": st.integers(1, 5), "slow": st.integers(1, 5)}),
    filtered=st.sampled_from([0.0, 0.3]),
    fails=st.sampled_from([0.0, 0.2]),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=25)
def test_also_with_groups_that_are_filtered_or_fail(staleness, batch_size, weights, filtered, fails, seed):
    world = World(
        S=staleness,
        B=batch_size,
        W=min(staleness, 2),
        steps=12,
        filtered=filtered,
        fails=fails,
        seed=seed,
        law="uniform",
    )
    loop = TwoEnvironments(world, weights).run()
    lost = [group for group, outcome in loop.outcome.items() if outcome in ("filtered", "failed")]
    trained = [group for _, groups, _ in loop.batches for group in groups]
    assert loop.mixture(trained) == loop.mixture(set(range(loop.next_group)) - set(lost))


def test_without_the_wait_the_slow_ones_come_late():
    """The test above can fail: in the order of completion, fast groups crowd out the slow ones."""
    world = World(S=8, B=8, G=2, W=8, law="uniform", steps=40, train_s=1.0, policy="allow")
    loop = TwoEnvironments(world).run()
    trained = [group for _, groups, _ in loop.batches for group in groups]
    assert max(2 * n - loop.mixture(trained[: 8 * n])["slow"] for n in range(1, 40)) > 12


def test_a_run_counts_its_environments_and_describes_what_became_of_their_groups():
    """The real control plane: lengths and latencies by outcome, groups and rewards by environment."""

    async def rollout(task, engine):
        slow = task.prompt.environment == "slow"
        if slow and task.prompt.data["n"] % 4 == 3:
            await asyncio.sleep(0.02)
            raise ValueError("fails")
        head = engine.version
        trajectory = finished(
            task, engine, head=head, reward=float(task.sample_index) * (task.prompt.data["n"] % 3 > 0)
        )
        trajectory.started_s, trajectory.ended_s = 100.0, 100.0 + (60.0 if slow else 1.0)
        if slow:
            trajectory.token_ids = [7] * 30
            trajectory.loss_mask, trajectory.logprobs = [0] + [1] * 29, [0.0] * 30
        trajectory.reward_parts = {"right": trajectory.reward, "short": 0.5}
        return trajectory

    totals: Counter[str] = Counter()
    with running(
        rollout, prompts=two_environments(), batch_size=4, max_steps=20, max_retries=0, max_failures=1000,
        filter_zero_variance=True,
    ) as orchestrator:  # fmt: skip
        lengths, latencies, rewards = [], [], []
        for _ in range(20):
            batch = step(orchestrator)
            told = orchestrator.drain_metrics()
            slow = sum(g.prompt.environment == "slow" for g in batch.groups)
            assert told["length/trained"] == pytest.approx((slow * 30 + (4 - slow) * 3) / 4)
            assert told["latency/trained_s"] == pytest.approx((slow * 60 + (4 - slow) * 1) / 4)
            lengths.append({name for name in told if name.startswith("length/")})
            latencies += [told["latency/failed_s"]] if "latency/failed_s" in told else []
            rewards += [told["reward/fast/short"]] if "reward/fast/short" in told else []
            totals.update({name: int(value) for name, value in told.items() if name.startswith("groups_")})
        books = orchestrator.outcomes()
    for outcome in ("admitted", "trained", "filtered", "failed"):
        assert totals[f"groups_{outcome}/fast"] + totals[f"groups_{outcome}/slow"] == books[outcome], outcome
    assert totals["groups_failed/fast"] == 0 < totals["groups_failed/slow"]
    assert set.union(*lengths) == {
        "length/admitted",
        "length/trained",
        "length/filtered",
    }  # those that failed have none
    assert all(0.0 < s < 5.0 for s in latencies)
    assert set(rewards) == {0.5}


def test_one_environment_needs_no_counts_of_its_own():
    with running(batch_size=2, max_steps=1) as orchestrator:
        step(orchestrator)
        told = orchestrator.drain_metrics()
    assert not [name for name in told if name.startswith("groups_")]
    assert told["reward/toy"] == 0.5
    assert told["length/trained"] == told["length/admitted"] == 3.0
