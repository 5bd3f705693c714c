"""VLLMClient: one running AsyncLLM, driven on its own event loop: requests, stamps, weight loads, failures."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Coroutine
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from vllm import SamplingParams as VLLMSamplingParams
from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest
from vllm.exceptions import VLLMClientError
from vllm.inputs.engine import tokens_input
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.exceptions import EngineDeadError

from async_rl.engines.base import BusyClock, EngineError, EngineStats, Generation, GenerationRequest, SamplingParams
from async_rl.types import Segment
from async_rl.weights.base import WeightSource

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

T = TypeVar("T")

KILL_TIMEOUT_S = 2.0
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
    """Requests and weight loads on one engine core. Every method runs on the loop that started ``llm``.

    The served version moves only in :meth:`load_weights`, after the engine confirmed the load. Any failure of the
    engine core or of a load fails all requests, the running ones at once, and every later call, with the same error.

    Args:
        name: Engine name for errors.
        llm: A started engine.
        kv_max_age: See :class:`async_rl.engines.vllm.VLLMEngine`.
    """

    def __init__(self, name: str, llm: AsyncLLM, kv_max_age: int | None) -> None:
        self.name = name
        self.stats = EngineStats()
        self.last_load = LoadTimings()
        self.busy = BusyClock()
        self._llm = llm
        self.weight_backend = str(llm.vllm_config.weight_transfer_config.backend)
        extension = llm.vllm_config.parallel_config.worker_extension_cls
        self._stages = extension.endswith("StagingExtension")
        self._kv_max_age = kv_max_age
        self._version = -1
        self._requests: dict[str, _Running] = {}
        self._submitted = 0
        self._loading = asyncio.Lock()
        self._open = asyncio.Event()  # set while requests may be sent: after the first load, except during one
        self._loop = asyncio.get_running_loop()
        self._failed: asyncio.Future[EngineError] = self._loop.create_future()
        self._sentinels = list(llm.engine_core.resources.engine_manager.sentinels())
        for sentinel in self._sentinels:
            self._loop.add_reader(sentinel, self._on_death)

    async def prepare(self) -> None:
        """Finish the handshake, so that the first request and load are ordinary ones."""
        await self._guard(self._llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info={})))
        await self._guard(self._llm.get_supported_tasks())

    async def generate(self, request: GenerationRequest) -> Generation:
        """See :meth:`async_rl.engines.base.Engine.generate`."""
        parameters = sampling_parameters(request.sampling, request.seed)
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
        parameters = VLLMSamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False, ignore_eos=True)
        parameters.output_kind = RequestOutputKind.DELTA
        result = await self._guard(self._run(token_ids, parameters, "score"))
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

    def close(self) -> None:
        """End the engine core and fail what still runs. Idempotent."""
        for sentinel in self._sentinels:
            self._loop.remove_reader(sentinel)
        self._fail(EngineError(f"engine {self.name} was closed"))
        processes = self._llm.engine_core.resources.engine_manager.processes
        self._llm.shutdown(timeout=0.0)  # SIGKILL: nothing in it has to be saved, and its own way out takes seconds
        for process in processes:
            process.join(KILL_TIMEOUT_S)

    def _check_alive(self) -> None:
        if self._failed.done():
            raise self._failed.result()

    def _fail(self, error: EngineError) -> None:
        if not self._failed.done():
            self._failed.set_result(error)

    def _on_death(self) -> None:
        for sentinel in self._sentinels:
            self._loop.remove_reader(sentinel)
        self._fail(EngineError(f"engine {self.name}: the engine process died while it served version {self._version}"))

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
        except EngineDeadError as error:
            self._on_death()
            raise self._failed.result() from error
        except VLLMClientError as error:
            raise ValueError(f"engine {self.name} refused a request: {error}") from error

    async def _run(self, prompt: tuple[int, ...], parameters: VLLMSamplingParams, label: str) -> _Result:
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
                prompt_input = tokens_input(list(prompt), cache_salt=f"load-{self.stats.loads}")
                async with contextlib.aclosing(self._llm.generate(prompt_input, parameters, request_id)) as outputs:
                    async for output in outputs:
                        result.add(output)
                        running.started = True
            finally:
                del self._requests[request_id]
            if result.finish_reason in ("stop", "length"):
                return result
            if not running.resubmit:
                raise EngineError(f"engine {self.name}: request {label} ended with {result.finish_reason!r}")

    async def _load(self, version: int, source: WeightSource) -> LoadTimings:
        """Prepare the weights while the engine generates, if it can, and swap them between two of its steps."""
        core = self._llm.engine_core
        info = dict(source.update_info())
        begun_s = time.monotonic()
        staged = self._stages and await self._call("stage_weights", info)
        while staged and not await self._call("staged_weights"):
            await asyncio.sleep(STAGING_POLL_S)
        self._open.clear()
        pausing_s = time.monotonic()
        # AsyncLLM.pause_generation is this call and a sleep of 20 ms, which generation would stand still for.
        await core.pause_scheduler_async(mode="keep", clear_cache=False)
        paused_s = time.monotonic()
        for request_id, running in list(self._requests.items()):
            if not running.started:
                running.resubmit = True
                await self._llm.abort(request_id)
        await self._llm.start_weight_update()
        await self._llm.update_weights(WeightTransferUpdateRequest(update_info=info))
        await self._llm.finish_weight_update(weight_version=str(version))
        oldest = min((r.kv_version for r in self._requests.values() if r.started), default=version)
        if self._kv_max_age is not None and version - oldest > self._kv_max_age:
            await self._llm.reset_prefix_cache(reset_running_requests=True)
            for running in self._requests.values():
                running.kv_version = version
        loaded_s = time.monotonic()
        await core.resume_scheduler_async()
        return LoadTimings(
            stage_s=pausing_s - begun_s,
            pause_s=paused_s - pausing_s,
            load_s=loaded_s - paused_s,
            resume_s=time.monotonic() - loaded_s,
        )

    async def _call(self, method: str, *arguments: Any) -> bool:
        """A method of :class:`async_rl.weights.vllm_extension.StagingExtension` on every worker."""
        return all(await self._llm.collective_rpc(method, args=arguments))

    def _segments(self, result: _Result, label: str) -> tuple[Segment, ...]:
        segments = tuple(Segment(int(v.version), v.start, v.end) for v in result.weight_versions if v.end > v.start)
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


class _Result:
    """What vLLM returned for one request, put together from its partial outputs."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.prompt_logprobs: list[float] = []
        self.weight_versions: list[Any] = []
        self.finish_reason = ""

    def add(self, output: Any) -> None:
        completion = output.outputs[0]
        tokens = list(completion.token_ids)
        self.token_ids += tokens
        if completion.logprobs is not None:
            self.logprobs += [finite(entry, token) for entry, token in zip(completion.logprobs, tokens, strict=False)]
        if output.prompt_logprobs:
            rest = zip(output.prompt_logprobs[1:], output.prompt_token_ids[1:], strict=True)
            self.prompt_logprobs = [finite(entry, token) for entry, token in rest]
        if output.finished:
            self.weight_versions = completion.weight_versions or []
            self.finish_reason = completion.finish_reason or ""


def finite(entry: Any, token: int) -> float:
    """The log-probability of ``token`` at one position of vLLM's output; NaN where absent, None or not finite."""
    logprob = entry.get(token) if entry is not None else None
    value = math.nan if logprob is None or logprob.logprob is None else float(logprob.logprob)
    return value if math.isfinite(value) else math.nan


def sampling_parameters(sampling: SamplingParams, seed: int) -> VLLMSamplingParams:
    """Our parameters as vLLM's: the sampled token's log-probability only, text only where a stop string needs it."""
    return VLLMSamplingParams(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        stop=list(sampling.stop) or None,
        seed=seed,
        logprobs=0,
        detokenize=bool(sampling.stop),
        # The first output tells that the request has started, the last one brings the rest: no wake-up per token.
        output_kind=RequestOutputKind.DELTA,
        stream_interval=1 << 30,
    )
