"""Two colocated vLLM engines in one run: a version rolls through them, by the stamps and the admissions."""

import asyncio
import os
import random
import sqlite3

import pytest
from fit_kit import Recorder, RewardBySeed, make_data, make_policy, make_trainer, outcomes
from noted_engine import Noted

from async_rl.engines.base import SamplingParams
from async_rl.engines.replicas import replica_arguments

pytestmark = pytest.mark.vllm
SMALL = {"dtype": "float32", "max_model_len": 256, "max_num_seqs": 8, "kv_cache_gib": 0.125}
LATE_S = 0.1


class WithTool(RewardBySeed):
    """Takes its time, as behind a tool, so that there are rollouts all through the run."""

    async def rollout(self, prompt, chat):
        await asyncio.sleep(random.uniform(0.1, 0.6))
        return await super().rollout(prompt, chat)


def test_two_colocated_replicas_share_a_run_and_a_version_rolls_through_them(tiny_model_dir, tmp_path):
    pytest.importorskip("vllm")
    from async_rl.engines.vllm import VLLMEngine

    class NotedReplica(Noted, VLLMEngine):
        load_delay_s = 0.5  # long enough for rollouts to begin and end between the loads of the two

    arguments = {"model": str(tiny_model_dir), "cpu_cores": "auto", "log_file": str(tmp_path / "vllm.log"), **SMALL}
    cores = sorted(os.sched_getaffinity(0))
    engines = [NotedReplica(**one) for one in replica_arguments("vllm", arguments, 2, cores)]
    callback = Recorder()
    # Only the concurrency keeps groups from starting: some do at every moment.
    trainer = make_trainer(
        tmp_path / "run", max_steps=8, max_staleness=8, admit_ahead=8, parity_check=True, stall_timeout_s=60.0,
        callbacks=[callback],
    )  # fmt: skip
    sampling = SamplingParams(max_tokens=12)
    data = make_data(WithTool(), with_engine=engines, batch_size=4, max_concurrent=8, sampling=sampling)
    trainer.fit(make_policy(tiny_model_dir), data)
    assert max(callback.ages) <= 8
    assert outcomes(tmp_path / "run") == {"trained": 32}
    assert {p.name for p in tmp_path.glob("vllm*.log")} == {"vllm-0.log", "vllm-1.log"}
    check_stamps(engines)
    check_admissions(engines, tmp_path / "run")


def check_stamps(engines):
    """Each stamps what it serves itself, and both sampled at times when that was not the same."""
    apart = [0, 0]
    for own, engine in enumerate(engines):
        for request in engine.asked:
            served = [(e.served_at(request.began_s), e.begun_at(request.ended_s)) for e in engines]
            assert served[own][0] <= min(request.versions) <= max(request.versions) <= served[own][1]
            apart[own] += all(old == new for old, new in served) and served[0] != served[1]
    assert min(apart) > 0, (apart, [e.loaded for e in engines])


def check_admissions(engines, run_dir):
    """A group is admitted at the lowest version that is served, also where its own engine is ahead of the other."""
    with sqlite3.connect(run_dir / "run.db") as db:
        admissions = db.execute("select admitted_version, admitted_s, engine, head from groups").fetchall()
    behind = ahead = 0
    for version, at_s, engine, head in admissions:  # at_s: when it was written down
        assert min(e.served_at(at_s - LATE_S) for e in engines) <= version <= min(e.begun_at(at_s) for e in engines)
        served = [(e.served_at(at_s - LATE_S), e.begun_at(at_s)) for e in engines]
        if all(old == new for old, new in served) and served[0] != served[1]:
            ahead += served[engine] == max(served) and head > version
            behind += served[engine] == min(served)
    assert min(ahead, behind) > 0, (ahead, behind)
