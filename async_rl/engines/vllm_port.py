"""VLLMCore: what VLLMClient needs of a running vLLM engine, be it a child process or a server."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from async_rl.engines.base import SamplingParams


class CoreDiedError(RuntimeError):
    """What runs the model is gone; the message says how that was noticed."""


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens ``[start, end)`` of a request, sampled by weights that were loaded under ``label``."""

    label: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a request's output.

    Attributes:
        token_ids: New tokens.
        logprobs: Of each of them; NaN where unknown.
        prompt_logprobs: Of the prompt's tokens but the first, where asked for.
        spans: In the last piece, what sampled all tokens of the request.
        finish_reason: Empty until the last piece.
    """

    token_ids: list[int]
    logprobs: list[float]
    prompt_logprobs: list[float]
    spans: list[Span]
    finish_reason: str


class VLLMCore(Protocol):
    """The calls of one running vLLM engine.

    Every method runs on the event loop that made it, and raises :class:`CoreDiedError` where it finds the engine gone,
    ``ValueError`` where the engine refuses a request.
    """

    weight_backend: str
    """Weight-transfer back end it was started with."""
    stages: bool
    """It can prepare weights while it generates."""
    workers: int
    """Processes that hold a part of the model each, >= 1."""
    max_model_len: int
    """Longest prompt and completion together, tokens."""

    def watch(self, died: Callable[[str], None]) -> None:
        """Have ``died`` called with the reason, once, when the engine turns out to be gone."""
        ...

    async def prepare(self) -> None:
        """Finish the handshake, so that the first request and load are ordinary ones."""
        ...

    def sampling(self, sampling: SamplingParams, seed: int) -> Any:
        """Parameters for :meth:`run` of a request that samples."""
        ...

    def scoring(self) -> Any:
        """Parameters for :meth:`run` of a request that wants the log-probabilities of its prompt."""
        ...

    def run(self, request_id: str, prompt: tuple[int, ...], parameters: Any, salt: str) -> AsyncGenerator[Piece, None]:
        """One request: a first piece as soon as it has a token, and the rest. Closing it aborts the request.

        Args:
            request_id: Unique.
            prompt: Token ids.
            parameters: From :meth:`sampling` or :meth:`scoring`.
            salt: Requests share cached keys only with requests of the same salt.
        """
        ...

    async def abort(self, request_id: str) -> None:
        """End a request early: its last piece comes with another finish reason than ``"stop"`` and ``"length"``."""
        ...

    async def pause(self) -> None:
        """Freeze running requests where they are; returns when nothing is computed any more."""
        ...

    async def resume(self) -> None:
        """Let them go on."""
        ...

    async def connect(self, info: Mapping[str, Any]) -> None:
        """Join the link over which weights are sent; returns when all who were told of it have joined."""
        ...

    async def stage(self, info: Mapping[str, Any]) -> bool:
        """Begin to prepare weights; ``False``: this model can't, load them while generation is paused."""
        ...

    async def staged(self) -> bool:
        """Whether they are prepared; raises what went wrong."""
        ...

    async def load(self, info: Mapping[str, Any], label: str) -> None:
        """Put weights in place, while generation is paused; tokens sampled afterwards are stamped with ``label``."""
        ...

    async def recompute(self) -> None:
        """Have the running requests compute all their keys and values again."""
        ...

    async def close(self) -> None:
        """Free everything. Idempotent."""
        ...
