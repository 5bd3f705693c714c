"""ClientEngine: the engine around a VLLMClient, whose event loop is a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from async_rl.engines.base import EngineDiedError, EngineStats, Generation, GenerationRequest, running
from async_rl.engines.loop_thread import LoopThread
from async_rl.engines.vllm_client import LoadTimings, VLLMClient
from async_rl.weights.base import WeightSource

STOP_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Session:
    """What exists while an engine runs.

    Attributes:
        thread: Owns the event loop.
        client: On that loop.
        cleanup: Removes what is left when both have ended.
    """

    thread: LoopThread
    client: VLLMClient
    cleanup: Callable[[], None]


class ClientEngine(ABC):
    """An :class:`~async_rl.engines.base.Engine` whose calls run on its own thread, whatever loop awaits them.

    Args:
        name: Short name for logs and errors.
        dtype: Number format of its weights.
        start_timeout_s: Longest start, seconds.
    """

    versions_alive = 1

    def __init__(self, name: str, dtype: str, start_timeout_s: float) -> None:
        self.name = name
        self.dtype = dtype
        self.start_timeout_s = start_timeout_s
        self._session: Session | None = None
        self._opening: tuple[asyncio.Task[Session], asyncio.AbstractEventLoop] | None = None
        self._before = EngineStats()  # what earlier sessions counted

    @abstractmethod
    async def _open(self) -> Session:
        """Bring the engine up, or raise :class:`EngineError` with nothing left behind; so too when cancelled."""

    @property
    def weight_backend(self) -> str:
        """Weight-transfer back end it loads through, for ``make_publisher`` (known once it has started)."""
        return running(self._session, self.name).client.weight_backend

    @property
    def max_context(self) -> int | None:
        """Most tokens the model sees at once, those it samples included; known while the engine runs."""
        return self._session.client.core.max_model_len if self._session is not None else None

    @property
    def last_load(self) -> LoadTimings:
        """Where the seconds of the newest weight load went."""
        return running(self._session, self.name).client.last_load

    @property
    def died(self) -> EngineDiedError | None:
        """Its death, once that is known; from any thread."""
        return self._session.client.died if self._session is not None else None

    async def start(self) -> None:
        """Bring the engine up and wait until it is ready.

        Raises:
            EngineError: it did not come up in time; says why.
            CancelledError: it was closed meanwhile.
        """
        if self._session is None:
            opening = asyncio.ensure_future(self._open())
            self._opening = opening, asyncio.get_running_loop()
            try:
                self._session = await opening
            finally:
                self._opening = None

    async def generate(self, request: GenerationRequest) -> Generation:
        """Sample one turn. Cancelling the awaiting task aborts the request in the engine.

        Raises:
            EngineError: the engine died, failed a load or was closed.
            ValueError: the request can't be served (too long, an impossible sampling parameter).
        """
        session = running(self._session, self.name)
        return await session.thread.run(session.client.generate(request))

    async def score(self, token_ids: tuple[int, ...]) -> list[float]:
        """Log-probabilities of ``token_ids[1:]`` under the served weights at temperature 1."""
        session = running(self._session, self.name)
        return await session.thread.run(session.client.score(token_ids))

    async def load_weights(self, version: int, source: WeightSource) -> None:
        """Replace the weights; returns once every token sampled from now on uses ``version``.

        Raises:
            EngineError: the load failed or was cancelled; the engine must not be used any more.
            ValueError: the source is for another weight back end.
        """
        session = running(self._session, self.name)
        await session.thread.run(session.client.load_weights(version, source))

    async def close(self) -> None:
        """Free everything. Idempotent; works on an engine that never started, is just starting, or died."""
        if (opening := self._opening) is not None:
            task, loop = opening
            with contextlib.suppress(RuntimeError):  # its loop is closed: it has ended meanwhile
                loop.call_soon_threadsafe(task.cancel)
            while self._opening is opening:
                await asyncio.sleep(0.02)
        session, self._session = self._session, None
        if session is not None:
            self._before += session.client.read_stats()
            try:
                await session.thread.run(session.client.close())
            finally:
                await asyncio.to_thread(session.thread.stop, STOP_TIMEOUT_S)
                session.cleanup()

    def stats(self) -> EngineStats:
        """Counters, cheap, from any thread; they go on over a restart."""
        session = self._session
        return self._before + session.client.read_stats() if session is not None else self._before
