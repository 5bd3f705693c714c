"""VLLMClient: one vLLM engine, wherever it runs, driven on one event loop: requests, stamps, weight loads, failures."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Coroutine
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from async_rl.engines.base import BusyClock, EngineDiedError, EngineError, EngineStats, Generation, GenerationRequest
from async_rl.engines.vllm_port import CoreDiedError, Piece, Span, VLLMCore
from async_rl.engines.weight_delivery import WeightDelivery
from async_rl.types import Segment
from async_rl.weights.base import WeightSource

T = TypeVar("T")

STAGING_POLL_S = 0.01


@dataclass(slots=True)
class _Running:
    """One request inside vLLM."""

    kv_version: int
    """Oldest version that may have computed keys and values of this request."""
    started: bool = False
    """It has a token."""
    resubmit: bool = False
    """Aborted by a weight load before it had a token; sent again afterwards."""


@dataclass(frozen=True, slots=True)
class LoadTimings:
    """Where the seconds of one weight load went.

    Attributes:
        stage_s: Preparing the weights while generation goes on.
        pause_s: Waiting for the step that is being computed.
        load_s: Putting the weights in place, while generation stands still.
        resume_s: Setting generation going again.
    """

    stage_s: float = 0.0
    pause_s: float = 0.0
    load_s: float = 0.0
    resume_s: float = 0.0

    @property
    def paused_s(self) -> float:
        """How long generation stood still."""
        return self.load_s + self.resume_s


class VLLMClient:
    """Requests and weight loads on one engine. Every method runs on the loop that made ``core``.

    The served version moves only in :meth:`load_weights`, after the engine confirmed the load. Any failure of the
    engine or of a load fails all requests, the running ones at once, and every later call, with the same error.

    A load's label says which client loaded it. So a stamp proves that the token was sampled by weights of this client:
    an engine that has taken the place of the one that was loaded, or a second run that loads into it, is noticed.

    Args:
        name: Engine name for errors.
        core: A started engine.
        kv_max_age: See :class:`async_rl.engines.vllm.VLLMEngine`.
    """

    def __init__(self, name: str, core: VLLMCore, kv_max_age: int | None) -> None:
        self.name = name
        self.stats = EngineStats()
        self.last_load = LoadTimings()
        self.busy = BusyClock()
        self.core = core
        self.weight_backend = core.weight_backend
        self._delivery = WeightDelivery(core)
        self._tag = secrets.token_hex(4)
        self._kv_max_age = kv_max_age
        self._version = -1
        self._requests: dict[str, _Running] = {}
        self._submitted = 0
        self._loading = asyncio.Lock()
        self._open = asyncio.Event()  # set while requests may be sent: after the first load, except during one
        self._loop = asyncio.get_running_loop()
        self._failed: asyncio.Future[EngineError] = self._loop.create_future()
        core.watch(self._on_death)

    @property
    def died(self) -> EngineDiedError | None:
        """The engine's death, once it is known; from any thread."""
        failure = self._failed.result() if self._failed.done() else None
        return failure if isinstance(failure, EngineDiedError) else None

    async def prepare(self) -> None:
        """Finish the handshake, so that the first request and load are ordinary ones."""
        await self._guard(self.core.prepare())

    async def generate(self, request: GenerationRequest) -> Generation:
        """See :meth:`async_rl.engines.base.Engine.generate`."""
        parameters = self.core.sampling(request.sampling, request.seed)
        self.busy.enter(time.monotonic())
        try:
            result = await self._guard(self._run(request.prompt_token_ids, parameters, request.request_id))
        finally:
            self.busy.leave(time.monotonic())
        self.stats = replace(self.stats, generated_tokens=self.stats.generated_tokens + len(result.token_ids))
        return Generation(
            token_ids=result.token_ids,
            logprobs=result.logprobs,
            segments=self._segments(result, request.request_id),
            finish_reason=result.finish_reason,
        )

    async def score(self, token_ids: tuple[int, ...]) -> list[float]:
        """See :meth:`async_rl.engines.base.Engine.score`."""
        result = await self._guard(self._run(token_ids, self.core.scoring(), "score"))
        return result.prompt_logprobs

    async def load_weights(self, version: int, source: WeightSource) -> None:
        """See :meth:`async_rl.engines.base.Engine.load_weights`. Cancelling a load leaves the engine failed."""
        async with self._loading:
            self._check_alive()
            if source.backend != self.weight_backend:
                raise ValueError(
                    f"engine {self.name} loads weights through {self.weight_backend!r}, the published ones are for "
                    f"{source.backend!r}: make the publisher with make_publisher(engine.weight_backend, ...)"
                )
            try:
                timings = await self._guard(self._load(version, source))
            except EngineDiedError:
                raise
            except BaseException as error:
                reason = "was cancelled (its deadline passed?)" if isinstance(error, asyncio.CancelledError) else error
                failure = EngineError(
                    f"engine {self.name}: loading policy version {version} failed: {reason}; it served {self._version} "
                    "before and must not be used any more"
                )
                self._fail(failure)
                if isinstance(error, Exception):
                    raise failure from error
                raise
            self._version = version
            loads = self.stats.loads + 1
            self.stats = replace(self.stats, loads=loads, pauses_s=self.stats.pauses_s + timings.paused_s)
            self.last_load = timings
            self._open.set()

    def read_stats(self) -> EngineStats:
        """Counters, from any thread."""
        return replace(self.stats, busy_s=self.busy.read(time.monotonic()))

    async def close(self) -> None:
        """Free the engine and fail what still runs. Idempotent."""
        self._fail(EngineError(f"engine {self.name} was closed"))
        try:
            await self._delivery.close()
        finally:
            await self.core.close()

    def _check_alive(self) -> None:
        if self._failed.done():
            raise self._failed.result()

    def _fail(self, error: EngineError) -> None:
        if not self._failed.done():
            self._failed.set_result(error)

    def _on_death(self, reason: str) -> None:
        self._fail(EngineDiedError(f"engine {self.name}: {reason}; it served version {self._version}"))

    async def _guard(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Await ``coroutine``, or the engine's failure if that comes first (a call to a dead process never returns)."""
        if self._failed.done():
            coroutine.close()
            raise self._failed.result()
        task = self._loop.create_task(coroutine)
        try:
            await asyncio.wait((task, self._failed), return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            task.cancel()
            await asyncio.wait((task,))
            raise
        if not task.done():
            task.cancel()
            raise self._failed.result()
        try:
            return task.result()
        except CoreDiedError as error:
            self._on_death(str(error))
            raise self._failed.result() from error
        except ValueError as error:
            raise ValueError(f"engine {self.name} refused a request: {error}") from error

    async def _run(self, prompt: tuple[int, ...], parameters: Any, label: str) -> _Result:
        """One request to its end, sent again where a weight load caught it before its first token."""
        while True:
            if self._version < 0 and not self._loading.locked():
                raise EngineError(f"engine {self.name} serves no policy version yet: load_weights comes first")
            await self._open.wait()
            self._submitted += 1
            request_id = f"{label}-{self._submitted}"
            running = self._requests[request_id] = _Running(kv_version=self._version)
            result = _Result()
            try:
                # The salt keeps the versions apart in the prefix cache: keys of one load never answer a request of
                # another. vLLM can't empty that cache while requests run, and the salt is fixed when a request is sent,
                # so a load sends those again that still wait for their first token (they could find old keys).
                salt = f"{self._tag}-{self.stats.loads}"
                async with contextlib.aclosing(self.core.run(request_id, prompt, parameters, salt)) as pieces:
                    async for piece in pieces:
                        result.add(piece)
                        running.started = True
            finally:
                del self._requests[request_id]
            if result.finish_reason in ("stop", "length"):
                return result
            if not running.resubmit:
                raise EngineError(f"engine {self.name}: request {label} ended with {result.finish_reason!r}")

    async def _load(self, version: int, source: WeightSource) -> LoadTimings:
        """Prepare the weights while the engine generates, if it can, and swap them between two of its steps."""
        info = await self._delivery.prepare(source)
        begun_s = time.monotonic()
        staged = self.core.stages and await self.core.stage(info)
        while staged and not await self.core.staged():
            await asyncio.sleep(STAGING_POLL_S)
        self._open.clear()
        pausing_s = time.monotonic()
        await self.core.pause()
        paused_s = time.monotonic()
        for request_id, running in list(self._requests.items()):
            if not running.started:
                running.resubmit = True
                await self.core.abort(request_id)
        await self._delivery.load(source, info, f"{self._tag}-{version}")
        oldest = min((r.kv_version for r in self._requests.values() if r.started), default=version)
        recompute = self._kv_max_age is not None and version - oldest > self._kv_max_age
        if recompute:
            await self.core.recompute()
            oldest = version
            for running in self._requests.values():
                running.kv_version = version
        self.stats = replace(self.stats, recomputes=self.stats.recomputes + recompute, kv_age=version - oldest)
        loaded_s = time.monotonic()
        await self.core.resume()
        return LoadTimings(
            stage_s=pausing_s - begun_s,
            pause_s=paused_s - pausing_s,
            load_s=loaded_s - paused_s,
            resume_s=time.monotonic() - loaded_s,
        )

    def _segments(self, result: _Result, label: str) -> tuple[Segment, ...]:
        segments = tuple(Segment(self._version_of(s.label), s.start, s.end) for s in result.spans if s.end > s.start)
        covered = 0
        for segment in segments:
            if segment.start != covered:
                break
            covered = segment.end
        if covered != len(result.token_ids) or len(result.logprobs) != covered:
            raise EngineError(
                f"engine {self.name}: request {label} has {len(result.token_ids)} tokens, {len(result.logprobs)} "
                f"log-probabilities and the version spans {segments}: a token without a version can't be trained"
            )
        return segments

    def _version_of(self, label: str) -> int:
        tag, loaded, version = label.partition("-")
        if tag != self._tag:
            if loaded:
                self._fail(EngineError(f"engine {self.name}: another run loads its weights into it ({label!r})"))
            else:  # the label an engine starts with
                self._on_death("it was started again and has lost its weights")
            raise self._failed.result()
        return int(version)


class _Result:
    """What came back for one request, put together from its pieces."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.prompt_logprobs: list[float] = []
        self.spans: list[Span] = []
        self.finish_reason = ""

    def add(self, piece: Piece) -> None:
        self.token_ids += piece.token_ids
        self.logprobs += piece.logprobs
        self.prompt_logprobs = piece.prompt_logprobs or self.prompt_logprobs
        self.spans = piece.spans
        self.finish_reason = piece.finish_reason
