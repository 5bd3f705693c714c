"""TransformersEngine: samples with plain transformers in a thread of this process, for machines without vLLM."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from async_rl.engines.base import EngineError, EngineStats, Generation, GenerationRequest, SamplingParams, running
from async_rl.weights.base import WeightSource

if TYPE_CHECKING:
    from async_rl.engines.transformers_worker import LoadedModel, TransformersWorker


class TransformersEngine:
    """Samples with a Hugging Face model (an :class:`~async_rl.engines.base.Engine`).

    One thread owns the model and decodes all running requests together; waiting requests join between two tokens, and
    weights are swapped there, so each token has exactly one version. Log-probabilities are those of the distribution a
    token was drawn from: after the temperature, and with top_p, top_k or min_p renormalised over the tokens kept. At
    temperature 0 they are those at temperature 1.

    Args:
        model: Directory (or hub name) of a Hugging Face causal language model with its tokenizer.
        name: Short name for logs and errors.
        dtype: ``"float32"``, ``"bfloat16"``, ``"float16"`` or ``"auto"`` (the model's own).
        device: ``"cpu"``, ``"cuda"``, ``"cuda:1"``, ``"mps"`` or ``"auto"`` (the first accelerator there is).
        max_batch: Most requests decoded at once, >= 1.
        max_model_len: Longest prompt and completion together, tokens; default the model's own limit.
        deterministic: Decode one request at a time, so that its tokens do not depend, to the last bit, on what else is
            running. Several times slower; for runs that must repeat exactly.
        kv_max_age: Most versions the keys and values of a running request may be behind; a load that would exceed it
            makes all running requests recompute theirs. ``None``: no bound.
        threads: CPU threads of the engine; default torch's.

    Raises:
        ValueError: a number out of range, or an unknown dtype.

    Example:
        >>> engine = TransformersEngine("models/smollm2")
        >>> await engine.start()
        >>> await engine.load_weights(0, publisher.publish(model.named_parameters(), version=0))
        >>> generation = await engine.generate(request)
    """

    versions_alive = 1

    def __init__(
        self,
        model: str,
        *,
        name: str = "transformers-0",
        dtype: str = "float32",
        device: str = "auto",
        max_batch: int = 64,
        max_model_len: int | None = None,
        deterministic: bool = False,
        kv_max_age: int | None = None,
        threads: int | None = None,
    ) -> None:
        if dtype not in (known := ("float32", "bfloat16", "float16", "auto")):
            raise ValueError(f"engine.dtype={dtype!r}: must be one of {', '.join(known)}")
        for key, value, least in (
            ("max_batch", max_batch, 1),
            ("max_model_len", max_model_len, 2),
            ("kv_max_age", kv_max_age, 0),
            ("threads", threads, 1),
        ):
            if value is not None and value < least:
                raise ValueError(f"engine.{key}={value}: must be >= {least}")
        self.name = name
        self._model = str(model)
        self.dtype = dtype
        self._device = device
        self._max_batch = 1 if deterministic else max_batch
        self._max_model_len = max_model_len
        self._kv_max_age = kv_max_age
        self._threads = threads
        self._session: _Session | None = None

    @property
    def max_context(self) -> int | None:
        """Most tokens the model sees at once, those it samples included; known while the engine runs."""
        return self._session.model.max_context if self._session is not None else None

    async def start(self) -> None:
        """Read the model.

        Raises:
            EngineError: it cannot be read.
        """
        if self._session is not None:
            return
        from async_rl.engines.transformers_worker import TransformersWorker, WorkerSettings

        settings = WorkerSettings(
            name=self.name,
            model=self._model,
            dtype=self.dtype,
            device=self._device,
            max_batch=self._max_batch,
            max_model_len=self._max_model_len,
            kv_max_age=self._kv_max_age,
            threads=self._threads,
        )
        worker = TransformersWorker(settings)
        try:
            model = await asyncio.wrap_future(worker.ready)
        except Exception as error:
            raise EngineError(f"engine {self.name} cannot read the model {self._model}: {error}") from error
        self._session = _Session(worker, model)

    async def generate(self, request: GenerationRequest) -> Generation:
        """Sample one turn. Cancelling the awaiting task ends the request before its next token.

        Raises:
            EngineError: the engine died, failed a load, was closed or has no weights yet.
            ValueError: the request cannot be served: an empty or too long prompt, an impossible sampling parameter.
        """
        session = running(self._session, self.name)
        check_sampling(request.sampling)
        if not 0 < len(request.prompt_token_ids) < session.model.max_len:
            raise ValueError(
                f"request {request.request_id}: the prompt has {len(request.prompt_token_ids)} tokens; the engine "
                f"{self.name} takes 1 to {session.model.max_len - 1} (engine.max_model_len less one to sample)"
            )
        return await asyncio.wrap_future(session.worker.submit(request))

    async def score(self, token_ids: tuple[int, ...]) -> list[float]:
        """Log-probabilities of ``token_ids[1:]`` under the served weights at temperature 1."""
        return await asyncio.wrap_future(running(self._session, self.name).worker.score(token_ids))

    async def load_weights(self, version: int, source: WeightSource) -> None:
        """Copy the weights in between two tokens; returns once every later token uses ``version``.

        Raises:
            EngineError: the weights could not be read or do not fit; the engine must not be used any more.
        """
        await asyncio.wrap_future(running(self._session, self.name).worker.load(version, source))

    async def close(self) -> None:
        """End the thread and free the model. Idempotent; works on an engine that never started or died.

        Raises:
            EngineError: the thread did not end within 10 s.
        """
        session, self._session = self._session, None
        if session is not None and not await asyncio.to_thread(session.worker.stop, 10.0):
            raise EngineError(f"engine {self.name} did not stop within 10 s: one forward pass takes that long")

    def stats(self) -> EngineStats:
        """Counters since the start; all zero while the engine is not running."""
        return self._session.worker.stats() if self._session is not None else EngineStats()


class _Session:
    """What exists while the engine runs."""

    def __init__(self, worker: TransformersWorker, model: LoadedModel) -> None:
        self.worker = worker
        self.model = model


def check_sampling(sampling: SamplingParams) -> None:
    """Refuse sampling parameters that mean nothing.

    Raises:
        ValueError: names the parameter, its value and its range.
    """
    for key, fine, allowed in (
        ("max_tokens", sampling.max_tokens >= 1, ">= 1"),
        ("temperature", sampling.temperature >= 0, ">= 0"),
        ("top_p", 0 < sampling.top_p <= 1, "in (0, 1]"),
        ("top_k", sampling.top_k >= 0, ">= 0"),
        ("min_p", 0 <= sampling.min_p <= 1, "in [0, 1]"),
        ("stop", all(sampling.stop), "without empty strings"),
    ):
        if not fine:
            raise ValueError(f"sampling.{key}={getattr(sampling, key)!r}: must be {allowed}")
