"""The Engine protocol: what the control plane and the environments need of anything that samples tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from async_rl.types import RunError, Segment
from async_rl.weights.base import WeightSource

SessionT = TypeVar("SessionT")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to sample one model turn.

    Attributes:
        max_tokens: Most tokens to generate, >= 1.
        temperature: >= 0; 0 is greedy. Log-probabilities are those of the tempered distribution.
        top_p: In (0, 1].
        top_k: 0 for all tokens, else >= 1.
        min_p: In [0, 1].
        stop: Strings that end the turn (kept out of the text, their tokens are trained).
    """

    max_tokens: int = 128
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One model turn to sample: token ids in.

    Attributes:
        request_id: Unique in the run.
        prompt_token_ids: The context, exactly as it will be trained on.
        sampling: How to sample.
        seed: Sampling seed.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    seed: int


@dataclass(frozen=True, slots=True)
class Generation:
    """What was sampled: token ids out, each stamped by the engine that sampled it.

    Attributes:
        token_ids: Generated tokens, the end-of-turn token included, ``[generated]``.
        logprobs: Log-probability of each under the distribution it was drawn from, ``[generated]``; NaN where unknown.
        segments: Version spans; ranges index ``token_ids``, contiguous, covering all of it.
        finish_reason: ``"stop"`` (an end-of-sequence token or stop string) or ``"length"``.
    """

    token_ids: list[int]
    logprobs: list[float]
    segments: tuple[Segment, ...]
    finish_reason: str


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters since start; the metrics loop takes differences.

    Attributes:
        generated_tokens: Tokens sampled.
        busy_s: Seconds during which at least one request was running.
        pauses_s: Seconds generation stood still for weight loads.
        loads: Confirmed weight loads.
        recomputes: Loads at which the running requests computed their keys and values anew (``kv_max_age``).
        kv_age: Not a counter: how many versions behind the oldest keys and values of a running request were when
            generation went on after the newest load; 0 without any.
    """

    generated_tokens: int = 0
    busy_s: float = 0.0
    pauses_s: float = 0.0
    loads: int = 0
    recomputes: int = 0
    kv_age: int = 0

    def __add__(self, other: EngineStats) -> EngineStats:
        return EngineStats(
            self.generated_tokens + other.generated_tokens,
            self.busy_s + other.busy_s,
            self.pauses_s + other.pauses_s,
            self.loads + other.loads,
            self.recomputes + other.recomputes,
            other.kv_age,
        )


class EngineError(RunError):
    """The engine cannot serve: it died, or a load failed or timed out. Names the engine and the version."""

    fatal = True
    """No request to this engine can succeed any more: not worth a retry."""


class EngineDiedError(EngineError):
    """The engine's process is gone. Raised by everything that awaits it and by every later call.

    Unlike a load that failed on a living engine, which ends the run, this is made good: the engine is closed, started
    again and given the current weights, and the groups it was running are launched again.
    """

    engine_died = True
    """What the control plane looks at, which knows no engine's classes."""


class Engine(Protocol):
    """Samples tokens with one known policy version at a time.

    ``generate`` and ``load_weights`` may be awaited from any event loop of any thread. An engine starts with whatever
    its model directory holds and serves nothing until the first ``load_weights`` gave it a version. Where its process
    may die, everything that awaits it raises :class:`EngineDiedError` then; after ``close()`` and ``start()`` it is a
    new engine that serves nothing yet.

    Attributes that an engine may have besides:
        died: The :class:`EngineDiedError` once its process is known to be dead, else ``None``; cheap, from any thread.
            It is polled, so that an idle engine is brought back at once and not at its next request.
        restarts_itself: True where somebody else runs the process (a remote server). ``start()`` then raises
            :class:`EngineError` while it is not healthy and is tried again every second. Deaths cost nothing of
            ``max_engine_restarts`` while another engine is open; with none open each is one of them, and the run ends
            after ``start_timeout_s`` seconds.
        start_timeout_s: Longest start, seconds; needed with ``restarts_itself``.
        max_context: Most tokens the model can see at once, those it samples included, >= 2; ``None`` where it is not
            known or the engine has not started. A conversation that has outgrown it ends as its budget does; an engine
            without it has to refuse such requests itself.
    """

    name: str
    """Short name for logs and errors, for example ``"vllm-0"``."""
    versions_alive: int
    """How many policy versions it can serve at once (1: a load replaces the weights of running requests too)."""
    dtype: str
    """Number format of its weights: ``"bfloat16"``, ``"float32"``, ``"float16"`` or ``"auto"``."""

    async def start(self) -> None:
        """Bring the engine up. Raises :class:`EngineError`."""
        ...

    async def generate(self, request: GenerationRequest) -> Generation:
        """Sample one turn. Cancelling the awaiting task aborts the request in the engine."""
        ...

    async def score(self, token_ids: tuple[int, ...]) -> list[float]:
        """Log-probabilities of ``token_ids[1:]`` under the served weights at temperature 1, for the parity check."""
        ...

    async def load_weights(self, version: int, source: WeightSource) -> None:
        """Replace the weights; returns once every token sampled from now on uses ``version``.

        Raises:
            EngineError: the load failed; the served version is then unknown and the engine must not be used.
        """
        ...

    async def close(self) -> None:
        """Stop and free everything, within seconds. Idempotent; works on an engine that never started or died."""
        ...

    def stats(self) -> EngineStats:
        """Counters, cheap, from any thread."""
        ...


@dataclass(slots=True)
class BusyClock:
    """Accumulates the seconds during which at least one request runs (all calls from one thread)."""

    running: int = 0
    since_s: float = 0.0
    total_s: float = field(default=0.0)

    def enter(self, now_s: float) -> None:
        """A request starts."""
        if self.running == 0:
            self.since_s = now_s
        self.running += 1

    def leave(self, now_s: float) -> None:
        """A request ends."""
        self.running -= 1
        if self.running == 0:
            self.total_s += now_s - self.since_s

    def read(self, now_s: float) -> float:
        """Busy seconds so far."""
        return self.total_s + (now_s - self.since_s if self.running else 0.0)


def running(session: SessionT | None, name: str) -> SessionT:
    """What exists while an engine runs.

    Raises:
        EngineError: it does not run; names it.
    """
    if session is None:
        raise EngineError(f"engine {name} is not running: await start() first")
    return session
