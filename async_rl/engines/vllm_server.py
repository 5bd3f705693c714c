"""VLLMServerEngine: a vLLM server that somebody else runs, on this machine or another, as an engine."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import time
from collections.abc import Sequence
from typing import Literal
from urllib.parse import urlsplit

from async_rl.engines.base import EngineError
from async_rl.engines.client_engine import ClientEngine, Session
from async_rl.engines.loop_thread import LoopThread
from async_rl.engines.vllm_client import VLLMClient
from async_rl.engines.vllm_port import CoreDiedError
from async_rl.engines.vllm_server_address import check_url, is_loopback
from async_rl.engines.vllm_server_core import ServerCore, connect
from async_rl.engines.vllm_server_lease import LEASE_S, Claim
from async_rl.weights.file import BACKEND as FILE
from async_rl.weights.nccl import BACKEND as NCCL

RETRY_S = 1.0
CLAIM_RETRY_S = 0.5
SIGNS_OF_LIFE = 2
"""So many after a refused claim can't be from a run that was killed before (see ``Claim.renewals``)."""
LOGPROBS_MODE = "processed_logprobs"
WeightTransfer = Literal["auto", "file", "nccl"]
BACKENDS = {"file": FILE, "nccl": NCCL}
"""By value of ``weight_transfer``, what a server must have been started with."""
NAMES = {"file": "files", "nccl": "NCCL"}
log = logging.getLogger(__name__)


class VLLMServerEngine(ClientEngine):
    """Samples with a vLLM server over HTTP; weights travel in files that both sides see, or by NCCL between GPUs.

    The server is started and started again by somebody else, with ``python -m async_rl.serve`` or with ``vllm serve``
    and the flags that docs/engines.md names. A server that dies is waited for, and loaded with the current weights when
    it is back. It serves one run at a time: one that another run has is refused, unless that run gives no sign of life
    (see :class:`~async_rl.engines.vllm_server_lease.ServerLease`). Everything is as with
    :class:`~async_rl.engines.vllm.VLLMEngine` otherwise; each token's stamp comes from the server and says whose
    weights it was sampled by.

    The key is read from the environment variable ``ASYNC_RL_API_KEY``. Answers are JSON; nothing received is unpickled.

    Args:
        url: Base URL, for example ``http://127.0.0.1:8001``.
        weights_dir: Directory for the weights that travel as files; the server must see it under the same path.
        weight_transfer: How weights travel: ``"file"``, ``"nccl"`` (trainer and server on different GPUs), or
            ``"auto"``: as the server was started for.
        name: Short name for logs and errors.
        dtype: Number format the server was started with.
        allow_remote: Allow a server that is not on a loopback address; that needs a key.
        start_timeout_s: How long the first start waits for the server, seconds; and how long a run without any other
            engine waits for one that died.
        kv_max_age: See :class:`~async_rl.engines.vllm.VLLMEngine`.
        run_dir: Directory of the run, told to other runs that want the server; default: ``weights_dir``.

    Raises:
        ValueError: an impossible URL, or one that is not allowed; an unknown ``weight_transfer``.
    """

    restarts_itself = True

    def __init__(
        self,
        url: str,
        *,
        weights_dir: str,
        weight_transfer: WeightTransfer = "auto",
        name: str = "server-0",
        dtype: str = "bfloat16",
        allow_remote: bool = False,
        start_timeout_s: float = 300.0,
        kv_max_age: int | None = None,
        run_dir: str = "",
    ) -> None:
        if kv_max_age is not None and kv_max_age < 0:
            raise ValueError(f"kv_max_age is a number of versions >= 0 or None, not {kv_max_age}")
        if weight_transfer != "auto" and weight_transfer not in BACKENDS:
            raise ValueError(f"weight_transfer is auto, file or nccl, not {weight_transfer!r}")
        super().__init__(name, dtype, start_timeout_s)
        self.weight_transfer = weight_transfer
        self.url = check_url(url, allow_remote=allow_remote)
        self.weights_dir = weights_dir
        self._kv_max_age = kv_max_age
        self._patience_s = start_timeout_s
        self._run = secrets.token_hex(8)
        directory = os.path.abspath(run_dir or weights_dir)
        self._who = f"{directory}, process {os.getpid()} on {socket.gethostname()}"

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
        give_up_s = time.monotonic() + self._patience_s
        core = await self._reach(give_up_s)
        try:
            self._check(core)
            await self._claim(core, give_up_s)
            client = VLLMClient(self.name, core, self._kv_max_age)
            await client.prepare()
        except BaseException:
            await core.close()
            raise
        return client

    async def _reach(self, give_up_s: float) -> ServerCore:
        told = False
        while True:
            try:
                return await connect(self.url, self._run)
            except CoreDiedError as error:
                if time.monotonic() >= give_up_s:
                    raise EngineError(f"engine {self.name}: {error}") from error
                if not told:
                    log.info(
                        "engine %s: %s; waiting for it up to %g s (engine.start_timeout_s). Start one there: `python "
                        "-m async_rl.serve MODEL%s`; or give the addresses of others: engine.urls=[http://HOST:PORT,...]",
                        *(self.name, error, self.start_timeout_s, self._address_arguments()),
                    )
                    told = True
            await asyncio.sleep(RETRY_S)

    def _address_arguments(self) -> str:
        """What has ``async_rl.serve`` listen at this address, which is not always known from the URL."""
        parts = urlsplit(self.url)
        host = "" if is_loopback(parts.hostname or "") else " --host 0.0.0.0"
        return f"{host} --port {parts.port}"

    async def _claim(self, core: ServerCore, give_up_s: float) -> None:
        """Get the server before anything in it is changed; a run that may have died is waited for to lose it."""
        first: Claim | None = None
        while not (claim := await self._ask_for(core)).granted:
            where = f"engine {self.name}: the server at {self.url}"
            if first is None:
                first = claim
                log.info("%s is in use by another run (%s); looking whether that one still lives", where, claim.holder)
            lives = claim.renewals >= first.renewals + SIGNS_OF_LIFE
            if lives or time.monotonic() >= give_up_s:
                seen = "" if lives else f", last heard of {claim.silent_s:.0f} s ago"
                raise EngineError(
                    f"{where} is in use by another run ({claim.holder}{seen}), and serves one at a time: wait until "
                    "that run ends, or stop it; or start a server for this one (`python -m async_rl.serve MODEL --port "
                    f"...`) and give its address in engine.urls. A run that was killed loses it after {LEASE_S:g} s"
                )
            await asyncio.sleep(CLAIM_RETRY_S)
        if first is not None:
            log.info("engine %s: that run is gone, the server at %s is free", self.name, self.url)

    async def _ask_for(self, core: ServerCore) -> Claim:
        try:
            return await core.claim(self._who)
        except CoreDiedError as error:
            raise EngineError(f"engine {self.name}: {error}") from error

    def _check(self, core: ServerCore) -> None:
        facts, where = core.facts, f"engine {self.name}: the server at {self.url}"
        transfer = "file" if self.weight_transfer == "auto" else self.weight_transfer
        wanted = BACKENDS.values() if self.weight_transfer == "auto" else (BACKENDS[transfer],)
        if facts.weight_backend not in wanted:
            given = next((name for name, backend in BACKENDS.items() if backend == facts.weight_backend), "")
            raise EngineError(
                f"{where} takes weights through {facts.weight_backend or 'nothing'!r}, not {NAMES[transfer]}: start it "
                f"with `python -m async_rl.serve --weight-transfer {transfer}`, or give vllm serve "
                f'--weight-transfer-config \'{{"backend": "{BACKENDS[transfer]}"}}\''
                + (f"; or set engine.weight_transfer={given} here" if given else "")
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
    weight_transfer: WeightTransfer = "auto",
    model: str = "",
    name: str = "server",
    dtype: str = "bfloat16",
    allow_remote: bool = False,
    start_timeout_s: float = 300.0,
    kv_max_age: int | None = None,
    run_dir: str = "",
) -> list[VLLMServerEngine]:
    """One engine for each server; the target of ``engine=vllm_server``.

    Args:
        urls: Base URLs, at least one, each once.
        weights_dir: See :class:`VLLMServerEngine`, as for the rest.
        weight_transfer: See there.
        model: The run's model; the servers were started with theirs, and weights that do not fit are refused.
        name: First part of their names: ``"server"`` gives ``server-0``, ``server-1``.
        dtype: See there.
        allow_remote: See there.
        start_timeout_s: See there.
        kv_max_age: See there.
        run_dir: See there.

    Raises:
        ValueError: no URL, the same one twice, or one that is not allowed.
    """
    if not urls:
        raise ValueError("engine.urls is empty: give the servers' addresses, engine.urls=[http://127.0.0.1:8001]")
    engines = [
        VLLMServerEngine(
            url,
            weights_dir=weights_dir,
            weight_transfer=weight_transfer,
            name=f"{name}-{i}",
            dtype=dtype,
            allow_remote=allow_remote,
            start_timeout_s=start_timeout_s,
            kv_max_age=kv_max_age,
            run_dir=run_dir,
        )
        for i, url in enumerate(urls)
    ]
    if len({engine.url for engine in engines}) < len(engines):
        raise ValueError(f"engine.urls names a server twice: {', '.join(engine.url for engine in engines)}")
    return engines
