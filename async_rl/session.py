"""RolloutSession: what lives as long as one fit - engines, orchestrator, publisher - opened and closed in order."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from async_rl.engine_meter import EngineMeter
from async_rl.overlap import OverlapClock
from async_rl.weights.parity import check_parity, mean_tolerance

if TYPE_CHECKING:
    import torch

    from async_rl.engines.base import Engine
    from async_rl.environments.rollout import RolloutFunction
    from async_rl.orchestrator.ledger import AnyLedger
    from async_rl.orchestrator.orchestrator import Orchestrator
    from async_rl.policy import PolicyModule
    from async_rl.types import Batch, Prompt
    from async_rl.weights.base import WeightPublisher

T = TypeVar("T")
log = logging.getLogger(__name__)

# Any text will do to tell two sets of weights apart; about a hundred tokens.
_PARITY_TEXTS = (
    "The quick brown fox jumps over the lazy dog, and then it asks: what is 12 + 30? The answer is 42.",
    "In 1969 three people flew to the moon; two of them walked on it, and one of them said a sentence about a step.",
    "def add(a, b): return a + b  # a function that adds two numbers, as every first program does",
)


def in_thread(work: Callable[[], Coroutine[Any, Any, T]], name: str) -> Future[T]:
    """Run a coroutine on an event loop of its own in a daemon thread."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(asyncio.run(work()))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


def wait_for(future: Future[T], poll: Callable[[], None]) -> T:
    """Wait on the main thread, polling stop signals and failures ten times a second."""
    while True:
        poll()
        try:
            return future.result(timeout=0.1)
        except TimeoutError:
            if future.done():
                raise


def start_engines(engines: Sequence[Engine]) -> Future[None]:
    """Start the engines in the background, all at once; the future raises the first failure."""

    async def start() -> None:
        await asyncio.gather(*(engine.start() for engine in engines))

    return in_thread(start, "engine-start")


def close_engines(engines: Sequence[Engine], timeout_s: float) -> list[str]:
    """Close every engine within ``timeout_s`` and return the names of those that did not."""

    async def close() -> list[str]:
        tasks = {asyncio.ensure_future(engine.close()): engine.name for engine in engines}
        done, pending = await asyncio.wait(tasks, timeout=timeout_s)
        for task in done:
            if (error := task.exception()) is not None:
                log.warning("closing engine %s: %s", tasks[task], error)
        return [tasks[task] for task in pending]

    if not engines:
        return []
    future = in_thread(close, "engine-close")
    try:
        return future.result(timeout=timeout_s + 0.5)
    except TimeoutError:
        return [engine.name for engine in engines]


class RolloutSession:
    """The running half of a fit: publishes weights, hands out batches, knows when to stop.

    Args:
        engines: Started engines; none in a replay.
        orchestrator: Wired, not started.
        publisher: Where weights are copied to.
        ledger: The run's record, closed last.
        version: Policy version the session starts with.
        eval_prompts: What evaluation samples.
        eval_rollout: How.
        eval_engines: Started engines for evaluations alone; none: ``engines`` do both.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        orchestrator: Orchestrator,
        publisher: WeightPublisher,
        ledger: AnyLedger,
        version: int,
        eval_prompts: Sequence[Prompt],
        eval_rollout: RolloutFunction,
        eval_engines: Sequence[Engine] = (),
    ) -> None:
        self.engines = list(engines)
        self.eval_engines = list(eval_engines)
        self.orchestrator = orchestrator
        self.publisher = publisher
        self.ledger = ledger
        self.eval_prompts = eval_prompts
        self.eval_rollout = eval_rollout
        self.first_version = version
        self.published_version = version - 1
        self.admitting = False
        self.overlap = OverlapClock()
        self._meter = EngineMeter(self.engines)
        self.started_s = time.monotonic()
        self._busy_before_s = self.busy_s()
        self._tokens_before = self.generated_tokens()

    def admit(self) -> None:
        """Open admission: rollouts start."""
        self.admitting = True
        self.orchestrator.resume()

    def next_batch(self, policy: PolicyModule, poll: Callable[[], None]) -> Batch | None:
        """The next batch; while it is incomplete, train ahead on what is certain to be in it.

        Waiting between the parts is waiting for the batch: hooks run, stop and failures are noticed. Whatever ends the
        wait without a batch takes the gradients of the parts with it; their groups are kept, no more.

        Args:
            policy: What trains the parts.
            poll: Called while waiting; what it raises ends the wait.

        Returns:
            ``None`` when data or steps are over.
        """
        batch = None
        try:
            while (part := self.orchestrator.next_part(poll)) is not None:
                self.overlap.step_started(time.monotonic(), self.busy_s())
                policy.train_ahead(part)
                self.overlap.step_ended(time.monotonic(), self.busy_s())
            batch = self.orchestrator.next_batch(poll)
        finally:
            if batch is None:
                policy.discard()
        return batch

    def busy_s(self) -> float:
        """Seconds during which at least one engine was generating (the busiest engine's)."""
        return max((engine.stats().busy_s for engine in self.engines), default=0.0)

    def generated_tokens(self) -> int:
        """Tokens sampled so far, all engines."""
        return sum(engine.stats().generated_tokens for engine in self.engines)

    def generation_s(self) -> float:
        """Seconds of generation since the session began."""
        return self.busy_s() - self._busy_before_s

    def tokens_per_s(self) -> float:
        """Generated tokens per wall second since the session began."""
        return (self.generated_tokens() - self._tokens_before) / max(time.monotonic() - self.started_s, 1e-9)

    def drain_metrics(self) -> dict[str, float]:
        """What control plane and engines did since the last call."""
        return self.orchestrator.drain_metrics() | self._meter.drain()

    def ask(self, engine: Engine, question: Callable[[], Coroutine[Any, Any, T]], poll: Callable[[], None]) -> T | None:
        """Await an answer of an engine that serves; once more, if it died over it and came back (``Fleet.ask``)."""
        return self.orchestrator.fleet.ask(engine, lambda: wait_for(in_thread(question, "question"), poll), poll)

    def check_parity(
        self,
        engines: Sequence[Engine],
        policy: PolicyModule,
        precision: str,
        version: int,
        poll: Callable[[], None],
    ) -> None:
        """Compare the log-probabilities of engines with the policy's, while no load is applied.

        Args:
            engines: Which ones.
            policy: In the state that was published as ``version``.
            precision: The trainer's, as Lightning names it.
            version: What the engines serve.
            poll: Called while waiting.

        Raises:
            WeightParityError: they differ by more than rounding explains.
        """
        sequences = [policy.tokenizer.encode(text) for text in _PARITY_TEXTS]
        trainer_dtype = {"bf": "bfloat16", "16": "float16"}.get(precision[:2], "float32")
        with self.orchestrator.fleet.hold_loads():
            for engine in engines:
                tolerance = mean_tolerance(trainer_dtype if engine.dtype == "auto" else engine.dtype, trainer_dtype)
                check = partial(check_parity, engine, policy.logprobs, sequences, tolerance=tolerance, version=version)
                report = self.ask(engine, check, poll)
                if report is None:
                    log.warning(
                        "%s is away: its log-probabilities were not compared with those of version %d",
                        *(engine.name, version),
                    )
                    continue
                log.info(
                    "%s serves the weights of version %d: log-probabilities differ from the trainer's by %.2g on "
                    "average (at most %.2g), %.2g would be refused",
                    *(engine.name, version, report.mean_abs, report.max_abs, tolerance),
                )

    def publish(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> float:
        """Copy the weights aside and hand them to the engines; returns the seconds the copy took."""
        began_s = time.monotonic()
        source = self.publisher.publish(weights, version)
        self.published_version = version
        self.orchestrator.fleet.publish(version, source)
        return time.monotonic() - began_s

    def close(self, timeout_s: float) -> list[str]:
        """Stop everything within ``timeout_s``; returns the names of what would not stop."""
        deadline_s = time.monotonic() + timeout_s
        left = list(self.orchestrator.close(0.4 * timeout_s))
        left += close_engines([*self.engines, *self.eval_engines], 0.4 * timeout_s)
        self.publisher.close()
        self.ledger.close(max(deadline_s - time.monotonic(), 0.1 * timeout_s))
        return left
