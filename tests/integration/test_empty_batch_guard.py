"""Runs that bring nothing to train end with exit code 3 and say why; a run that rarely finds signal goes on."""

import itertools

import pytest
from fit_kit import RewardBySeed, make_data, make_policy, make_trainer, outcomes

from async_rl.callbacks import EmptyBatchGuard
from async_rl.environments.arithmetic import Arithmetic
from async_rl.orchestrator.sinks import RolloutFailureError


class AlwaysRight(Arithmetic):
    def reward(self, prompt, completion):
        return 1.0


@pytest.mark.parametrize("staleness", [0, 2])
def test_equal_rewards_end_the_run_after_so_many_batches_worth_of_groups(tiny_model_dir, tmp_path, staleness):
    trainer = make_trainer(tmp_path, max_staleness=staleness, max_steps=50, callbacks=[EmptyBatchGuard(3)])
    trainer.fit(make_policy(tiny_model_dir), datamodule=make_data(AlwaysRight(), filter_zero_variance=True))
    assert (trainer.end.exit_code, trainer.global_step) == (3, 0)
    assert trainer.end.reason.startswith("3 empty batches in a row: no signal: 2 groups in a row")
    assert "1" in trainer.end.reason
    ended = outcomes(tmp_path)
    assert set(ended) <= {"filtered", "saved"}
    assert 6 <= ended["filtered"] < 60  # at once, give or take what was in flight


def test_equal_rewards_that_are_trained_get_one_warning(tiny_model_dir, tmp_path, caplog):
    trainer = make_trainer(tmp_path / "a", max_steps=5, callbacks=[EmptyBatchGuard(3)])
    trainer.fit(make_policy(tiny_model_dir), datamodule=make_data(AlwaysRight()))
    assert (trainer.end.exit_code, trainer.global_step) == (0, 5)
    (said,) = [r.getMessage() for r in caplog.records if "without an advantage" in r.getMessage()]
    assert said.startswith("3 batches in a row")
    assert "(rewards seen: 1)" in said
    caplog.clear()
    trainer = make_trainer(tmp_path / "b", max_steps=5, callbacks=[EmptyBatchGuard(3)])
    trainer.fit(make_policy(tiny_model_dir), datamodule=make_data())
    assert "without an advantage" not in caplog.text


def test_groups_that_rarely_differ_are_no_reason_to_stop(tiny_model_dir, tmp_path):
    class Rare(Arithmetic):
        numbers = itertools.count()

        def reward(self, prompt, completion):
            return float(next(self.numbers) % 24 == 0)  # one group in twelve

    trainer = make_trainer(tmp_path, max_steps=2, max_staleness=0, callbacks=[EmptyBatchGuard(8)])
    trainer.fit(make_policy(tiny_model_dir), datamodule=make_data(Rare(), filter_zero_variance=True))
    assert (trainer.end.exit_code, trainer.global_step) == (0, 2)
    assert outcomes(tmp_path)["filtered"] >= 30  # more than eight batches of two, but never in a row


class OneSampleFails(RewardBySeed):
    """Every second attempt fails for good, so that no group is ever complete, yet attempts succeed in between."""

    def __init__(self):
        super().__init__()
        self.numbers = itertools.count()

    async def rollout(self, prompt, chat):
        if next(self.numbers) % 2:
            raise ConnectionError("the judge does not answer")
        return await super().rollout(prompt, chat)


def test_an_outage_that_leaves_no_group_complete_ends_with_the_guard_s_code_and_the_first_error(
    tiny_model_dir, tmp_path
):
    trainer = make_trainer(tmp_path, max_steps=50, callbacks=[EmptyBatchGuard(3)])
    data = make_data(OneSampleFails(), max_retries=0, max_failures=50)
    trainer.fit(make_policy(tiny_model_dir), datamodule=data)
    assert trainer.end.exit_code == 3
    assert "outage" in trainer.end.reason
    assert "the judge does not answer" in trainer.end.reason


def test_where_every_attempt_fails_the_failure_budget_comes_first(tiny_model_dir, tmp_path):
    class Down(RewardBySeed):
        async def rollout(self, prompt, chat):
            raise ConnectionError("the judge does not answer")

    with pytest.raises(RolloutFailureError, match="the judge does not answer"):
        make_trainer(tmp_path, callbacks=[EmptyBatchGuard(3)]).fit(
            make_policy(tiny_model_dir), datamodule=make_data(Down(), batch_size=8, group_size=8)
        )
