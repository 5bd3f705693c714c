"""How a vLLM child is started and how its answers are read, without starting one."""

from __future__ import annotations

import asyncio
import math
import os
from types import SimpleNamespace

import pytest

from async_rl.engines.base import SamplingParams
from async_rl.engines.loop_thread import LoopThread
from async_rl.engines.vllm_launch import VLLMSettings, _affinity, _environment, child_environment, engine_cores


def settings(**changes) -> VLLMSettings:
    values = {
        "name": "vllm-0", "model": "m", "dtype": "bfloat16", "max_model_len": 64, "max_num_seqs": 4, "seed": 0,
        "gpu_memory_utilization": 0.5, "kv_cache_gib": 1.0, "cpu_cores": "auto", "start_timeout_s": 30.0,
        "log_file": None,
    }  # fmt: skip
    return VLLMSettings(**{**values, **changes})


@pytest.mark.parametrize(
    ("spec", "allowed", "cores"),
    [
        ("auto", [0, 1], [0]),
        ("auto", [3], [3]),
        ("auto", [0, 1, 2, 3, 4], [0, 1]),
        ("none", [0, 1], []),
        ("1", [0, 1], [1]),
        ("5, 1-3", [0, 1, 2, 3, 5], [1, 2, 3, 5]),
    ],
)
def test_cores(spec, allowed, cores):
    assert engine_cores(spec, allowed) == cores


@pytest.mark.parametrize("spec", ["0-9", "one", "", "3-1"])
def test_impossible_cores_are_refused(spec):
    with pytest.raises(ValueError, match="cpu_cores"):
        engine_cores(spec, [0, 1])


def test_an_engine_on_the_cpu_gets_as_many_threads_as_cores_and_compiles_nothing():
    environment = child_environment(settings(), "scratch", [1, 2], on_cpu=True)
    assert (environment["OMP_NUM_THREADS"], environment["OMP_PLACES"]) == ("2", "{1,2}")
    assert environment["TORCH_COMPILE_DISABLE"] == "1"
    assert "VLLM_ALLOW_INSECURE_SERIALIZATION" not in environment
    assert "OMP_NUM_THREADS" not in child_environment(settings(), "scratch", [], on_cpu=True)


def test_an_engine_on_a_gpu_takes_ipc_handles_and_keeps_its_threads():
    environment = child_environment(settings(), "scratch", [], on_cpu=False)
    assert environment["VLLM_ALLOW_INSECURE_SERIALIZATION"] == "1"
    assert not {"OMP_NUM_THREADS", "TORCH_COMPILE_DISABLE"} & set(environment)
    assert environment["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"


def test_variables_are_put_back_also_after_an_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.delenv("NUMEXPR_MAX_THREADS", raising=False)

    def fail_inside() -> None:
        with _environment({"OMP_NUM_THREADS": "1", "ASYNC_RL_X": "1"}):
            assert os.environ["OMP_NUM_THREADS"] == "1"
            os.environ["NUMEXPR_MAX_THREADS"] = "1"  # as vLLM does
            raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        fail_inside()
    assert os.environ["OMP_NUM_THREADS"] == "7"
    assert not {"ASYNC_RL_X", "NUMEXPR_MAX_THREADS"} & set(os.environ)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity here")
def test_the_cores_of_this_process_are_put_back():
    before = os.sched_getaffinity(0)
    core = min(before)
    with _affinity([core]):
        assert os.sched_getaffinity(0) == {core}
    assert os.sched_getaffinity(0) == before


@pytest.mark.parametrize("value", [None, math.nan, -math.inf, math.inf])
def test_a_logprob_that_is_not_a_number_becomes_nan(value):
    pytest.importorskip("vllm")
    from async_rl.engines.vllm_core import finite

    assert math.isnan(finite({5: SimpleNamespace(logprob=value)}, 5))
    assert math.isnan(finite({6: SimpleNamespace(logprob=-1.0)}, 5))
    assert math.isnan(finite(None, 5))
    assert finite({5: SimpleNamespace(logprob=-1.5)}, 5) == -1.5


def test_text_is_made_only_where_a_stop_string_needs_it():
    pytest.importorskip("vllm")
    from async_rl.engines.vllm_core import sampling_parameters

    plain = sampling_parameters(SamplingParams(max_tokens=9, temperature=0.7, top_k=3), seed=4)
    assert (plain.detokenize, plain.logprobs, plain.seed, plain.top_k) == (False, 0, 4, 3)
    assert sampling_parameters(SamplingParams(stop=("x",)), seed=0).detokenize


def test_a_gpu_engine_differs_from_a_cpu_engine_only_where_it_must(tmp_path):
    pytest.importorskip("vllm")
    from async_rl.engines.vllm_launch import engine_arguments

    on_gpu = engine_arguments(
        settings(model=str(tmp_path), engine_kwargs={"tensor_parallel_size": 2}), "scratch", on_cpu=False
    )
    assert on_gpu.weight_transfer_config.backend == "ipc"
    assert (on_gpu.gpu_memory_utilization, on_gpu.enforce_eager, on_gpu.tensor_parallel_size) == (0.5, False, 2)
    assert on_gpu.worker_extension_cls == ""
    on_cpu = engine_arguments(settings(model=str(tmp_path)), "scratch", on_cpu=True)
    assert on_cpu.weight_transfer_config.backend == "async_rl_shared_memory"
    assert on_cpu.kv_cache_memory_bytes == 2**30
    assert on_cpu.enforce_eager


def test_cancelling_the_caller_cancels_the_coroutine_on_the_other_loop():
    thread = LoopThread("test-loop")
    seen: list[str] = []

    async def sleep() -> None:
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise

    async def run() -> None:
        job = asyncio.ensure_future(thread.run(sleep()))
        await asyncio.sleep(0.05)
        job.cancel()
        with pytest.raises(asyncio.CancelledError):
            await job

    asyncio.run(run())
    assert thread.stop(timeout_s=2.0)
    assert seen == ["cancelled"]
    assert thread.stop(timeout_s=2.0)  # idempotent
