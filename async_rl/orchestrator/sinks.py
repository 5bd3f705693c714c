"""TrainSink: what finished rollouts become - kept, filtered or failed groups."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from async_rl.orchestrator.records import EmptyBatchReport, Event, Flight, Landing, reason_of
from async_rl.types import Group, Outcome, RunError

if TYPE_CHECKING:
    from async_rl.orchestrator.books import Books
    from async_rl.orchestrator.ledger import AnyLedger
    from async_rl.orchestrator.metrics import Meters
    from async_rl.orchestrator.settings import OrchestratorSettings


class RolloutFailureError(RunError):
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
        self._empty_in_a_row = 0

    def land(self, landing: Landing) -> None:
        """Take what ended on a rollout thread."""
        kept: list[tuple[Group, int | None]] = []
        out: list[tuple[int, Outcome, str]] = []
        filtered: list[Group] = []
        for flight in landing.finished:
            if flight.error is not None:
                out.append((flight.group_id, Outcome.FAILED, reason_of(flight.error)))
                self._count_empty(flight)
                continue
            group = flight.group()
            if self._settings.filter_zero_variance and _rewards_are_equal(group):
                filtered.append(group)
                out.append((group.id, Outcome.FILTERED, "zero_variance"))
                self._count_empty(flight)
            else:
                kept.append((group, group.head))
                self._empty = EmptyStreak() if self._empty.groups else self._empty
                self._empty_in_a_row = 0
            self._emit(Event("rollout_end", group))
        self._ledger.land(landing.landed)
        self._ledger.keep([group for group, _ in kept])
        self._ledger.end(out)
        lost = [flight for flight, _ in landing.lost]
        self._books.settle(landing.ended, kept, [(group_id, outcome) for group_id, outcome, _ in out], lost)
        self._meters.landed(landing, kept=[group for group, _ in kept], filtered=filtered)
        self._count_failures(landing.outcomes)

    def _count_empty(self, flight: Flight) -> None:
        self._empty.add(flight)
        if self._empty.groups >= self._settings.batch_size:
            self._empty_in_a_row += 1
            self._emit(Event("empty_batch", self._empty.report(self._empty_in_a_row)))
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

    def report(self, in_a_row: int) -> EmptyBatchReport:
        """What to tell the user, the ``in_a_row``-th time."""
        return EmptyBatchReport(
            self.groups, dict(self._rewards), dict(self._failures), self._first_error, in_a_row=in_a_row
        )
