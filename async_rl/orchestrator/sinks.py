"""Sinks: what finished rollouts become - kept, filtered or failed groups for training, results for evaluation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from async_rl.orchestrator.records import EmptyBatchReport, EngineSlot, Event, Flight, Landing, RolloutFn, reason_of
from async_rl.types import EvalResult, Group, Outcome, Prompt

if TYPE_CHECKING:
    from async_rl.orchestrator.books import Books
    from async_rl.orchestrator.ledger import AnyLedger
    from async_rl.orchestrator.metrics import Meters
    from async_rl.orchestrator.settings import OrchestratorSettings


class RolloutFailureError(RuntimeError):
    """More rollout attempts failed in a row than ``max_failures`` allows; its cause is the first of them."""


class TrainSink:
    """Decides what a finished group becomes and enters it into ledger and books, a landing at a time.

    Called by one thread at a time: its caller holds the room's lock, so that a landing enters whole or, once the run
    closes, not at all.

    Args:
        books: Where every group is.
        ledger: The record.
        meters: Counters for the metrics loop.
        emit: Takes events for the main thread.
        fail: Takes a failure of the run.
        settings: Batch size, filter, and the budget of failures.
    """

    def __init__(
        self,
        books: Books,
        ledger: AnyLedger,
        meters: Meters,
        *,
        emit: Callable[[Event], None],
        fail: Callable[[BaseException], None],
        settings: OrchestratorSettings,
    ) -> None:
        self._books = books
        self._ledger = ledger
        self._meters = meters
        self._emit = emit
        self._fail = fail
        self._settings = settings
        self._failures_in_a_row = 0
        self._first_failure: BaseException | None = None
        self._empty = EmptyStreak()

    def land(self, landing: Landing) -> None:
        """Take what ended on a rollout thread."""
        kept: list[tuple[Group, int | None]] = []
        out: list[tuple[int, Outcome, str]] = []
        groups: list[Group] = []
        for flight in landing.finished:
            if flight.error is not None:
                out.append((flight.group_id, Outcome.FAILED, reason_of(flight.error)))
                self._count_empty(flight)
                continue
            group = flight.group()
            groups.append(group)
            if self._settings.filter_zero_variance and _rewards_are_equal(group):
                out.append((group.id, Outcome.FILTERED, "zero_variance"))
                self._count_empty(flight)
            else:
                kept.append((group, group.head))
                self._empty = EmptyStreak() if self._empty.groups else self._empty
            self._emit(Event("rollout_end", group))
        self._ledger.land(landing.landed)
        self._ledger.keep([group for group, _ in kept])
        self._ledger.end(out)
        self._books.settle(landing.ended, kept, [(group_id, outcome) for group_id, outcome, _ in out])
        self._meters.landed(groups, landing, kept=len(kept), failed=len(landing.finished) - len(groups))
        self._count_failures(landing.outcomes)

    def _count_empty(self, flight: Flight) -> None:
        self._empty.add(flight)
        if self._empty.groups >= self._settings.batch_size:
            self._emit(Event("empty_batch", self._empty.report()))
            self._empty = EmptyStreak()

    def _count_failures(self, outcomes: Sequence[BaseException | None]) -> None:
        for error in outcomes:
            if error is None:
                self._failures_in_a_row = 0
                continue
            if self._failures_in_a_row == 0:
                self._first_failure = error
            self._failures_in_a_row += 1
            if self._failures_in_a_row > self._settings.max_failures:
                first = self._first_failure
                failure = RolloutFailureError(
                    f"{self._failures_in_a_row} rollout attempts in a row failed "
                    f"(max_failures={self._settings.max_failures}); the first one with {type(first).__name__}: {first}"
                )
                failure.__cause__ = first
                self._fail(failure)
                return


def _rewards_are_equal(group: Group) -> bool:
    first = group.trajectories[0].reward
    return all(t.reward == first for t in group.trajectories)


class EmptyStreak:
    """Groups that ended since one was kept, and what they brought instead."""

    def __init__(self) -> None:
        self.groups = 0
        self._rewards: Counter[float] = Counter()
        self._failures: Counter[str] = Counter()
        self._first_error: BaseException | None = None

    def add(self, flight: Flight) -> None:
        """Count a group that was filtered or failed."""
        self.groups += 1
        if flight.error is not None:
            self._failures[reason_of(flight.error)] += 1
            self._first_error = self._first_error or flight.error
        for trajectory in flight.landed.values():
            if len(self._rewards) < 20 or trajectory.reward in self._rewards:
                self._rewards[trajectory.reward] += 1

    def report(self) -> EmptyBatchReport:
        """What to tell the user."""
        return EmptyBatchReport(self.groups, dict(self._rewards), dict(self._failures), self._first_error)


class EvalSink:
    """One evaluation; its rollouts count against no gate, age or ledger.

    Each sample is a flight of its own, so that a failure costs no other sample, on the engines that serve the newest
    version. Its group id is negative.

    Args:
        prompts: What to evaluate.
        samples: Samples per prompt, ``>= 1``.
        rollout: What runs one attempt.
        slots: All engines.
        first_id: Group id of the first sample, ``< 0``; ids go down from it.

    Raises:
        RuntimeError: No engine serves a version yet.
    """

    def __init__(
        self, prompts: Sequence[Prompt], samples: int, rollout: RolloutFn, slots: Sequence[EngineSlot], first_id: int
    ) -> None:
        loaded = [slot for slot in slots if slot.loaded]
        if not loaded:
            raise RuntimeError("evaluate: no engine serves a version yet; call wait_served first")
        newest = max(slot.served.value for slot in loaded)
        self._slots = [slot for slot in loaded if slot.served.value == newest]
        self._prompts = prompts
        self._samples = samples
        self._rollout = rollout
        self._first_id = first_id
        self._launched = 0
        self._landed: dict[int, Flight] = {}

    @property
    def total(self) -> int:
        """Samples in all."""
        return len(self._prompts) * self._samples

    @property
    def over(self) -> bool:
        """Whether every sample is over."""
        return len(self._landed) == self.total

    def launch(self, max_concurrent: int) -> list[Flight]:
        """The next flights, so that at most ``max_concurrent`` samples are in the air."""
        flights = []
        last = min(self.total, len(self._landed) + max_concurrent)
        for n in range(self._launched, last):
            prompt, sample = self._prompts[n // self._samples], n % self._samples
            slot = self._slots[n % len(self._slots)]
            flights.append(Flight(self._first_id - n, prompt, slot.served.value, slot, self._rollout, (sample,), {}, 0))
        self._launched = max(self._launched, last)
        return flights

    def land(self, flight: Flight) -> None:
        """Take a flight that is over; one of an evaluation that was broken off is ignored."""
        n = self._first_id - flight.group_id
        if 0 <= n < self.total:
            self._landed[n] = flight

    def results(self) -> list[EvalResult]:
        """One result per prompt, in order."""
        results = []
        for i, prompt in enumerate(self._prompts):
            flights = [self._landed[i * self._samples + sample] for sample in range(self._samples)]
            trajectories = tuple(t for f in flights for t in f.landed.values())
            failures = tuple(f"{reason_of(e)}: {e}" for f in flights for e in f.given_up.values())
            results.append(EvalResult(prompt, trajectories, failures))
        return results
