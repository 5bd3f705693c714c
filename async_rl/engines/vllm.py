"""VLLMEngine: a vLLM engine beside the trainer, its core in a child process, usable from every event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

from typing_extensions import override

from async_rl.engines.base import EngineError
from async_rl.engines.client_engine import ClientEngine, Session
from async_rl.engines.loop_thread import LoopThread
from async_rl.engines.scratch import Scratch, sweep
from async_rl.engines.vllm_client import VLLMClient
from async_rl.engines.vllm_launch import Launch, VLLMSettings, launch

GIVE_UP_TIMEOUT_S = 15.0
"""Longest wait for a start that was given up; importing vLLM, which nothing can interrupt, takes most of it."""


class VLLMEngine(ClientEngine):
    """Samples with vLLM, colocated with the trainer (an :class:`~async_rl.engines.base.Engine`).

    One thread of this process owns the engine and its event loop; the model runs in a child process that dies with
    this one. Tokens go in and come out; each is stamped by vLLM with the version that sampled it. A weight load pauses
    running requests, swaps the weights between two steps and lets them go on: it holds one version at a time, and a
    request that spans a load has a segment of each.

    Log-probabilities are those of the distribution a token was drawn from: after the temperature, and with top_p,
    top_k or min_p renormalised over the tokens kept. At temperature 0 they are those at temperature 1. The model's
    ``generation_config.json`` contributes its end tokens and nothing else.

    The module that starts it must be importable by a child process (guard scripts with ``if __name__ == "__main__"``).

    Args:
        model: Directory (or hub name) of a Hugging Face model. Its weights are not read: nothing is served before the
            first ``load_weights``.
        name: Short name for logs and errors.
        dtype: ``"bfloat16"``, ``"float32"``, ``"float16"`` or ``"auto"``.
        max_model_len: Longest prompt and completion together, tokens.
        max_num_seqs: Most sequences decoded at once.
        gpu_memory_utilization: Share of the GPU's memory for the engine, in (0, 1]. Not used on the CPU.
        kv_cache_gib: Memory for keys and values on the CPU, GiB.
        cpu_cores: Cores the engine is bound to on the CPU: ``"auto"`` (half of them), ``"none"`` or a list such as
            ``"0,2-3"``.
        seed: Seed of the engine; every request brings its own.
        start_timeout_s: Longest start, seconds.
        kv_max_age: Most versions the keys and values of a running request may be behind; a load that would exceed it
            makes all running requests recompute theirs. ``None``: no bound.
        log_file: File for vLLM's messages; without it only errors are shown.
        engine_kwargs: Further arguments of ``vllm.AsyncEngineArgs``; they override the ones made here.

    Example:
        >>> engine = VLLMEngine("models/smollm2", max_model_len=1024)
        >>> await engine.start()
        >>> await engine.load_weights(0, publisher.publish(model.named_parameters(), version=0))
        >>> generation = await engine.generate(request)
    """

    def __init__(
        self,
        model: str,
        *,
        name: str = "vllm-0",
        dtype: str = "bfloat16",
        max_model_len: int = 2048,
        max_num_seqs: int = 128,
        gpu_memory_utilization: float = 0.45,
        kv_cache_gib: float = 1.0,
        cpu_cores: str = "auto",
        seed: int = 0,
        start_timeout_s: float = 300.0,
        kv_max_age: int | None = None,
        log_file: str | None = None,
        engine_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        if kv_max_age is not None and kv_max_age < 0:
            raise ValueError(f"kv_max_age is a number of versions >= 0 or None, not {kv_max_age}")
        super().__init__(name, dtype, start_timeout_s)
        self._settings = VLLMSettings(
            name=name,
            model=str(model),
            dtype=dtype,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            gpu_memory_utilization=gpu_memory_utilization,
            kv_cache_gib=kv_cache_gib,
            cpu_cores=cpu_cores,
            seed=seed,
            start_timeout_s=start_timeout_s,
            log_file=log_file,
            engine_kwargs=dict(engine_kwargs or {}),
        )
        self._kv_max_age = kv_max_age

    async def _open(self) -> Session:
        thread, scratch, launching = LoopThread(self.name), Scratch(), Launch()
        starting = thread.run(_start_client(self._settings, scratch.name, self._kv_max_age, launching))
        try:
            client = await asyncio.wait_for(starting, self.start_timeout_s)
        except BaseException as error:
            _give_up(launching, thread)
            scratch.cleanup()
            if isinstance(error, TimeoutError):
                raise EngineError(
                    f"engine {self.name} did not start within start_timeout_s={self.start_timeout_s:g} s"
                ) from error
            raise
        return Session(thread, client, scratch.cleanup)

    @override
    async def close(self) -> None:
        """Free everything, what a killed process left behind included: this engine may never have been started."""
        await super().close()
        await asyncio.to_thread(sweep)


def _give_up(launching: Launch, thread: LoopThread) -> None:
    """End a start that failed, or that nobody waits for any more, processes included."""
    deadline_s = time.monotonic() + GIVE_UP_TIMEOUT_S
    while not thread.stop(timeout_s=0.05) and time.monotonic() < deadline_s:
        launching.give_up()


async def _start_client(settings: VLLMSettings, scratch: str, kv_max_age: int | None, launching: Launch) -> VLLMClient:
    llm = launch(settings, scratch, launching)
    try:
        from async_rl.engines.vllm_core import LocalCore

        client = VLLMClient(settings.name, LocalCore(llm), kv_max_age)
        await client.prepare()
    except BaseException:
        llm.shutdown(timeout=0.0)
        raise
    return client
