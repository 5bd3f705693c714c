"""Evaluations of whole runs: when, with which sampling, on which engine, and what becomes of failures."""

import math
import threading

import pytest
from fit_kit import RewardBySeed, engine, make_data, make_policy, make_trainer, outcomes
from lightning.pytorch import Callback

from async_rl.callbacks.summary import RunSummary
from async_rl.engines.base import SamplingParams
from async_rl.eval_failures import EvaluationError


class FailsLater(RewardBySeed):
    """Its evaluation prompts fail from the ``n``-th call of their reward on."""

    def __init__(self, n=0):
        super().__init__()
        self.held_out = {(row["a"], row["b"]) for row in super().prompts("eval")[:2]}
        self.left = n
        self.lock = threading.Lock()

    def prompts(self, split):
        rows = super().prompts(split)
        held_out = [row for row in rows if (row["a"], row["b"]) in self.held_out]
        return held_out if split == "eval" else [row for row in rows if row not in held_out]

    def reward(self, prompt, completion):
        if (prompt["a"], prompt["b"]) in self.held_out:
            with self.lock:
                self.left -= 1
                if self.left < 0:
                    raise ValueError("the judge is away")
        return super().reward(prompt, completion)


def versions(trainer):
    return [e["version"] for e in trainer.evaluations]


def test_the_last_version_is_evaluated_when_the_prompts_are_used_up(tiny_model_dir, tmp_path):
    trainer = make_trainer(tmp_path, max_steps=100, evaluate_at="ends")
    trainer.fit(make_policy(tiny_model_dir), datamodule=make_data(epochs=1, batch_size=20, eval_limit=2))
    assert trainer.end.exit_code == 0
    assert versions(trainer) == [0, 4]


def test_the_last_version_is_evaluated_when_a_callback_stops_the_run(tiny_model_dir, tmp_path):
    class StopAtTwo(Callback):
        def on_train_batch_end(self, trainer, *args):
            trainer.should_stop = trainer.global_step == 2

    trainer = make_trainer(tmp_path, max_steps=50, callbacks=[StopAtTwo()], evaluate_at="ends")
    trainer.fit(make_policy(tiny_model_dir), datamodule=make_data(eval_limit=2))
    assert trainer.end.exit_code == 0
    assert versions(trainer) == [0, 2]


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"top_p": 0.5}, {"top_k": 3, "temperature": 0.3}])
def test_evaluation_may_sample_as_training_may_not(tiny_model_dir, tmp_path, sampling):
    own, data_engine = SamplingParams(max_tokens=8, **sampling), engine()
    data = make_data(with_engine=data_engine, eval_sampling=own, eval_samples=1, eval_limit=3)
    make_trainer(tmp_path, max_steps=2, evaluate_at="ends").fit(make_policy(tiny_model_dir), datamodule=data)
    asked = [r.sampling for r in data_engine.requests]
    assert asked.count(own) == 6
    assert set(asked) == {own, SamplingParams(max_tokens=8)}


def test_an_evaluation_engine_gets_evaluations_and_loads_their_versions_only(tiny_model_dir, tmp_path):
    mine, own, summary = engine(name="mine"), engine(name="own"), RunSummary()
    data = make_data(with_engine=mine, eval_engine=own, eval_limit=3, eval_samples=2)
    trainer = make_trainer(tmp_path, max_steps=5, eval_every=3, evaluate_at="ends", callbacks=[summary])
    trainer.fit(make_policy(tiny_model_dir), datamodule=data)
    assert versions(trainer) == [0, 3, 5]
    assert [load.version for load in own.loads] == [0, 3, 5]
    assert len(own.requests) == 3 * 6
    assert all(r.request_id.startswith("g-") for r in own.requests)
    assert not any(r.request_id.startswith("g-") for r in mine.requests)
    assert outcomes(tmp_path) == {"trained": 10}
    assert own._dead is not None  # closed with the others
    assert summary.figures["age_max"] <= 2


def test_two_engines_of_one_name_are_refused():
    with pytest.raises(ValueError, match="both named scripted-0"):
        make_data(with_engine=engine(), eval_engine=engine())


@pytest.mark.parametrize("apart", [True, False])
def test_rollouts_start_beside_the_first_evaluation_only_where_it_has_an_engine_of_its_own(
    tiny_model_dir, tmp_path, apart
):
    class Count(Callback):
        started = ()

        def on_validation_batch_end(self, trainer, *args):
            self.started = (*self.started, sum(not r.request_id.startswith("g-") for r in mine.requests))

    mine, count = engine(name="mine", latency_s=0.1), Count()
    data = make_data(with_engine=mine, eval_engine=engine(name="own", latency_s=0.1) if apart else None, eval_limit=2)
    trainer = make_trainer(tmp_path, max_steps=1, evaluate_at="ends", callbacks=[count])
    trainer.fit(make_policy(tiny_model_dir), datamodule=data)
    assert versions(trainer) == [0, 1]
    assert (count.started[0] > 0) is apart


def test_failed_evaluation_samples_cost_the_run_nothing_and_are_told(tiny_model_dir, tmp_path, caplog):
    summary = RunSummary()
    caplog.set_level("DEBUG", "async_rl")  # as run.log has it
    data = make_data(FailsLater(4), max_failures=0, max_retries=1, eval_samples=2)
    trainer = make_trainer(tmp_path, max_steps=3, evaluate_at="ends", callbacks=[summary])
    trainer.fit(make_policy(tiny_model_dir), datamodule=data)
    first, last = trainer.evaluations
    assert (first["failures"], first["samples"]) == (0, 4)
    assert (last["failures"], last["samples"], last["reward_lower_bound"]) == (4, 0, 0.0)
    assert math.isnan(last["reward"])
    assert "evaluation at version 3: 4 of 4 samples failed" in caplog.text
    assert 'raise ValueError("the judge is away")' in caplog.text  # where
    assert summary.figures["eval_end_failures"] == 4
    assert outcomes(tmp_path) == {"trained": 6}


def test_a_first_evaluation_that_measures_nothing_ends_the_run(tiny_model_dir, tmp_path):
    trainer = make_trainer(tmp_path, evaluate_at="ends")
    with pytest.raises(EvaluationError, match=r"8 of 8 samples failed.*the judge is away") as raised:
        trainer.fit(make_policy(tiny_model_dir), datamodule=make_data(FailsLater()))
    assert str(raised.value.__cause__) == "the judge is away"
    assert trainer.end.exit_code == 1
    assert outcomes(tmp_path) == {}


def test_an_evaluation_engine_that_nothing_would_use_is_refused(tiny_model_dir, tmp_path):
    own = engine(name="own")
    with pytest.raises(ValueError, match="eval_engine is never used"):
        make_trainer(tmp_path).fit(make_policy(tiny_model_dir), datamodule=make_data(eval_engine=own))
    assert not own.loads


def test_greedy_evaluation_of_many_samples_is_refused(tiny_model_dir, tmp_path):
    data = make_data(eval_sampling=SamplingParams(max_tokens=8, temperature=0.0), eval_limit=1)
    with pytest.raises(ValueError, match=r"eval_samples=4 with eval_sampling's temperature=0 .* set eval_samples=1"):
        make_trainer(tmp_path, evaluate_at="ends").fit(make_policy(tiny_model_dir), datamodule=data)
