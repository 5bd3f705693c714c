"""ScriptedEngine: outputs, latencies and failures as given functions, for tests and benchmarks of the control plane."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from async_rl.engines.base import BusyClock, EngineDiedError, EngineError, EngineStats, Generation, GenerationRequest
from async_rl.engines.stamps import segments_of
from async_rl.weights.base import WeightSource


@dataclass(frozen=True, slots=True)
class LoadRecord:
    """One confirmed weight load: when, which version, how many requests were in flight."""

    at_s: float
    version: int
    running: int


class ScriptedEngine:
    """Serves what it is told to, and stamps each token with the version served at the moment the token is due.

    A request's latency is spread evenly over its tokens, so a load in between gives several segments. With
    ``versions_alive`` > 1 a request keeps the version it started with. It can be made to :meth:`die`, and started again
    after :meth:`close`; its records go on.

    Args:
        output: ``(prompt_token_ids, seed) -> token ids``; more than ``max_tokens`` are cut off (finish reason
            ``"length"``).
        latency_s: Seconds of a request, a number or ``(prompt_token_ids, seed) -> seconds``.
        load_s: Seconds of a weight load; the old version is served meanwhile.
        logprob: Log-probability reported for every token.
        name: Name for logs and errors.
        versions_alive: See :class:`~async_rl.engines.base.Engine`.
        max_context: See there.
        clock: Seconds, monotonic.
        sleep: Waits that many seconds on ``clock``; replace both for a virtual clock.
        fail_generate: ``request -> exception`` to raise after the latency, or ``None``.
        fail_load: ``version -> exception`` to raise after the load time, or ``None``.

    Attributes:
        requests: Every request so far, in order of arrival.
        loads: Every confirmed load.
        aborted: Request ids that were cancelled while they ran.
    """

    dtype = "float32"

    def __init__(
        self,
        output: Callable[[tuple[int, ...], int], Sequence[int]],
        latency_s: float | Callable[[tuple[int, ...], int], float] = 0.0,
        *,
        load_s: float = 0.0,
        logprob: float = -1.0,
        name: str = "scripted-0",
        versions_alive: int = 1,
        max_context: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
        fail_generate: Callable[[GenerationRequest], Exception | None] = lambda request: None,
        fail_load: Callable[[int], Exception | None] = lambda version: None,
    ) -> None:
        self.name = name
        self.versions_alive = versions_alive
        self.max_context = max_context
        self.requests: list[GenerationRequest] = []
        self.loads: list[LoadRecord] = []
        self.aborted: list[str] = []
        self._output = output
        self._latency_s = latency_s
        self._load_s = load_s
        self._logprob = logprob
        self._clock = clock
        self._sleep = sleep
        self._fail_generate = fail_generate
        self._fail_load = fail_load
        self._lock = threading.Lock()
        self._version: int | None = None
        self._dead: EngineError | None = None
        self._starts = 0
        self._generated = 0
        self._busy = BusyClock()

    @property
    def died(self) -> EngineDiedError | None:
        """Its death, until it is started again."""
        return self._dead if isinstance(self._dead, EngineDiedError) else None

    async def start(self) -> None:
        """Nothing to bring up; where it was closed, a new engine that serves nothing yet."""
        if self._dead is not None:
            self._starts += 1
            self._version = self._dead = None

    def die(self) -> None:
        """As if its process were killed, from any thread: everything it runs and is asked for fails."""
        self._dead = EngineDiedError(f"{self.name}: the engine process died while it served version {self._version}")

    async def generate(self, request: GenerationRequest) -> Generation:
        """Give the scripted output after the scripted latency."""
        started_with, starts = self._served(), self._starts
        with self._lock:
            self.requests.append(request)
            self._busy.enter(self._clock())
        try:
            prompt, seed = request.prompt_token_ids, request.seed
            token_ids = list(self._output(prompt, seed))
            cut = len(token_ids) > request.sampling.max_tokens
            token_ids = token_ids[: request.sampling.max_tokens]
            latency_s = self._latency_s(prompt, seed) if callable(self._latency_s) else self._latency_s
            versions = []
            for _ in token_ids:
                await self._sleep(latency_s / len(token_ids))
                self._check_alive(starts)
                versions.append(started_with if self.versions_alive > 1 else self._served())
            if error := self._fail_generate(request):
                raise error
            with self._lock:
                self._generated += len(token_ids)
            return Generation(
                token_ids=token_ids,
                logprobs=[self._logprob] * len(token_ids),
                segments=segments_of(versions),
                finish_reason="length" if cut else "stop",
            )
        except asyncio.CancelledError:
            with self._lock:
                self.aborted.append(request.request_id)
            raise
        finally:
            with self._lock:
                self._busy.leave(self._clock())

    async def score(self, token_ids: tuple[int, ...]) -> list[float]:
        """The scripted log-probability for every token but the first."""
        self._served()
        return [self._logprob] * (len(token_ids) - 1)

    async def load_weights(self, version: int, source: WeightSource) -> None:
        """Serve ``version`` after the scripted load time; the source is not read."""
        starts = self._starts
        self._check_alive(starts)
        await self._sleep(self._load_s)
        self._check_alive(starts)
        if error := self._fail_load(version):
            self._dead = EngineError(f"{self.name}: the load of version {version} failed: {error}")
            raise self._dead from error
        with self._lock:
            self._version = version
            self.loads.append(LoadRecord(self._clock(), version, self._busy.running))

    async def close(self) -> None:
        """Refuse further requests; running ones fail at their next token."""
        self._dead = self._dead or EngineError(f"{self.name} is closed")

    def stats(self) -> EngineStats:
        """Counters since the start."""
        with self._lock:
            return EngineStats(self._generated, self._busy.read(self._clock()), 0.0, len(self.loads))

    def _check_alive(self, starts: int) -> None:
        if starts != self._starts:
            raise EngineDiedError(f"{self.name}: the engine process died and was started again meanwhile")
        if self._dead is not None:
            raise type(self._dead)(*self._dead.args)

    def _served(self) -> int:
        self._check_alive(self._starts)
        if self._version is None:
            raise EngineError(f"{self.name} serves nothing before its first load_weights")
        return self._version
