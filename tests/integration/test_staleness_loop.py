"""Every way of setting the age of the data, on the real loop: bound, policies, oversampling, quorum, data that ends."""

import asyncio
import json
import logging
import sqlite3
import time
from collections import Counter

import pytest
from fit_kit import RewardBySeed, make_data, make_policy, make_trainer, outcomes, output
from lightning.pytorch import Callback

from async_rl.archive import BatchArchive
from async_rl.callbacks import EmptyBatchGuard, RLCallback, RunSummary
from async_rl.engines.base import Generation
from async_rl.engines.scripted import ScriptedEngine
from async_rl.jsonl_logger import JsonlLogger
from async_rl.orchestrator.ledger_reader import read_run
from async_rl.token_table import TokenTable
from async_rl.types import Segment


class Spread(ScriptedEngine):
    """Samples a token of ``group`` at each of ``versions``, no sooner; with ``exactly``, no later either."""

    def __init__(self, group, versions, exactly=False):
        super().__init__(output, latency_s=0.002)
        self.prefix, self.versions, self.exactly = f"g{group}-", versions, exactly
        self.sampled = Counter()

    async def generate(self, request):
        if not request.request_id.startswith(self.prefix):
            return await super().generate(request)
        segments = []
        for i, version in enumerate(self.versions):
            while self._served() < version:
                await asyncio.sleep(0.002)
            segments.append(Segment(self._served(), i, i + 1))
            self.sampled[version] += 1
        tokens = [10 + request.seed % 7] * len(self.versions)
        return Generation(tokens, [-1.0] * len(tokens), tuple(segments), "stop")

    async def load_weights(self, version, source):
        while self.exactly and version - 1 in self.versions and self.sampled[version - 1] < 2:
            await asyncio.sleep(0.002)
        await super().load_weights(version, source)


class Batches(RLCallback):
    """Every batch as it was trained, with the step's metrics."""

    def __init__(self):
        self.all = []
        self.metrics = []

    def on_train_batch_end(self, trainer, policy, outputs, batch, batch_idx):
        self.all.append(batch)
        self.metrics.append(policy.last_step.metrics)

    def of(self, group_id):
        ((batch, group),) = [(b, g) for b in self.all for g in b.groups if g.id == group_id]
        return batch, group

    @property
    def oldest(self):
        return max(age for batch in self.all for age in batch.ages())


def warnings_of(caplog):
    return [r.message for r in caplog.records if r.name == "async_rl.wiring"]


def test_a_trajectory_of_versions_3_4_and_5_is_as_old_as_its_oldest_token(tiny_model_dir, tmp_path):
    """CASES 15."""
    batches, summary = Batches(), RunSummary()
    data = make_data(with_engine=Spread(10, (3, 4, 5), exactly=True))
    trainer = make_trainer(tmp_path, max_steps=7, max_staleness=2, callbacks=[batches, summary])
    trainer.fit(make_policy(tiny_model_dir), datamodule=data)
    batch, group = batches.of(10)
    assert (batch.version, group.head, group.tail) == (5, 3, 5)
    for t in group.trajectories:
        assert (t.head, t.tail) == (3, 5)
        assert [(s.version, s.end - s.start) for s in t.segments] == [(3, 1), (4, 1), (5, 1)]
    table = TokenTable.of(batch)
    own = [i for i, name in enumerate(table.names) if name.startswith(group.prompt.id)]
    assert [table.ages[table.sequence == i].tolist() for i in own] == [[2, 1, 0]] * 2
    assert batches.metrics[5]["age/max"] == 2
    assert batches.oldest == summary.figures["age_max"] == 2
    with sqlite3.connect(tmp_path / "run.db") as db:
        assert db.execute("select head, tail from keeps where group_id = 10").fetchone() == (3, 5)
    (recorded,) = [
        g for b in read_run(tmp_path / "run.db", BatchArchive(tmp_path / "batches")).batches for g in b if g.id == 10
    ]
    assert [[s.version for s in t.segments] for t in recorded.trajectories] == [[3, 4, 5]] * 2


def test_mask_trains_a_straggler_late_and_without_its_old_tokens(tiny_model_dir, tmp_path, caplog):
    batches, summary = Batches(), RunSummary()
    trainer = make_trainer(
        tmp_path, max_steps=8, max_staleness=1, stale_policy="mask", acknowledge_staleness=True,
        callbacks=[batches, summary],
    )  # fmt: skip
    trainer.fit(make_policy(tiny_model_dir), datamodule=make_data(with_engine=Spread(1, (0, 3))))
    batch, group = batches.of(1)
    assert (group.head, batch.version >= 3, batch.max_staleness) == (0, True, None)
    for t in group.trajectories:
        for s in t.segments:
            assert set(t.loss_mask[s.start : s.end]) == {int(batch.version - s.version <= 1)}
        assert t.trainable_tokens < 2  # the token of version 0 is out
    assert max(m["age/max"] for m in batches.metrics if "age/max" in m) <= 1
    assert summary.figures["age_max"] <= 1
    (said,) = warnings_of(caplog)
    assert "stale_policy=mask" in said
    assert "max_staleness=1 versions are masked" in said
    assert outcomes(tmp_path) == {"trained": 16}


def test_allow_trains_everything_whatever_its_age(tiny_model_dir, tmp_path, caplog):
    batches, summary = Batches(), RunSummary()
    trainer = make_trainer(
        tmp_path, max_steps=8, max_staleness=1, stale_policy="allow", acknowledge_staleness=True,
        callbacks=[batches, summary],
    )  # fmt: skip
    trainer.fit(make_policy(tiny_model_dir), datamodule=make_data(with_engine=Spread(1, (0, 3))))
    batch, group = batches.of(1)
    assert batch.version - group.head >= 3
    assert [t.trainable_tokens for t in group.trajectories] == [2, 2]
    assert max(m["age/max"] for m in batches.metrics) == summary.figures["age_max"] == batches.oldest >= 3
    assert summary.figures["age_bound"] == "none"
    (said,) = warnings_of(caplog)
    assert "stale_policy=allow: nothing bounds the age" in said
    assert outcomes(tmp_path) == {"trained": 16}


def test_wait_gives_nothing_up_and_says_nothing(tiny_model_dir, tmp_path, caplog):
    with caplog.at_level(logging.INFO, logger="async_rl.wiring"):
        make_trainer(tmp_path, max_steps=1).fit(make_policy(tiny_model_dir), datamodule=make_data())
    assert warnings_of(caplog) == []


def test_groups_admitted_for_oversampling_are_trained_within_the_bound(tiny_model_dir, tmp_path):
    batches = Batches()
    trainer = make_trainer(
        tmp_path, max_steps=6, max_staleness=2, admit_ahead=1, oversample_factor=1.5,
        callbacks=[batches, EmptyBatchGuard(100)],
    )  # fmt: skip
    data = make_data(SomeFiltered(), filter_zero_variance=True)
    trainer.fit(make_policy(tiny_model_dir), datamodule=data)
    assert len(data.engines[0].requests) >= 2 * 2 * 6
    assert batches.oldest <= 2
    ended = outcomes(tmp_path)
    assert ended["trained"] == 12
    assert set(ended) == {"trained", "filtered"}  # the surplus was trained, not thrown away


class SomeFiltered(RewardBySeed):
    """Every second prompt is without signal."""

    def reward(self, prompt, completion):
        return super().reward(prompt, completion) if (prompt["a"] + prompt["b"]) % 2 else 1.0


def test_quorum_goes_on_without_stragglers_and_counts_them(tiny_model_dir, tmp_path):
    slow = {"g0-s2-", "g3-s2-", "g4-s0-"}

    class Late(ScriptedEngine):
        cancelled = ()

        async def generate(self, request):
            if request.request_id.startswith(tuple(slow)):
                try:
                    await asyncio.sleep(60.0)
                except asyncio.CancelledError:
                    self.cancelled = (*self.cancelled, request.request_id[:6])
                    raise
            return await super().generate(request)

    batches, late = Batches(), Late(output, latency_s=0.002)
    data = make_data(
        with_engine=late, group_size=3, group_completion="quorum", min_group_size=2, straggler_timeout_s=0.05
    )
    logger = JsonlLogger(tmp_path / "metrics.jsonl")
    trainer = make_trainer(tmp_path, callbacks=[batches], logger=logger)
    trainer.fit(make_policy(tiny_model_dir), datamodule=data)
    sizes = {g.id: [t.sample_index for t in g.trajectories] for b in batches.all for g in b.groups}
    left_out = {0: [0, 1], 3: [0, 1], 4: [1, 2]}
    assert sizes == {i: left_out.get(i, [0, 1, 2]) for i in range(8)}
    for batch in batches.all:
        assert [len(a) for a in batch.advantages] == [len(g.trajectories) for g in batch.groups]
        assert all(sum(a) == pytest.approx(0.0, abs=1e-6) for a in batch.advantages)  # centred on who is there
    assert set(late.cancelled) == slow
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert sum(row.get("rollout/stragglers_cancelled", 0) for row in rows) == 3
    assert outcomes(tmp_path) == {"trained": 8}


class FivePrompts(RewardBySeed):
    def prompts(self, split):
        return super().prompts(split)[:5]


@pytest.mark.parametrize(("last_batch", "steps"), [("drop", 7), ("train", 8)])
def test_every_prompt_is_sampled_epochs_times_and_a_short_end_is_said_aloud(
    tiny_model_dir, tmp_path, caplog, last_batch, steps
):
    batches = Batches()
    data = make_data(FivePrompts(), epochs=3, last_batch=last_batch)
    trainer = make_trainer(tmp_path, max_steps=100, callbacks=[batches])
    trainer.fit(make_policy(tiny_model_dir), datamodule=data)
    assert (trainer.global_step, trainer.end.exit_code, trainer.end.reason) == (steps, 0, "the prompts are used up")
    with sqlite3.connect(tmp_path / "run.db") as db:
        seen = Counter(prompt.rsplit("/", 1)[1] for (prompt,) in db.execute("select prompt_id from admissions"))
    assert sorted(seen.values()) == [3] * 5
    trained = Counter(str(g.prompt.data) for b in batches.all for g in b.groups)
    if last_batch == "train":
        assert set(trained.values()) == {3}
        assert [len(b.groups) for b in batches.all] == [2] * 7 + [1]
        assert outcomes(tmp_path) == {"trained": 15}
        assert "training a last batch of 1 groups (last_batch=train)" in caplog.text
    else:
        assert outcomes(tmp_path) == {"trained": 14, "dropped": 1}
        assert "1 groups are fewer than batch_size=2 and were dropped (last_batch=drop)" in caplog.text


def test_trajectories_from_elsewhere_are_trained_but_have_no_age(tiny_model_dir, tmp_path):
    """CASES 16."""

    class Elsewhere(ScriptedEngine):
        async def generate(self, request):
            generation = await super().generate(request)
            if int(request.request_id[1:].split("-")[0]) % 2:
                return Generation(
                    generation.token_ids, generation.logprobs, (Segment(None, 0, len(generation.token_ids)),), "stop"
                )
            return generation

    batches, summary = Batches(), RunSummary()
    data = make_data(with_engine=Elsewhere(output, latency_s=0.002))
    make_trainer(tmp_path, callbacks=[batches, summary]).fit(make_policy(tiny_model_dir), datamodule=data)
    groups = [(b, g) for b in batches.all for g in b.groups]
    assert {g.id: g.head is None for _, g in groups} == {i: i % 2 == 1 for i in range(8)}
    ages, tokens = Counter(), Counter()
    for batch, metrics in zip(batches.all, batches.metrics, strict=True):
        of_batch = Counter()
        for group in batch.groups:
            for t in group.trajectories:
                tokens[group.head is None] += t.trainable_tokens
                for s in t.segments:
                    if s.version is not None:
                        of_batch[batch.version - s.version] += s.end - s.start
        assert len(batch.ages()) == sum(g.head is not None for g in batch.groups)
        assert ("age/max" in metrics) is bool(of_batch)
        if of_batch:
            assert metrics["age/max"] == max(of_batch)
            assert metrics["age/mean"] == pytest.approx(sum(a * n for a, n in of_batch.items()) / of_batch.total())
        assert metrics["train/tokens"] == sum(t.trainable_tokens for t in batch.trajectories)
        ages += of_batch
    assert tokens[True] > 0
    assert summary.figures["age_max"] == max(ages)
    assert summary.figures["age_mean"] == pytest.approx(sum(a * n for a, n in ages.items()) / ages.total())
    assert outcomes(tmp_path) == {"trained": 8}


def test_one_straggler_among_fast_rollouts_is_trained_in_time(tiny_model_dir, tmp_path):
    """CASES 12, ten times faster: 0.4 s among 2 ms, S = 1, steps of 15 ms."""

    class OneSlow(ScriptedEngine):
        async def generate(self, request):
            if request.request_id.startswith("g3-"):
                await asyncio.sleep(0.4)
                self.slept = True
            return await super().generate(request)

    class AtLeast(Callback):
        def on_train_batch_end(self, trainer, *args):
            time.sleep(0.015)

    batches = Batches()
    data = make_data(with_engine=OneSlow(output, latency_s=0.002))
    trainer = make_trainer(tmp_path, max_steps=10, max_staleness=1, callbacks=[AtLeast(), batches])
    trainer.fit(make_policy(tiny_model_dir), datamodule=data)
    assert data.engines[0].slept
    batch, group = batches.of(3)
    assert batch.version - group.head <= 1
    assert batches.oldest == 1
    assert outcomes(tmp_path) == {"trained": 20}


def test_at_s_0_half_filtered_and_slow_steps_every_token_is_of_age_0(tiny_model_dir, tmp_path):
    """CASES 13."""

    class SlowSteps(Callback):
        def on_train_batch_end(self, trainer, *args):
            time.sleep(0.03)

    batches = Batches()
    data = make_data(SomeFiltered(), filter_zero_variance=True, batch_size=3)
    callbacks = [SlowSteps(), batches, EmptyBatchGuard(100)]
    trainer = make_trainer(tmp_path, max_steps=6, max_staleness=0, callbacks=callbacks)
    trainer.fit(make_policy(tiny_model_dir), datamodule=data)
    assert batches.oldest == 0
    assert all(m["age/max"] == 0 for m in batches.metrics)
    ended = outcomes(tmp_path)
    assert ended["trained"] == 18
    assert ended["filtered"] >= 6
    assert set(ended) == {"trained", "filtered"}
