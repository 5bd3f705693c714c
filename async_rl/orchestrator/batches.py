"""BatchSource: the batch of each step - planned or replayed, checked, recorded before it is trained, ended after."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from async_rl.types import Batch, Group, Outcome, Trajectory

if TYPE_CHECKING:
    from async_rl.orchestrator.books import Books
    from async_rl.orchestrator.ledger import AnyLedger
    from async_rl.orchestrator.metrics import Meters
    from async_rl.orchestrator.records import RecordedBatch
    from async_rl.orchestrator.room import Room
    from async_rl.orchestrator.settings import OrchestratorSettings

log = logging.getLogger(__name__)

AdvantageFn = Callable[[Sequence[Sequence[float]]], Sequence[Sequence[float]]]


class BatchSource:
    """Hands out one batch per policy version; there is at most one that is neither trained nor dropped.

    Batches that an earlier process recorded after its checkpoint come first, in order, at their own versions.

    Args:
        room: The lock.
        books: Plans, and knows the trained version.
        ledger: Where a batch is written before it is handed out.
        meters: Takes the timings.
        settings: Bound, policy, horizon, and what becomes of a short last batch.
        advantages: Rewards nested by group to advantages nested the same way.
        replay: Recorded batches to train again.

    Attributes:
        waiting_for: What the next batch waits for, for people; ``""`` when it can go.
    """

    def __init__(
        self,
        room: Room,
        books: Books,
        ledger: AnyLedger,
        meters: Meters,
        *,
        settings: OrchestratorSettings,
        advantages: AdvantageFn,
        replay: Sequence[RecordedBatch],
    ) -> None:
        self._room = room
        self._books = books
        self._ledger = ledger
        self._meters = meters
        self._settings = settings
        self._advantages = advantages
        self._replay = deque(replay)
        self._open: Batch | None = None
        self._open_is_replayed = False
        self._planned: tuple[Group, ...] = ()
        self._ahead: set[int] = set()
        self.waiting_for = ""

    def ready(self) -> bool:
        """Whether :meth:`take` has something to say: a batch is planned or recorded, or there will be none any more.

        Raises:
            RuntimeError: The batch before was neither trained nor dropped.
        """
        if self._open is not None:
            raise RuntimeError(f"the batch of version {self._open.version} was neither trained nor dropped")
        if self._planned or self._replay or self._steps_over():
            return True
        plan, self._planned = self._books.plan(short_ok=self._settings.last_batch == "train")
        self.waiting_for = plan.waiting_for
        return bool(plan.groups) or not plan.waiting_for

    def part(self) -> tuple[Group, ...]:
        """Complete groups of the next batch to train ahead of its rest, once there are enough; not those given before.

        Whole groups, whatever of them is complete; what remains of the batch comes with it.
        """
        enough = self._settings.forward_backward_batch
        if enough is None:
            return ()
        groups = tuple(group for group in self._books.certain() if group.id not in self._ahead)
        trajectories = [t for group in groups for t in group.trajectories]
        tokens = sum(len(t.token_ids) for t in trajectories)
        return groups if len(trajectories) >= enough.min_sequences or tokens >= enough.min_tokens else ()

    def take_part(self) -> Batch | None:
        """A part of the next batch (see :meth:`part`), or ``None`` when the batch is ready."""
        if self.ready() or not (groups := self.part()):
            return None
        self._ahead.update(group.id for group in groups)
        return self._make(groups)

    def take(self, wait: Callable[[Callable[[float], bool]], None]) -> Batch | None:
        """The batch, recorded; ``None`` when data or steps are over.

        Args:
            wait: Blocks until the given ``wait(timeout_s) -> done`` is done, or raises.
        """
        if self._steps_over():
            return None
        if self._replay:
            self._open, self._open_is_replayed = self._make(tuple(self._replay.popleft())), True
            return self._open
        groups, self._planned = self._planned, ()
        if not groups:
            self._end_of_data()
            return None
        if len(groups) < self._settings.batch_size:
            log.warning("the data ended: training a last batch of %d groups (last_batch=train)", len(groups))
        batch = self._make(groups)
        began_s = time.monotonic()
        wait(self._ledger.record_batch(batch).wait)
        self._meters.took("record_batch", time.monotonic() - began_s)
        self._open, self._open_is_replayed = batch, False
        return batch

    def end(self, batch: Batch, outcome: Outcome, reason: str) -> None:
        """The batch was trained or dropped: its groups end, and where it was trained the version moves by one."""
        if batch is not self._open:
            raise RuntimeError("this is not the batch that next_batch() returned last, or it ended before")
        with self._room.lock:
            self._ledger.end_batch(batch, outcome, reason)
            if self._open_is_replayed:
                self._books.end_replayed_batch(len(batch.groups), outcome)
            else:
                self._books.end_batch(outcome)
        if outcome is Outcome.TRAINED:
            self._meters.trained.extend(batch.groups)
        self._open = None
        self._ahead.clear()

    def not_replayed(self) -> list[int]:
        """Groups of recorded batches that were not trained again; a batch being trained again included."""
        ids = [group_id for recorded in self._replay for group_id in recorded.group_ids]
        if self._open is not None and self._open_is_replayed:
            ids.extend(group.id for group in self._open.groups)
        return ids

    def _steps_over(self) -> bool:
        return self._settings.max_steps is not None and self._books.trained_version >= self._settings.max_steps

    def _end_of_data(self) -> None:
        with self._room.lock:
            dropped = self._books.end_kept(Outcome.DROPPED)
            self._ledger.end([(group_id, Outcome.DROPPED, "short") for group_id in dropped])
        if dropped:
            log.warning(
                "the data ended: %d groups are fewer than batch_size=%d and were dropped (last_batch=drop)",
                len(dropped),
                self._settings.batch_size,
            )

    def _make(self, groups: tuple[Group, ...]) -> Batch:
        began_s = time.monotonic()
        version, bound = self._books.trained_version, self._settings.max_staleness
        if self._settings.stale_policy == "wait":
            _check_ages(version, groups, bound)
        elif self._settings.stale_policy == "mask" and bound is not None:
            groups = tuple(without_tokens_before(version - bound, group) for group in groups)
        rewards = [group.rewards for group in groups]
        advantages = tuple(tuple(map(float, a)) for a in self._advantages(rewards))
        if [len(a) for a in advantages] != [len(r) for r in rewards]:
            raise ValueError(
                f"the advantage function returned {[len(a) for a in advantages]} numbers per group for "
                f"{[len(r) for r in rewards]} rewards; it must return one number per trajectory"
            )
        self._meters.took("advantages", time.monotonic() - began_s)
        return Batch(version, groups, advantages, bound if self._settings.stale_policy == "wait" else None)


def _check_ages(version: int, groups: Sequence[Group], bound: int | None) -> None:
    for group in groups:
        head = group.head
        if bound is not None and head is not None and version - head > bound:
            raise RuntimeError(
                f"group {group.id} (head version {head}) would be trained at version {version}: "
                f"age {version - head} breaks max_staleness={bound}"
            )


def without_tokens_before(oldest: int, group: Group) -> Group:
    """The group with a loss mask of 0 on every token sampled by a version older than ``oldest``."""
    head = group.head
    if head is None or head >= oldest:
        return group
    return replace(group, trajectories=tuple(_masked(oldest, t) for t in group.trajectories))


def _masked(oldest: int, trajectory: Trajectory) -> Trajectory:
    loss_mask = list(trajectory.loss_mask)
    for s in trajectory.segments:
        if s.version is not None and s.version < oldest:
            loss_mask[s.start : s.end] = [0] * (s.end - s.start)
    return replace(trajectory, loss_mask=loss_mask)
