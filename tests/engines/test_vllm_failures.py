"""VLLMEngine when something dies: failed loads, a killed engine process, a killed trainer. Each costs an engine."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from async_rl.engines.base import EngineError, GenerationRequest, SamplingParams
from async_rl.engines.vllm import VLLMEngine
from async_rl.weights.shared_memory import SharedMemoryPublisher

pytest.importorskip("vllm")
pytestmark = pytest.mark.vllm

ENGINE = {"dtype": "float32", "max_model_len": 512, "max_num_seqs": 4, "kv_cache_gib": 0.125}


@pytest.fixture
def engine(tiny_model_dir: Path) -> Iterator[VLLMEngine]:
    engine = VLLMEngine(str(tiny_model_dir), name="vllm-doomed", **ENGINE)
    asyncio.run(engine.start())
    yield engine
    asyncio.run(engine.close())


@pytest.fixture
def weights(tiny_model_dir: Path) -> dict[str, torch.Tensor]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32)
    return {name: p.detach() for name, p in model.named_parameters()}


def request(tokens: int = 8) -> GenerationRequest:
    return GenerationRequest("r", (5, 6, 7), SamplingParams(max_tokens=tokens), 0)


def processes_of(engine: VLLMEngine) -> list[psutil.Process]:
    manager = engine._session.client.core.llm.engine_core.resources.engine_manager
    return [psutil.Process(p.pid) for p in manager.processes]


def test_no_version_before_the_first_load_and_a_partial_load_ends_the_engine(engine: VLLMEngine, weights):
    async def run() -> None:
        with pytest.raises(EngineError, match=r"vllm-doomed.*no policy version"):
            await engine.generate(request())
        publisher = SharedMemoryPublisher(torch.float32)
        await engine.load_weights(0, publisher.publish(weights.items(), 0))
        core = engine._session.client.core.llm.engine_core
        await engine._session.thread.run(core.pause_scheduler_async(mode="keep", clear_cache=False))
        running = asyncio.ensure_future(engine.generate(request()))
        await asyncio.sleep(0.05)

        partial = {name: w for name, w in weights.items() if "layers.2.self_attn.k_proj" not in name}
        source = SharedMemoryPublisher(torch.float32).publish(partial.items(), 1)
        with pytest.raises(
            EngineError, match=r"vllm-doomed.*version 1 failed.*layers\.2\.self_attn\.k_proj"
        ) as failure:
            await engine.load_weights(1, source)
        assert failure.value.fatal
        assert "served 0" in str(failure.value)
        assert engine.stats().loads == 1
        # Whoever was waiting, and whoever comes later, is told the same at once.
        with pytest.raises(EngineError, match="version 1 failed"):
            await asyncio.wait_for(running, 60)
        with pytest.raises(EngineError, match="version 1 failed"):
            await engine.generate(request())
        (process,) = processes_of(engine)
        await asyncio.wait_for(engine.close(), 60)
        assert not process.is_running()

    asyncio.run(run())


def test_a_killed_engine_process_is_noticed_at_once_by_requests_and_loads(engine: VLLMEngine, weights):
    async def run() -> None:
        publisher = SharedMemoryPublisher(torch.float32)
        await engine.load_weights(3, publisher.publish(weights.items(), 3))
        jobs = [asyncio.ensure_future(engine.generate(request(tokens=500))) for _ in range(8)]
        await asyncio.sleep(0.1)
        (process,) = processes_of(engine)
        process.suspend()  # so that the load is waiting for it when it dies
        jobs.append(asyncio.ensure_future(engine.load_weights(4, publisher.publish(weights.items(), 4))))
        await asyncio.sleep(0.1)
        process.kill()
        results = await asyncio.wait_for(asyncio.gather(*jobs, return_exceptions=True), 60)
        assert all(isinstance(r, EngineError) and "vllm-doomed" in str(r) for r in results)
        with pytest.raises(EngineError, match=r"vllm-doomed.*died.*version 3"):
            await engine.score((5, 6, 7))

    asyncio.run(run())


def test_a_partial_first_load_is_an_error_and_sigkill_of_the_trainer_leaves_nothing(
    tiny_model_dir: Path, tmp_path: Path
):
    script = tmp_path / "trainer.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import asyncio, os, time, torch
            from transformers import AutoModelForCausalLM
            from async_rl.engines.vllm import VLLMEngine
            from async_rl.weights.shared_memory import SharedMemoryPublisher

            async def main():
                model = AutoModelForCausalLM.from_pretrained({str(tiny_model_dir)!r}, dtype=torch.float32)
                engine = VLLMEngine({str(tiny_model_dir)!r}, **{ENGINE!r})
                await engine.start()
                publisher = SharedMemoryPublisher(torch.float32)
                partial = [(n, p) for n, p in model.named_parameters() if "layers.1.mlp.up_proj" not in n]
                try:
                    await engine.load_weights(0, publisher.publish(partial, 0))
                except Exception as error:
                    print("error:", repr(error), flush=True)
                print("ready", flush=True)
                time.sleep(120)

            if __name__ == "__main__":
                asyncio.run(main())
            """
        )
    )
    before = set(os.listdir("/dev/shm"))
    trainer = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    try:
        lines = []
        while not lines or lines[-1].strip() not in ("ready", ""):
            lines.append(trainer.stdout.readline())
        assert lines[-1].strip() == "ready"
        # Half of a fused matrix is missing from its very first load: noticed although nothing came before to compare.
        assert "EngineError" in (error := "".join(lines))
        assert "model.layers.1.mlp.gate_up_proj" in error
        children = psutil.Process(trainer.pid).children(recursive=True)
        assert children
    finally:
        trainer.send_signal(signal.SIGKILL)
        trainer.wait(60)
    _, alive = psutil.wait_procs(children, timeout=60)
    assert not alive
    assert set(os.listdir("/dev/shm")) <= before


def test_an_engine_closed_while_it_starts_leaves_nothing(tiny_model_dir: Path, monkeypatch):
    engine = VLLMEngine(str(tiny_model_dir), name="vllm-doomed", **ENGINE)

    async def run() -> None:
        starting = asyncio.ensure_future(engine.start())
        while not (cores := multiprocessing.active_children()):
            assert not starting.done()
            await asyncio.sleep(0.02)
        await asyncio.wait_for(engine.close(), 60)
        with pytest.raises(asyncio.CancelledError):
            await starting
        assert not any(core.is_alive() for core in cores)

    with tempfile.TemporaryDirectory() as temp_dir:  # tmp_path is too long a path for sockets
        monkeypatch.setattr(tempfile, "tempdir", temp_dir)
        asyncio.run(run())
        assert os.listdir(temp_dir) == []
