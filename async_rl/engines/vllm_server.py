"""VLLMServerEngine: a vLLM server that somebody else runs, on this machine or another, as an engine."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

from async_rl.engines.base import EngineError
from async_rl.engines.client_engine import ClientEngine, Session
from async_rl.engines.loop_thread import LoopThread
from async_rl.engines.vllm_client import VLLMClient
from async_rl.engines.vllm_port import CoreDiedError
from async_rl.engines.vllm_server_address import check_url
from async_rl.engines.vllm_server_core import ServerCore, connect
from async_rl.weights.file import BACKEND as FILE

RETRY_S = 1.0
LOGPROBS_MODE = "processed_logprobs"
log = logging.getLogger(__name__)


class VLLMServerEngine(ClientEngine):
    """Samples with a vLLM server over HTTP; weights travel in files that both sides see.

    The server is started and started again by somebody else, with ``python -m async_rl.serve`` or with ``vllm serve``
    and the flags that docs/engines.md names. A server that dies is waited for, and loaded with the current weights when
    it is back. Everything is as with :class:`~async_rl.engines.vllm.VLLMEngine` otherwise; each token's stamp comes
    from the server and says whose weights it was sampled by.

    The key is read from the environment variable ``ASYNC_RL_API_KEY``. Answers are JSON; nothing received is unpickled.

    Args:
        url: Base URL, for example ``http://127.0.0.1:8001``.
        weights_dir: Directory for the weights; the server must see it under the same path.
        name: Short name for logs and errors.
        dtype: Number format the server was started with.
        allow_remote: Allow a server that is not on a loopback address; that needs a key.
        start_timeout_s: How long the first start waits for the server, seconds; and how long a run without any other
            engine waits for one that died.
        kv_max_age: See :class:`~async_rl.engines.vllm.VLLMEngine`.

    Raises:
        ValueError: an impossible URL, or one that is not allowed.
    """

    restarts_itself = True

    def __init__(
        self,
        url: str,
        *,
        weights_dir: str,
        name: str = "server-0",
        dtype: str = "bfloat16",
        allow_remote: bool = False,
        start_timeout_s: float = 300.0,
        kv_max_age: int | None = None,
    ) -> None:
        if kv_max_age is not None and kv_max_age < 0:
            raise ValueError(f"kv_max_age is a number of versions >= 0 or None, not {kv_max_age}")
        super().__init__(name, dtype, start_timeout_s)
        self.url = check_url(url, allow_remote=allow_remote)
        self.weights_dir = weights_dir
        self._kv_max_age = kv_max_age
        self._patience_s = start_timeout_s

    async def _open(self) -> Session:
        thread = LoopThread(self.name)
        try:
            client = await thread.run(self._find())
        except BaseException:
            thread.stop(timeout_s=1.0)
            raise
        self._patience_s = 0.0  # the control plane tries again, and knows whether anybody else serves meanwhile
        return Session(thread, client, lambda: None)

    async def _find(self) -> VLLMClient:
        core = await self._reach()
        try:
            self._check(core)
            client = VLLMClient(self.name, core, self._kv_max_age)
            await client.prepare()
        except BaseException:
            await core.close()
            raise
        return client

    async def _reach(self) -> ServerCore:
        give_up_s, told = time.monotonic() + self._patience_s, False
        while True:
            try:
                return await connect(self.url)
            except CoreDiedError as error:
                if time.monotonic() >= give_up_s:
                    raise EngineError(f"engine {self.name}: {error}") from error
                if not told:
                    log.info("engine %s: %s; waiting for it up to %g s", self.name, error, self.start_timeout_s)
                    told = True
            await asyncio.sleep(RETRY_S)

    def _check(self, core: ServerCore) -> None:
        facts, where = core.facts, f"engine {self.name}: the server at {self.url}"
        if facts.weight_backend != FILE:
            raise EngineError(
                f"{where} takes weights through {facts.weight_backend or 'nothing'!r}, not files: start it with "
                "`python -m async_rl.serve`, or give vllm serve "
                f'--weight-transfer-config \'{{"backend": "{FILE}"}}\''
            )
        if facts.logprobs_mode != LOGPROBS_MODE:
            raise EngineError(
                f"{where} gives log-probabilities before the temperature ({facts.logprobs_mode}): start it with "
                f"--logprobs-mode {LOGPROBS_MODE}"
            )
        if self.dtype not in ("auto", facts.dtype):
            raise EngineError(
                f"{where} computes in {facts.dtype}, but engine.dtype={self.dtype}: make them the same "
                f"(engine.dtype={facts.dtype}, or the server's --dtype)"
            )


def vllm_servers(
    urls: Sequence[str],
    *,
    weights_dir: str,
    model: str = "",
    name: str = "server",
    dtype: str = "bfloat16",
    allow_remote: bool = False,
    start_timeout_s: float = 300.0,
    kv_max_age: int | None = None,
) -> list[VLLMServerEngine]:
    """One engine for each server; the target of ``engine=vllm_server``.

    Args:
        urls: Base URLs, at least one, each once.
        weights_dir: See :class:`VLLMServerEngine`, as for the rest.
        model: The run's model; the servers were started with theirs, and weights that do not fit are refused.
        name: First part of their names: ``"server"`` gives ``server-0``, ``server-1``.
        dtype: See there.
        allow_remote: See there.
        start_timeout_s: See there.
        kv_max_age: See there.

    Raises:
        ValueError: no URL, the same one twice, or one that is not allowed.
    """
    if not urls:
        raise ValueError("engine.urls is empty: give the servers' addresses, engine.urls=[http://127.0.0.1:8001]")
    engines = [
        VLLMServerEngine(
            url,
            weights_dir=weights_dir,
            name=f"{name}-{i}",
            dtype=dtype,
            allow_remote=allow_remote,
            start_timeout_s=start_timeout_s,
            kv_max_age=kv_max_age,
        )
        for i, url in enumerate(urls)
    ]
    if len({engine.url for engine in engines}) < len(engines):
        raise ValueError(f"engine.urls names a server twice: {', '.join(engine.url for engine in engines)}")
    return engines
