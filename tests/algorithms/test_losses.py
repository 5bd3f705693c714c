"""The loss against numbers worked out by hand and against a plain autograd reference, and what it measures."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from async_rl.algorithms.losses import (
    DecoupledPPOLoss,
    behaviour_ratio,
    clipped_surrogate,
    importance_metrics,
    importance_weight,
    normaliser,
    token_weights,
)


def log(*values):
    return torch.tensor(values, dtype=torch.float64).log()


def test_behaviour_ratio_by_hand():
    torch.testing.assert_close(behaviour_ratio(log(0.5, 0.2), log(0.25, 0.4)), torch.tensor([2.0, 0.5]).double())


@pytest.mark.parametrize("unknown", [math.nan, -math.inf, math.inf])
def test_an_unknown_behaviour_logprob_counts_with_ratio_one(unknown):
    behaviour = torch.tensor([unknown, math.log(0.5)])
    assert behaviour_ratio(torch.tensor([-3.0, math.log(0.25)]), behaviour).tolist() == pytest.approx([1.0, 0.5])


def test_huge_ratios_stay_finite():
    assert torch.isfinite(behaviour_ratio(torch.tensor([0.0]), torch.tensor([-500.0])) ** 2).all()


def test_importance_weight_by_hand():
    ratio = torch.tensor([0.5, 2.0, 4.0])
    assert importance_weight(ratio, "truncate", 2.0).tolist() == [0.5, 2.0, 2.0]
    assert importance_weight(ratio, "mask", 2.0).tolist() == [0.5, 2.0, 0.0]
    assert importance_weight(ratio, "none", 2.0).tolist() == [1.0, 1.0, 1.0]


def test_clipped_surrogate_by_hand():
    current, proximal = log(0.6, 0.6, 0.2, 0.2), log(0.4, 0.4, 0.4, 0.4)  # u = 1.5, 1.5, 0.5, 0.5
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0]).double()
    expected = torch.tensor([1.3, -1.5, 0.5, -0.8]).double()  # clipped at 1.3, not, not, clipped at 0.8
    torch.testing.assert_close(clipped_surrogate(current, proximal, advantages, 0.2, 0.3), expected)


def test_token_weights_by_hand():
    lengths = torch.tensor([4, 0, 1])
    assert token_weights(lengths, "token", 0).tolist() == [1.0, 0.0, 1.0]
    assert token_weights(lengths, "sequence", 0).tolist() == [0.25, 0.0, 1.0]
    assert token_weights(lengths, "constant", 10).tolist() == pytest.approx([0.1, 0.0, 0.1])
    assert [normaliser(lengths, n) for n in ("token", "sequence", "constant")] == [5.0, 2.0, 2.0]


@pytest.mark.parametrize("normalise", ["token", "sequence", "constant"])
def test_token_weights_of_a_batch_without_trainable_tokens_are_zero(normalise):
    assert token_weights(torch.tensor([0, 0]), normalise, 3).tolist() == [0.0, 0.0]
    assert normaliser(torch.tensor([0, 0]), normalise) == 1.0


def test_decoupled_loss_by_hand():
    current, proximal, behaviour = log(0.6, 0.2), log(0.4, 0.4), log(0.1, 0.8)  # u = 1.5, 0.5; r = 4, 0.5
    loss = DecoupledPPOLoss(clip_low=0.2, clip_high=0.2, correction="truncate", cap=3.0)
    value = loss(current, proximal, behaviour, torch.tensor([2.0, -1.0]).double(), torch.tensor([0.5, 0.25]).double())
    # token 1: 0.5 * 3 * min(1.5*2, 1.2*2) = 3.6; token 2: 0.25 * 0.5 * min(-0.5, -0.8) = -0.1
    assert float(value) == pytest.approx(-(3.6 - 0.1))


@pytest.mark.parametrize("correction", ["truncate", "mask", "none"])
def test_gradient_equals_a_plain_autograd_reference(correction):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(40, 7, generator=generator, dtype=torch.float64)
    targets = torch.randint(7, (40,), generator=generator)
    proximal = torch.log_softmax(logits, -1).gather(1, targets[:, None])[:, 0] + 0.4 * torch.randn(
        40, generator=generator, dtype=torch.float64
    )
    behaviour = proximal + 1.0 * torch.randn(40, generator=generator, dtype=torch.float64)
    behaviour[3] = math.nan
    advantages = torch.randn(40, generator=generator, dtype=torch.float64)
    weights = torch.rand(40, generator=generator, dtype=torch.float64)

    def logprobs(parameter):
        return torch.log_softmax(parameter, -1).gather(1, targets[:, None])[:, 0]

    ours = logits.clone().requires_grad_()
    loss = DecoupledPPOLoss(clip_low=0.1, clip_high=0.3, correction=correction, cap=1.5)
    loss(logprobs(ours), proximal, behaviour, advantages, weights).backward()

    plain = logits.clone().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for t, current in enumerate(logprobs(plain)):  # one token at a time, branches written out
        u = torch.exp(current - proximal[t])
        r = 1.0 if math.isnan(behaviour[t]) else math.exp(proximal[t] - behaviour[t])
        w = {"truncate": min(r, 1.5), "mask": r if r <= 1.5 else 0.0, "none": 1.0}[correction]
        clipped = (advantages[t] > 0 and u > 1.3) or (advantages[t] < 0 and u < 0.9)
        total = total - weights[t] * w * advantages[t] * (u.detach() if clipped else u)
    total.backward()
    torch.testing.assert_close(ours.grad, plain.grad)
    assert (ours.grad == 0).all(dim=1).any(), "the example must clip something"


def test_one_update_per_batch_is_the_weighted_policy_gradient():
    current = log(0.3, 0.6).requires_grad_()
    behaviour = log(0.2, 0.4)
    DecoupledPPOLoss(cap=1.2)(
        current, current.detach(), behaviour, torch.tensor([1.0, -2.0]).double(), torch.tensor([0.5, 0.5]).double()
    ).backward()
    torch.testing.assert_close(current.grad, torch.tensor([-0.5 * 1.2, 0.5 * 1.2 * 2.0]).double())


@given(st.lists(st.integers(0, 9), min_size=1, max_size=12), st.sampled_from(["token", "sequence", "constant"]))
def test_weights_sum_to_what_the_normalisation_says(lengths, normalise):
    tensor = torch.tensor(lengths)
    total = float((token_weights(tensor, normalise, 10) * tensor).sum()) / normaliser(tensor, normalise)
    trained = [n for n in lengths if n]
    expected = (sum(trained) / (10 * len(trained)) if normalise == "constant" else 1.0) if trained else 0.0
    assert total == pytest.approx(expected, rel=1e-5)


def test_metrics_are_taken_before_the_cap():
    proximal, behaviour = log(0.8, 0.5, 0.1, 0.5), log(0.1, 0.5, 0.2, 0.5)
    behaviour[3] = math.nan
    metrics = importance_metrics(proximal, behaviour, torch.tensor([2, 0, 0, 0]), cap=5.0)  # r = 8, 1, 0.5, 1
    assert metrics["ratio/min"] == pytest.approx(0.5)
    assert metrics["ratio/mean"] == pytest.approx(10.5 / 4)
    assert metrics["ratio/max"] == pytest.approx(8.0)
    assert metrics["ratio/ess"] == pytest.approx(10.5**2 / (4 * 66.25))
    assert metrics["ratio/capped"] == 0.25
    assert metrics["ratio/unknown"] == 1.0
    assert metrics["ratio/mismatch_age0"] == pytest.approx(math.log(2) / 2), "tokens 1 and 2; 3 is unknown, 0 is old"


def test_metrics_without_fresh_tokens_have_no_mismatch():
    assert "ratio/mismatch_age0" not in importance_metrics(log(0.5), log(0.4), torch.tensor([-1]), 5.0)
    assert importance_metrics(log(), log(), torch.tensor([]), 5.0) == {}


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("clip_low", dict(clip_low=1.5)),
        ("clip_high", dict(clip_high=-0.1)),
        ("cap", dict(cap=0.5)),
        ("cap", dict(cap=math.nan)),
        ("correction", dict(correction="clip")),
        ("normalise", dict(normalise="mean")),
        ("constant", dict(normalise="constant")),
        ("constant", dict(constant=5)),
    ],
)
def test_bad_values_are_refused_by_name(key, values):
    with pytest.raises(ValueError, match=key):
        DecoupledPPOLoss(**values)


def test_corrects_off_policy_says_what_the_trainer_checks():
    assert DecoupledPPOLoss().corrects_off_policy
    assert DecoupledPPOLoss(correction="mask").corrects_off_policy
    assert not DecoupledPPOLoss(correction="none").corrects_off_policy
