"""Training parts of a batch before it is complete: the same update, and nothing left of what was for nothing."""

import math
from dataclasses import replace

import lightning.pytorch as pl
import pytest
import torch
from policy_examples import make_batch
from test_policy import assert_same_gradients, fit, make_policy, weights

from async_rl import policy as policy_module
from async_rl.algorithms import DecoupledPPOLoss
from async_rl.policy import NonFiniteError
from async_rl.token_table import StalenessError


class Ahead(pl.Callback):
    """Trains some groups of every batch ahead, part by part."""

    def __init__(self, *parts):
        self.parts = parts

    def on_train_batch_start(self, trainer, policy, batch, batch_idx):
        for part in self.parts:
            policy.train_ahead(batch.without({g.id for g in batch.groups} - set(part)))


SPLITS = [[[0]], [[2], [0]], [[1, 3], [0], [2]], [[0, 1, 2, 3]]]


@pytest.mark.parametrize("parts", SPLITS)
@pytest.mark.parametrize("normalise", ["token", "sequence", "constant"])
@pytest.mark.parametrize("clip", [0.0, 0.05])
def test_the_update_is_that_of_the_whole_batch(normalise, parts, clip):
    loss = DecoupledPPOLoss(normalise=normalise, constant=8 if normalise == "constant" else 0, cap=2.0)
    batch = make_batch(groups=4, max_staleness=2, version=3, sampled_by=1)
    whole, split = (make_policy(loss=loss, gradient_clip_val=clip, micro_batch_tokens=60) for _ in range(2))
    _, once = fit(whole, [batch])
    _, ahead = fit(split, [batch], more=[Ahead(*parts)])
    assert ahead.steps == [(1, True, "trained")]
    assert_same_gradients(ahead.gradients[0], once.gradients[0])
    for (name, a), (_, b) in zip(split.named_weights(), whole.named_weights(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5, msg=name)
    own = {"train/step_s", "train/ahead_s", "train/ahead_share"}
    assert set(ahead.metrics[0]) - own == set(once.metrics[0]) - own
    for name in set(once.metrics[0]) - own:
        assert ahead.metrics[0][name] == pytest.approx(once.metrics[0][name], rel=1e-4, abs=1e-6), name
    assert ahead.metrics[0]["train/ahead_share"] == sum(map(len, parts)) / 4
    assert ahead.metrics[0]["train/step_s"] > ahead.metrics[0]["train/ahead_s"] > 0


def test_zero_advantages_are_not_forwarded_in_parts_either(monkeypatch):
    batch = make_batch(groups=3)
    batch = replace(batch, advantages=(batch.advantages[0], (0.0,) * 4, batch.advantages[2]))
    forwarded = []
    original = policy_module._sequences
    monkeypatch.setattr(policy_module, "_sequences", lambda *a: forwarded.append(len(s := original(*a))) or s)
    _, once = fit(make_policy(), [batch])
    _, ahead = fit(make_policy(), [batch], more=[Ahead([0, 1])])
    assert forwarded == [8, 4, 4]
    assert_same_gradients(ahead.gradients[0], once.gradients[0])


def test_a_part_that_is_not_finite_ends_the_whole_batch_and_is_named(caplog):
    batch = make_batch(groups=3)
    bad = replace(batch, advantages=(batch.advantages[0], (1.0, math.nan, 1.0, 1.0), batch.advantages[2]))
    policy = make_policy()
    before = weights(policy)
    _, record = fit(policy, [bad], more=[Ahead([1])])
    assert record.steps == [(0, False, "nonfinite")]
    assert "test/0/1#1" in caplog.text
    assert "test/0/0" not in caplog.text
    assert all(torch.equal(before[n], w) for n, w in policy.named_weights())
    _, after = fit(policy, [batch])
    _, alone = fit(make_policy(), [batch])
    assert_same_gradients(after.gradients[0], alone.gradients[0])
    with pytest.raises(NonFiniteError):
        fit(make_policy(max_nonfinite_steps=1), [bad], more=[Ahead([1])])


def test_the_age_of_a_part_is_checked_at_the_step():
    policy = make_policy()
    before = weights(policy)
    with pytest.raises(StalenessError, match="older than max_staleness=2"):
        fit(policy, [make_batch(version=5, sampled_by=2, max_staleness=2)], more=[Ahead([0])])
    assert all(torch.equal(before[n], w) for n, w in policy.named_weights())
    assert all(p.grad is None for p in policy.parameters())


def test_what_was_trained_for_nothing_leaves_nothing():
    batch, other = make_batch(), make_batch(seed=9)

    class Discarded(pl.Callback):
        def on_train_batch_start(self, trainer, policy, batch, batch_idx):
            policy.train_ahead(other)
            assert any(p.grad is not None for p in policy.parameters())
            policy.discard()
            assert all(p.grad is None for p in policy.parameters())

    _, with_discarded = fit(make_policy(), [batch], more=[Discarded()])
    _, alone = fit(make_policy(), [batch])
    assert_same_gradients(with_discarded.gradients[0], alone.gradients[0])
    assert "train/ahead_s" not in with_discarded.metrics[0]


def test_a_group_that_is_not_in_the_batch_must_not_have_been_trained():
    policy = make_policy()
    before = weights(policy)
    batch = make_batch(groups=3)

    class TooMuch(pl.Callback):
        def on_train_batch_start(self, trainer, policy, _, batch_idx):
            policy.train_ahead(batch)

    with pytest.raises(RuntimeError, match="group 2 was trained ahead, but is not in the batch"):
        fit(policy, [batch.without({2})], more=[TooMuch()])
    assert all(torch.equal(before[n], w) for n, w in policy.named_weights())


def test_frozen_weights_are_no_step_with_parts_either():
    from policy_examples import tiny_llama

    policy = make_policy(model=tiny_llama().requires_grad_(False))
    _, record = fit(policy, [make_batch()], more=[Ahead([0])])
    assert record.steps == [(0, False, "frozen")]
