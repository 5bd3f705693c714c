"""A whole fit whose engine dies: it goes on (CASES 8), or ends with a clear error where that was not wanted."""

import os
import signal
import tempfile
import time
from functools import partial

import psutil
import pytest
from fit_kit import Recorder, engine, make_data, make_policy, make_trainer, outcomes

from async_rl.engines.base import EngineDiedError
from async_rl.orchestrator.restarts import EngineLostError
from async_rl.weights.parity import check_parity


class Kill(Recorder):
    """Kills the engine in the moments it is told, each a hook and a version."""

    def __init__(self, kill, *moments):
        super().__init__()
        self.kill = kill
        self.moments = list(moments)
        self.restarts = 0.0

    def _note(self, name, value):
        super()._note(name, value)
        if (name, value) in self.moments:
            self.moments.remove((name, value))
            self.kill()

    def on_train_end(self, trainer, policy):
        self.restarts = trainer.orchestrator.snapshot()["engine_restarts"]


@pytest.mark.parametrize("staleness", [0, 2])
def test_a_fit_goes_on_after_its_engine_died(tiny_model_dir, tmp_path, staleness):
    scripted = engine(latency_s=0.02)
    callback = Kill(
        scripted.die, ("policy_published", 0), ("batch_planned", 1), ("policy_published", 2), ("policy_loaded", 3)
    )
    trainer = make_trainer(tmp_path, max_staleness=staleness, max_steps=6, callbacks=[callback], evaluate_at="ends")
    data = make_data(with_engine=scripted, max_engine_restarts=4, eval_limit=4)
    trainer.fit(make_policy(tiny_model_dir), data)
    assert callback.moments == []
    assert callback.restarts in (3, 4)  # two deaths so close may be one
    assert callback.values("batch_planned") == [0, 1, 2, 3, 4, 5]
    assert max(callback.ages) <= staleness
    assert outcomes(tmp_path) == {"trained": 12}
    assert [e["version"] for e in trainer.evaluations] == [0, 6]
    assert all(e.get("failed", 0) == 0 for e in trainer.evaluations)


def test_the_parity_check_asks_again_when_the_engine_dies_over_it(tiny_model_dir, tmp_path):
    policy, scripted, asked = make_policy(tiny_model_dir), engine(), []

    async def score(token_ids):
        asked.append(len(token_ids))
        if len(asked) == 2:
            scripted.die()
            raise EngineDiedError("gone")
        return policy.logprobs(list(token_ids))

    scripted.score = score
    trainer = make_trainer(tmp_path, max_steps=2, parity_check=True)
    trainer.fit(policy, make_data(with_engine=scripted))
    assert outcomes(tmp_path) == {"trained": 4}
    assert len(asked) == 2 + 3 + 3  # three texts, at the start and after the first update


def test_no_restart_wanted_is_a_clear_error_at_once(tiny_model_dir, tmp_path):
    scripted = engine(latency_s=0.02)
    died_s = []

    def kill():
        died_s.append(time.monotonic())
        scripted.die()

    trainer = make_trainer(tmp_path, max_steps=50, callbacks=[Kill(kill, ("batch_planned", 2))])
    with pytest.raises(EngineLostError, match=r"engine scripted-0 died .*max_engine_restarts=0.*The first death: scr"):
        trainer.fit(make_policy(tiny_model_dir), make_data(with_engine=scripted, max_engine_restarts=0))
    assert time.monotonic() - died_s[0] < 60
    assert trainer.end.exit_code == 1
    assert set(outcomes(tmp_path)) <= {"trained", "saved"}


@pytest.mark.vllm
def test_a_killed_vllm_engine_comes_back_with_the_weights_of_the_trainer(tiny_model_dir, tmp_path):
    pytest.importorskip("vllm")
    from async_rl.engines.vllm import VLLMEngine

    def children():
        running = psutil.Process().children(recursive=True)
        return {p for p in running if "resource_tracker" not in " ".join(p.cmdline())}

    def scratch():
        return {name for name in os.listdir(tempfile.gettempdir()) if name.startswith("async-rl-")}

    class KillAndCheck(Recorder):
        versions, death_s = [], 0.0

        def on_batch_planned(self, trainer, policy, batch):
            super().on_batch_planned(trainer, policy, batch)
            if batch.version != 2:
                return
            (core,) = children() - before
            core.send_signal(signal.SIGKILL)
            killed_s = time.monotonic()
            texts = [policy.tokenizer.encode(text) for text in ("What is 1 + 2?", "and 3 + 4, what is that?")]
            question = partial(check_parity, vllm, policy.logprobs, texts, tolerance=1e-4, version=2)
            report = trainer.session.ask(vllm, question, trainer.poll)  # nobody published again
            self.death_s = time.monotonic() - killed_s
            self.versions.append((trainer.orchestrator.snapshot()["served_version"], report.mean_abs))

    before, dirs = children(), scratch()
    vllm = VLLMEngine(
        str(tiny_model_dir), name="vllm-dies", dtype="float32", max_model_len=256, max_num_seqs=8, kv_cache_gib=0.125
    )
    callback = KillAndCheck()
    trainer = make_trainer(tmp_path, max_steps=5, parity_check=True, callbacks=[callback])
    trainer.fit(make_policy(tiny_model_dir), make_data(with_engine=vllm))
    ((served, difference),) = callback.versions
    assert served == 2
    assert difference < 1e-4
    assert callback.death_s < 60
    assert callback.values("batch_planned") == [0, 1, 2, 3, 4]
    assert max(callback.ages) <= 2
    assert outcomes(tmp_path) == {"trained": 10}
    assert children() - before == set()
    assert scratch() <= dirs
