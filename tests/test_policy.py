"""PolicyModule inside a real lightning.Trainer: one counted step per batch, exact gradients, guards, checkpoints."""

import json
import logging
import math
import sys
from dataclasses import replace
from functools import partial
from itertools import pairwise

import lightning.pytorch as pl
import pytest
import torch
from policy_examples import make_batch, tiny_llama, trajectory

from async_rl import policy as policy_module
from async_rl.algorithms import DecoupledPPOLoss
from async_rl.policy import NonFiniteError, PolicyModule
from async_rl.token_table import StalenessError
from async_rl.types import Batch, EvalBatch, EvalResult, Group, Prompt, Segment

TOKENIZER = object()
SGD = partial(torch.optim.SGD, lr=0.1)


class Feed:
    """Batches in order; claims a huge length, as the real loader does."""

    def __init__(self, batches):
        self.batches = batches

    def __len__(self):
        return sys.maxsize

    def __iter__(self):
        return iter(self.batches)


class Data(pl.LightningDataModule):
    """Hands batches over as they are, as RolloutDataModule does."""

    def __init__(self, batches, evaluations=()):
        super().__init__()
        self.batches = batches
        self.evaluations = list(evaluations)

    def train_dataloader(self):
        return Feed(self.batches)

    def val_dataloader(self):
        return Feed(self.evaluations) if self.evaluations else []

    def transfer_batch_to_device(self, batch, device, dataloader_idx):
        return batch


class Record(pl.Callback):
    """What a trainer sees after every batch."""

    def __init__(self):
        self.steps = []
        self.metrics = []
        self.gradients = []

    def on_before_optimizer_step(self, trainer, policy, optimizer):
        self.gradients.append({n: p.grad.clone() for n, p in policy.model.named_parameters()})

    def on_train_batch_end(self, trainer, policy, outputs, batch, batch_idx):
        self.steps.append((trainer.global_step, policy.last_step.updated, policy.last_step.reason))
        self.metrics.append(dict(policy.last_step.metrics))


def make_policy(**overrides):
    arguments = dict(optimizer=SGD, gradient_clip_val=0.0) | overrides
    return PolicyModule(arguments.pop("model", None) or tiny_llama(), TOKENIZER, **arguments)


def fit(policy, batches, max_steps=100, ckpt_path=None, more=(), **trainer_arguments):
    record = Record()
    trainer = pl.Trainer(
        max_steps=max_steps,
        accelerator="cpu",
        devices=1,
        callbacks=[record, *more],
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **trainer_arguments,
    )
    trainer.fit(policy, datamodule=Data(batches), ckpt_path=ckpt_path, weights_only=True)
    return trainer, record


def weights(policy):
    return {name: tensor.clone() for name, tensor in policy.named_weights()}


def context_logprobs(model, t):
    """Log-probability of every token of a trajectory but the first of each context, its contexts run alone."""
    logprobs = {}
    for start, stop in pairwise((*t.starts, len(t.token_ids))):
        ids = t.token_ids[start:stop]
        of_context = model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
        logprobs |= {start + i: of_context[i - 1, ids[i]] for i in range(1, len(ids))}
    return logprobs


def reference_gradients(batch, loss):
    """The batch's loss, one sequence at a time, straight from the model."""
    model = tiny_llama()
    lengths = torch.tensor([t.trainable_tokens for t in batch.trajectories])
    token_weights = loss.token_weights(lengths) / loss.normaliser(lengths)
    advantages = [a for group in batch.advantages for a in group]
    for t, advantage, weight in zip(batch.trajectories, advantages, token_weights, strict=True):
        positions = [i for i, trained in enumerate(t.loss_mask) if trained]
        if not positions:
            continue
        logprobs = context_logprobs(model, t)
        current = torch.stack([logprobs[p] for p in positions])
        behaviour = torch.tensor([t.logprobs[p] for p in positions])
        ones = torch.ones(len(positions))
        loss(current, current.detach(), behaviour, advantage * ones, weight * ones).backward()
    return {n: p.grad for n, p in model.named_parameters()}


def assert_same_gradients(got, expected):
    for name, gradient in expected.items():
        torch.testing.assert_close(got[name], gradient, atol=2e-5, rtol=1e-3, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("normalise", ["token", "sequence", "constant"])
@pytest.mark.parametrize("micro_batch_tokens", [9, 40, 4096])
@pytest.mark.parametrize("share_prefix", [True, False])
def test_micro_batches_and_sharing_leave_the_gradient_alone(normalise, micro_batch_tokens, share_prefix):
    loss = DecoupledPPOLoss(normalise=normalise, constant=8 if normalise == "constant" else 0, cap=2.0)
    batch = make_batch()
    _, record = fit(make_policy(loss=loss, micro_batch_tokens=micro_batch_tokens, share_prefix=share_prefix), [batch])
    assert_same_gradients(record.gradients[0], reference_gradients(batch, loss))


@pytest.mark.parametrize("micro_batch_tokens", [9, 4096])
@pytest.mark.parametrize("share_prefix", [True, False])
def test_each_context_of_a_split_trajectory_is_a_sequence_of_its_own(micro_batch_tokens, share_prefix):
    """Log-probabilities are those of the contexts alone (positions restart, nothing attends across), to 1e-4."""
    batch = make_batch(groups=2, samples=2)
    for i, t in enumerate(batch.trajectories[:3]):
        repeated = [*t.token_ids[:3], 9 + i, 8]  # the conversation as the template renders it now: untrained
        t.starts = (0, len(t.token_ids))
        t.segments = (*t.segments, Segment(0, len(t.token_ids) + 5, len(t.token_ids) + 9))
        t.token_ids = [*t.token_ids, *repeated, 5, 6, 7, i]
        t.loss_mask = [*t.loss_mask, 0, 0, 0, 0, 0, 1, 1, 1, 1]
    for t in batch.trajectories:
        with torch.no_grad():
            alone = context_logprobs(tiny_llama(), t)
        t.logprobs = [alone[i].item() if m else 0.0 for i, m in enumerate(t.loss_mask)]
    loss = DecoupledPPOLoss(normalise="sequence")
    _, record = fit(make_policy(loss=loss, micro_batch_tokens=micro_batch_tokens, share_prefix=share_prefix), [batch])
    assert record.metrics[0]["ratio/mismatch_age0"] < 1e-4
    assert record.metrics[0]["ratio/mean"] == pytest.approx(1, abs=1e-4)
    assert record.metrics[0]["train/tokens"] == sum(sum(t.loss_mask) for t in batch.trajectories)
    assert_same_gradients(record.gradients[0], reference_gradients(batch, loss))


def test_one_counted_step_per_batch_and_the_schedule_follows():
    policy = make_policy(lr_schedule="linear", warmup_steps=2, micro_batch_tokens=12)
    batches = [make_batch(version=v, seed=v) for v in range(5)]
    trainer, record = fit(policy, batches, max_steps=4)
    assert record.steps == [(v, True, "trained") for v in range(1, 5)], "max_steps ends the run"
    assert [m["train/lr"] for m in record.metrics] == pytest.approx([0.05, 0.1, 0.1, 0.05])
    assert trainer.global_step == 4


def test_a_schedule_of_your_own():
    schedule = partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)
    _, record = fit(make_policy(lr_schedule=schedule), [make_batch(version=v) for v in range(3)])
    assert [m["train/lr"] for m in record.metrics] == pytest.approx([0.1, 0.05, 0.025])


@pytest.mark.parametrize("limit", [0.01, 1e9])
def test_clipping_equals_torch(limit):
    batch, loss = make_batch(), DecoupledPPOLoss()
    _, record = fit(make_policy(gradient_clip_val=limit), [batch])
    model = tiny_llama()
    expected = reference_gradients(batch, loss)
    for name, p in model.named_parameters():
        p.grad = expected[name]
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
    assert record.metrics[0]["train/grad_norm"] == pytest.approx(norm.item(), rel=1e-3), "the norm before clipping"
    assert_same_gradients(record.gradients[0], {n: p.grad for n, p in model.named_parameters()})


def test_masked_tokens_leave_numerator_and_denominator():
    prompt, advantages = [1, 2, 3], (1.0, -1.0)
    kept = [trajectory(prompt, [4, 5], index=0), trajectory(prompt, [6], index=1)]
    cut = [
        replace(kept[0], token_ids=[*kept[0].token_ids, 9, 9, 9], loss_mask=[0, 0, 0, 1, 1, 0, 0, 0]),
        trajectory(prompt, [7, 8, 9], index=2, mask=[0, 0, 0]),
        kept[1],
    ]
    cut[0] = replace(cut[0], logprobs=[*kept[0].logprobs, -1.0, -1.0, -1.0])

    def batch(trajectories, advantages):
        return Batch(0, (Group(0, Prompt("p", "t", {}), 0, tuple(trajectories)),), (advantages,), 0)

    for normalise in ("token", "sequence"):
        loss = DecoupledPPOLoss(normalise=normalise)
        _, without = fit(make_policy(loss=loss), [batch(kept, advantages)])
        _, masked = fit(make_policy(loss=loss), [batch(cut, (1.0, 5.0, -1.0))])
        assert masked.metrics[0]["train/loss"] == pytest.approx(without.metrics[0]["train/loss"], rel=1e-5)
        assert_same_gradients(masked.gradients[0], without.gradients[0])


def test_end_tokens_are_trained_like_any_other():
    model = tiny_llama()
    model.config.eos_token_id = [7, 8]
    model.config.pad_token_id = 7
    batch = make_batch(groups=1, samples=2)
    ends = [trajectory([1, 2], [5, 7], index=0), trajectory([1, 2], [8, 6, 7, 7], index=1)]
    batch = replace(batch, groups=(replace(batch.groups[0], trajectories=tuple(ends)),), advantages=((1.0, -1.0),))
    _, record = fit(make_policy(model=model), [batch])
    assert record.metrics[0]["train/tokens"] == 6
    assert_same_gradients(record.gradients[0], reference_gradients(batch, DecoupledPPOLoss()))


def test_zero_advantages_are_not_forwarded_but_count(monkeypatch):
    batch = make_batch(groups=2)
    batch = replace(batch, advantages=(batch.advantages[0], (0.0,) * 4))
    forwarded = []
    original = policy_module._sequences
    monkeypatch.setattr(policy_module, "_sequences", lambda *a: forwarded.append(len(s := original(*a))) or s)
    _, record = fit(make_policy(), [batch])
    assert forwarded == [4]
    assert_same_gradients(record.gradients[0], reference_gradients(batch, DecoupledPPOLoss()))


def test_a_batch_without_signal_is_still_a_version():
    batch = make_batch()
    policy = make_policy()
    before = weights(policy)
    _, record = fit(policy, [replace(batch, advantages=((0.0,) * 4,) * 3)])
    assert record.steps == [(1, True, "trained")]
    assert record.metrics[0]["train/grad_norm"] == 0.0
    assert all(torch.equal(before[n], w) for n, w in policy.named_weights())


def test_nothing_trainable_is_no_step():
    batch = make_batch()
    masked = [replace(t, loss_mask=[0] * len(t.token_ids)) for t in batch.groups[0].trajectories]
    empty = Batch(0, (replace(batch.groups[0], trajectories=tuple(masked)),), (batch.advantages[0],), 0)
    policy = make_policy(lr_schedule="linear")
    _, record = fit(policy, [empty, batch], max_steps=2)
    assert record.steps == [(0, False, "no_trainable_token"), (1, True, "trained")]
    assert record.metrics[1]["train/lr"] == pytest.approx(0.1), "the schedule did not move"


def test_frozen_weights_are_no_step():
    model = tiny_llama().requires_grad_(False)
    _, record = fit(make_policy(model=model), [make_batch()])
    assert record.steps == [(0, False, "frozen")]


def broken(batch, advantage=math.nan):
    """The batch with one sample whose advantage is not finite."""
    (first, *rest), *others = batch.advantages
    return replace(batch, advantages=((first, advantage, *rest[1:]), *others))


def test_a_loss_that_is_not_finite_is_skipped_counted_and_named(caplog):
    policy = make_policy()
    before = weights(policy)
    with caplog.at_level(logging.WARNING, logger=policy_module.__name__):
        _, record = fit(policy, [broken(make_batch()), make_batch()])
    assert record.steps == [(0, False, "nonfinite"), (1, True, "trained")]
    assert record.metrics[0]["train/nonfinite_in_a_row"] == 1
    assert "test/0/0#1" in caplog.text
    assert "test/0/0#0" not in caplog.text
    assert all(torch.isfinite(w).all() for _, w in policy.named_weights())
    assert any(not torch.equal(before[n], w) for n, w in policy.named_weights()), "the good batch was trained"


def test_a_gradient_that_is_not_finite_is_skipped():
    policy = make_policy()
    before = weights(policy)
    policy.model.lm_head.weight.register_hook(lambda g: g * math.inf)
    _, record = fit(policy, [make_batch()])
    assert record.steps == [(0, False, "nonfinite")]
    assert not math.isfinite(record.metrics[0]["train/grad_norm"])
    assert all(torch.equal(before[n], w) for n, w in policy.named_weights())


def test_too_many_in_a_row_end_the_run_and_a_good_one_starts_over():
    bad, good = broken(make_batch()), make_batch()
    _, record = fit(make_policy(max_nonfinite_steps=2), [bad, good, bad, good])
    assert [updated for _, updated, _ in record.steps] == [False, True, False, True]
    with pytest.raises(NonFiniteError, match=r"max_nonfinite_steps=2 reached.*learning rate"):
        fit(make_policy(max_nonfinite_steps=2), [bad, bad, good])


def test_stale_tokens_stop_the_run_before_the_weights_move():
    policy = make_policy()
    before = weights(policy)
    with pytest.raises(StalenessError, match="older than max_staleness=2"):
        fit(policy, [make_batch(version=5, sampled_by=2, max_staleness=2)])
    assert all(torch.equal(before[n], w) for n, w in policy.named_weights())
    _, record = fit(make_policy(), [make_batch(version=5, sampled_by=2, max_staleness=3)])
    assert record.metrics[0]["age/max"] == 3
    _, record = fit(make_policy(), [make_batch(version=5, sampled_by=2, max_staleness=None)])
    assert record.steps[0][1], "no bound was asked for"


def test_metrics_describe_the_batch():
    batch = make_batch(version=3, sampled_by=2, max_staleness=1)
    on_policy = make_policy()
    for group in batch.groups:  # behaviour = what the model says: ratio 1
        for t in group.trajectories:
            t.logprobs = [0.0, *on_policy.logprobs(t.token_ids)]
    batch.groups[0].trajectories[0].logprobs[-1] = math.nan
    _, record = fit(on_policy, [batch])
    metrics = record.metrics[0]
    rewards = [t.reward for t in batch.trajectories]
    assert metrics["train/reward_mean"] == pytest.approx(sum(rewards) / 12)
    assert metrics["train/tokens"] == sum(t.trainable_tokens for t in batch.trajectories)
    assert metrics["train/tokens_per_trajectory"] == pytest.approx(metrics["train/tokens"] / 12)
    assert (metrics["age/mean"], metrics["age/p99"], metrics["age/max"]) == (1.0, 1.0, 1.0)
    assert metrics["ratio/min"] == pytest.approx(1.0, abs=1e-3)
    assert metrics["ratio/max"] == pytest.approx(1.0, abs=1e-3)
    assert metrics["ratio/ess"] == pytest.approx(1.0, abs=1e-3)
    assert metrics["ratio/unknown"] == 1.0
    assert 0 < metrics["train/entropy"] < math.log(31)
    assert "ratio/mismatch_age0" not in metrics
    assert all(math.isfinite(v) for v in metrics.values())
    json.dumps(metrics)


def test_temperature_makes_the_ratio_one():
    batch = make_batch()
    for temperature, expected in ((0.6, True), (1.0, False)):
        policy = make_policy(temperature=temperature)
        model = tiny_llama()
        for t in batch.trajectories:
            with torch.no_grad():
                logprobs = (model(input_ids=torch.tensor([t.token_ids])).logits[0] / 0.6).log_softmax(-1)
            t.logprobs = [0.0, *(logprobs[i - 1, t.token_ids[i]].item() for i in range(1, len(t.token_ids)))]
        _, record = fit(policy, [batch])
        assert (record.metrics[0]["ratio/mismatch_age0"] < 1e-4) is expected


def test_logged_metrics_reach_the_trainer():
    trainer, _ = fit(make_policy(), [make_batch()])
    assert {"train/loss", "train/reward_mean", "ratio/ess", "age/max"} <= set(trainer.logged_metrics)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_the_trainer_decides_the_precision(precision):
    policy = make_policy()
    _, record = fit(policy, [make_batch()], precision=precision)
    assert record.steps == [(1, True, "trained")]
    assert {w.dtype for _, w in policy.named_weights()} == {torch.float32}
    _, full = fit(make_policy(), [make_batch()])
    exact = record.metrics[0]["train/entropy"] == full.metrics[0]["train/entropy"]
    assert exact is (precision == "32-true")


def test_parity_logprobs_use_the_precision_of_training():
    policy = make_policy()
    ids = [1, 2, 3, 4, 5, 6]
    alone = policy.logprobs(ids)
    with torch.no_grad():
        logits = policy.model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
    assert alone == pytest.approx([logits[i, ids[i + 1]].item() for i in range(5)], abs=1e-4)
    seen = []

    class Ask(pl.Callback):
        def on_train_start(self, trainer, policy):
            seen.append(policy.logprobs(ids))

    trainer = pl.Trainer(
        max_steps=1, precision="bf16-mixed", accelerator="cpu", callbacks=[Ask()], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(policy, datamodule=Data([make_batch()]))
    assert seen[0] == pytest.approx(alone, abs=0.2)
    assert seen[0] != alone


@pytest.mark.parametrize("precision", ["bf16-true", "64-true"])
def test_other_precisions_are_refused(precision):
    with pytest.raises(ValueError, match=f"precision={precision} .* use bf16-mixed"):
        fit(make_policy(), [make_batch()], precision=precision)


def test_resuming_equals_going_on(tmp_path):
    batches = [make_batch(version=v, seed=v) for v in range(6)]
    checkpoint = tmp_path / "half.ckpt"

    class Save(pl.Callback):
        def on_train_batch_end(self, trainer, policy, outputs, batch, batch_idx):
            if trainer.global_step == 3:
                trainer.save_checkpoint(checkpoint)

    def policy(seed):
        adamw = partial(torch.optim.AdamW, lr=1e-2)
        return make_policy(model=tiny_llama(seed), optimizer=adamw, lr_schedule="cosine", warmup_steps=2)

    through, resumed = policy(seed=0), policy(seed=1)
    _, all_steps = fit(through, batches, max_steps=6, more=[Save()])
    trainer, last_steps = fit(resumed, batches[3:], max_steps=6, ckpt_path=checkpoint)
    assert trainer.global_step == 6
    for got, expected in zip(last_steps.metrics, all_steps.metrics[3:], strict=True):
        assert got["train/lr"] == expected["train/lr"]
        assert got["train/loss"] == pytest.approx(expected["train/loss"], rel=1e-5)
    for (name, a), (_, b) in zip(through.named_weights(), resumed.named_weights(), strict=True):
        torch.testing.assert_close(b, a, msg=name)


def test_evaluations_are_logged_with_their_version():
    prompt = Prompt("eval/add/0", "add", {})
    result = EvalResult(prompt, (trajectory([1], [2], reward=1.0), trajectory([1], [3], reward=0.0)))
    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
    other = trajectory([1], [2], reward=1.0)
    other.reward_parts = {"right": 0.25}
    results = (result, EvalResult(Prompt("eval/tools/0", "tools", {}), (other,)))
    evaluation = EvalBatch(version=7, results=results, seconds=1.5)
    trainer.validate(make_policy(), datamodule=Data([], [evaluation]), verbose=False)
    told = {name: float(value) for name, value in trainer.callback_metrics.items()}
    assert told["eval/reward"] == pytest.approx(2 / 3)
    assert told["eval/version"] == 7
    assert told["eval/reward/add"] == 0.5
    assert (told["eval/reward/tools"], told["eval/reward/tools/right"]) == (1.0, 0.25)


def test_from_a_directory_and_back(tiny_model_dir, tmp_path):
    policy = PolicyModule(str(tiny_model_dir))
    ids = policy.tokenizer.encode("1+1=2")
    policy.save_pretrained(tmp_path / "out")
    again = PolicyModule(tmp_path / "out")
    assert again.logprobs(ids) == pytest.approx(policy.logprobs(ids), abs=1e-6)


def test_gradient_checkpointing_gives_the_same_gradient():
    batch = make_batch()
    _, plain = fit(make_policy(), [batch])
    _, saving = fit(make_policy(gradient_checkpointing=True), [batch])
    assert_same_gradients(saving.gradients[0], plain.gradients[0])


def test_the_batch_survives_lightning_untouched():
    batch = make_batch()
    received = []

    class Keep(PolicyModule):
        def training_step(self, batch, batch_idx):
            received.append(batch)
            return super().training_step(batch, batch_idx)

    fit(Keep(tiny_llama(), TOKENIZER), [batch])
    assert received[0] is batch


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("warmup_steps", dict(warmup_steps=-1)),
        ("warmup_steps", dict(warmup_steps=3, lr_schedule=lambda optimizer: None)),
        ("micro_batch_tokens", dict(micro_batch_tokens=0)),
        ("gradient_clip_val", dict(gradient_clip_val=-1.0)),
        ("gradient_clip_val", dict(gradient_clip_val=math.nan)),
        ("max_nonfinite_steps", dict(max_nonfinite_steps=0)),
        ("temperature", dict(temperature=0.0)),
        ("lr_schedule", dict(lr_schedule="cosin")),
        ("share_prefix", dict(share_prefix="yes")),
    ],
)
def test_bad_values_are_refused_by_name(key, values):
    with pytest.raises(ValueError, match=key):
        make_policy(**values)


def test_a_model_object_needs_its_tokenizer():
    with pytest.raises(ValueError, match="tokenizer"):
        PolicyModule(tiny_llama())
