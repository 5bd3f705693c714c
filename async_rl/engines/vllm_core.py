"""LocalCore: the calls of one AsyncLLM, whose engine core is a child process, as VLLMClient wants them."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from vllm import SamplingParams as VLLMSamplingParams
from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest
from vllm.exceptions import VLLMClientError
from vllm.inputs.engine import tokens_input
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.exceptions import EngineDeadError

from async_rl.engines.base import SamplingParams
from async_rl.engines.vllm_port import CoreDiedError, Piece, Span

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

KILL_TIMEOUT_S = 2.0
DIED = "the engine process died"


class LocalCore:
    """An engine core in a child process (a :class:`~async_rl.engines.vllm_port.VLLMCore`).

    Args:
        llm: A started engine, on the running loop.
    """

    def __init__(self, llm: AsyncLLM) -> None:
        self.llm = llm
        transfer = llm.vllm_config.weight_transfer_config
        self.weight_backend = str(transfer.backend) if transfer is not None else ""
        self.stages = llm.vllm_config.parallel_config.worker_extension_cls.endswith("StagingExtension")
        self.max_model_len = int(llm.vllm_config.model_config.max_model_len)
        self.workers = int(llm.vllm_config.parallel_config.world_size_across_dp)
        self._loop = asyncio.get_running_loop()
        self._sentinels: list[Any] = []

    def watch(self, died: Callable[[str], None]) -> None:
        """Have ``died`` called once the process is gone."""

        def on_death() -> None:
            self._unwatch()
            died(DIED)

        self._sentinels = list(self.llm.engine_core.resources.engine_manager.sentinels())
        for sentinel in self._sentinels:
            self._loop.add_reader(sentinel, on_death)

    async def prepare(self) -> None:
        """Finish the handshake, so that the first request and load are ordinary ones."""
        with _translated():
            await self.llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info={}))
            await self.llm.get_supported_tasks()

    def sampling(self, sampling: SamplingParams, seed: int) -> VLLMSamplingParams:
        """Parameters of a request that samples."""
        return sampling_parameters(sampling, seed)

    def scoring(self) -> VLLMSamplingParams:
        """Parameters of a request that scores its prompt."""
        parameters = VLLMSamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False, ignore_eos=True)
        parameters.output_kind = RequestOutputKind.DELTA
        return parameters

    async def run(
        self, request_id: str, prompt: tuple[int, ...], parameters: Any, salt: str
    ) -> AsyncGenerator[Piece, None]:
        """The outputs of one request."""
        prompt_input = tokens_input(list(prompt), cache_salt=salt)
        with _translated():
            async with contextlib.aclosing(self.llm.generate(prompt_input, parameters, request_id)) as outputs:
                async for output in outputs:
                    yield _piece(output)

    async def abort(self, request_id: str) -> None:
        """End a request early."""
        await self.llm.abort(request_id)

    async def pause(self) -> None:
        """Freeze the running requests after the step that is being computed."""
        # AsyncLLM.pause_generation is this call and a sleep of 20 ms, which generation would stand still for.
        with _translated():
            await self.llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=False)

    async def resume(self) -> None:
        """Let them go on."""
        with _translated():
            await self.llm.engine_core.resume_scheduler_async()

    async def connect(self, info: Mapping[str, Any]) -> None:
        """Have every worker join the link over which weights are sent."""
        with _translated():
            await self.llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info=dict(info)))

    async def stage(self, info: Mapping[str, Any]) -> bool:
        """Begin to prepare weights on every worker."""
        with _translated():
            return all(await self.llm.collective_rpc("stage_weights", args=(dict(info),)))

    async def staged(self) -> bool:
        """Whether every worker has prepared them."""
        with _translated():
            return all(await self.llm.collective_rpc("staged_weights"))

    async def load(self, info: Mapping[str, Any], label: str) -> None:
        """Load weights and stamp what is sampled from now on with ``label``."""
        with _translated():
            await self.llm.start_weight_update()
            await self.llm.update_weights(WeightTransferUpdateRequest(update_info=dict(info)))
            await self.llm.finish_weight_update(weight_version=label)

    async def recompute(self) -> None:
        """Have running requests compute their keys and values again."""
        with _translated():
            await self.llm.reset_prefix_cache(reset_running_requests=True)

    async def close(self) -> None:
        """End the process."""
        self._unwatch()
        processes = self.llm.engine_core.resources.engine_manager.processes
        self.llm.shutdown(timeout=0.0)  # SIGKILL: nothing in it has to be saved, and its own way out takes seconds
        for process in processes:
            process.join(KILL_TIMEOUT_S)

    def _unwatch(self) -> None:
        for sentinel in self._sentinels:
            self._loop.remove_reader(sentinel)


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    """Errors of vLLM as ours."""
    try:
        yield
    except EngineDeadError as error:
        raise CoreDiedError(DIED) from error
    except VLLMClientError as error:
        raise ValueError(str(error)) from error


def _piece(output: Any) -> Piece:
    completion = output.outputs[0]
    tokens = list(completion.token_ids)
    logprobs: list[float] = []
    if completion.logprobs is not None:
        logprobs = [finite(entry, token) for entry, token in zip(completion.logprobs, tokens, strict=False)]
    prompt_logprobs: list[float] = []
    if output.prompt_logprobs:
        rest = zip(output.prompt_logprobs[1:], output.prompt_token_ids[1:], strict=True)
        prompt_logprobs = [finite(entry, token) for entry, token in rest]
    spans = [Span(str(v.version), v.start, v.end) for v in completion.weight_versions or []]
    return Piece(tokens, logprobs, prompt_logprobs, spans, (completion.finish_reason or "") if output.finished else "")


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
