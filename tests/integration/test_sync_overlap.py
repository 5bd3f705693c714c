"""S = 0 on the real loop: complete groups are trained while others of their batch are still being generated."""

import threading
from functools import partial

import pytest
import torch
from fit_kit import RewardBySeed, engine, make_data, make_policy, make_trainer, outcomes

from async_rl.algorithms import GRPO, BatchNormalised
from async_rl.callbacks import DrainCallback, RLCallback
from async_rl.orchestrator.sinks import RolloutFailureError

EARLY = {"min_sequences": 2, "min_tokens": 10**6}
SGD = partial(torch.optim.SGD, lr=0.05)


def staggered(prompt, seed):
    return 0.01 * (1 + seed % 6)


class Watch(RLCallback):
    """Which groups made each batch, and how much of it was trained before it was complete."""

    def __init__(self):
        self.batches = []
        self.ahead = []

    def on_batch_planned(self, trainer, policy, batch):
        self.batches.append([(g.id, g.prompt.id) for g in batch.groups])
        assert batch.ages() == [0] * len(batch.groups)

    def on_train_batch_end(self, trainer, policy, outputs, batch, batch_idx):
        self.ahead.append(policy.last_step.metrics.get("train/ahead_share", 0.0))
        self.overlapped_s = trainer.session.overlap.both_s


def run(model_dir, run_dir, setting, **kwargs):
    watch = Watch()
    data = make_data(
        with_engine=engine(latency_s=staggered), batch_size=4, filter_zero_variance=True, forward_backward_batch=setting
    )
    policy = make_policy(model_dir, optimizer=SGD, **kwargs)
    make_trainer(run_dir, max_staleness=0, max_steps=3, callbacks=[watch]).fit(policy, datamodule=data)
    return policy, watch


def test_the_same_batches_and_the_same_policy_but_training_overlaps_generation(tiny_model_dir, tmp_path):
    whole, synchronous = run(tiny_model_dir, tmp_path / "off", "off")
    split, overlapped = run(tiny_model_dir, tmp_path / "early", EARLY)
    assert overlapped.batches == synchronous.batches
    for (name, a), (_, b) in zip(split.named_weights(), whole.named_weights(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4, msg=name)
    assert synchronous.ahead == [0.0] * 3
    assert max(overlapped.ahead) >= 0.25
    assert overlapped.overlapped_s > synchronous.overlapped_s
    assert outcomes(tmp_path / "early") == outcomes(tmp_path / "off")
    assert outcomes(tmp_path / "early")["trained"] == 12


def test_auto_is_on_where_it_can_be(tiny_model_dir, tmp_path, monkeypatch):
    from async_rl.wiring import StalenessSettings, forward_backward_batch

    def auto(advantage, max_staleness=0, stale_policy="wait"):
        policy = make_policy(tiny_model_dir, advantage=advantage)
        staleness = StalenessSettings(max_staleness, None, 1.0, stale_policy, "auto", True)
        return forward_backward_batch("auto", staleness, policy)

    assert (auto(GRPO()).min_sequences, auto(GRPO()).min_tokens) == (64, 131072)
    assert auto(BatchNormalised()) is None
    assert auto(lambda rewards: rewards) is None  # it does not say, so it gets the whole batch
    assert auto(GRPO(), max_staleness=1) is None
    assert auto(GRPO(), stale_policy="allow") is None


@pytest.mark.parametrize(
    ("setting", "staleness", "advantage", "message"),
    [
        (EARLY, 1, GRPO(), "max_staleness=1"),
        (EARLY, 0, BatchNormalised(), "BatchNormalised"),
        ({"min_sequence": 4}, 0, GRPO(), "min_sequence"),
        ({"min_tokens": 0}, 0, GRPO(), "min_tokens"),
        ("on", 0, GRPO(), "forward_backward_batch='on'"),
    ],
)
def test_what_would_be_ignored_is_refused_before_the_engine_starts(
    tiny_model_dir, tmp_path, setting, staleness, advantage, message
):
    data = make_data(forward_backward_batch=setting)
    with pytest.raises(ValueError, match=message):
        make_trainer(tmp_path, max_staleness=staleness).fit(
            make_policy(tiny_model_dir, advantage=advantage), datamodule=data
        )
    assert not data.engines[0].loads


def assert_untouched(policy, before, run_dir):
    assert all(p.grad is None for p in policy.parameters())
    assert all(torch.equal(before[name], weight) for name, weight in policy.named_weights())
    assert set(outcomes(run_dir)) <= {"saved", "failed"}


def test_a_stop_between_parts_leaves_no_gradient_and_no_half_trained_group(tiny_model_dir, tmp_path):
    def latency(prompt, seed):
        return 0.0 if next(numbers) < 4 else 60.0

    numbers = iter(range(10**6))
    data = make_data(with_engine=engine(latency_s=latency), batch_size=4, forward_backward_batch=EARLY)
    policy = make_policy(tiny_model_dir)
    before = {name: weight.clone() for name, weight in policy.named_weights()}
    trainer = make_trainer(tmp_path, max_staleness=0, callbacks=[DrainCallback(0.1)])
    parts = []
    original = policy.train_ahead

    def train_ahead(part):
        original(part)
        assert any(p.grad is not None for p in policy.parameters())
        parts.append(len(part.groups))
        threading.Timer(0.05, trainer.stop, ("enough",)).start()

    policy.train_ahead = train_ahead
    trainer.fit(policy, datamodule=data)
    assert parts
    assert (trainer.global_step, trainer.end.reason) == (0, "enough")
    assert_untouched(policy, before, tmp_path)
    assert outcomes(tmp_path) == {"saved": 4}


def test_a_failure_between_parts_leaves_no_gradient_and_no_half_trained_group(tiny_model_dir, tmp_path):
    trained = threading.Event()

    class Breaks(RewardBySeed):
        def reward(self, prompt, completion):
            with lock:
                if len(seen) < 2:
                    seen.add(str(prompt))
            if str(prompt) in seen:
                return super().reward(prompt, completion)
            trained.wait(60)
            raise KeyError("mine")

    seen, lock = set(), threading.Lock()  # the groups of the first two prompts are complete, the others fail
    data = make_data(Breaks(), batch_size=4, forward_backward_batch=EARLY, max_failures=0, max_retries=0)
    policy = make_policy(tiny_model_dir)
    before = {name: weight.clone() for name, weight in policy.named_weights()}
    original = policy.train_ahead

    def train_ahead(part):
        original(part)
        trained.set()

    policy.train_ahead = train_ahead
    with pytest.raises(RolloutFailureError):
        make_trainer(tmp_path, max_staleness=0).fit(policy, datamodule=data)
    assert trained.is_set()
    assert_untouched(policy, before, tmp_path)


def test_a_forward_pass_that_fails_ends_the_run_with_its_error_and_no_gradient(tiny_model_dir, tmp_path):
    data = make_data(with_engine=engine(latency_s=staggered), batch_size=4, forward_backward_batch=EARLY)
    policy = make_policy(tiny_model_dir, micro_batch_tokens=30)
    before = {name: weight.clone() for name, weight in policy.named_weights()}
    original, calls = policy.scorer.score, []

    def score(*args, **kwargs):
        calls.append(1)
        if len(calls) == 2:
            raise MemoryError("out of memory")
        return original(*args, **kwargs)

    policy.scorer.score = score
    with pytest.raises(MemoryError):
        make_trainer(tmp_path, max_staleness=0).fit(policy, datamodule=data)
    assert_untouched(policy, before, tmp_path)
