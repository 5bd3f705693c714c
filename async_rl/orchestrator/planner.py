"""Decides which kept groups form the next batch, or that the trainer must wait, and for what."""

from __future__ import annotations

import heapq
from typing import Literal, NamedTuple


class Plan(NamedTuple):
    """What the trainer does next.

    Attributes:
        groups: Ids of the batch in (head, admission) order. Empty: no batch now. Fewer than ``batch_size``: the last,
            short batch of data that ended.
        waiting_for: What a wait is for, for people. Empty with empty ``groups``: the data ended and no batch is left.
    """

    groups: tuple[int, ...]
    waiting_for: str


class BatchPlanner:
    """Forms batches so that no group gets older than the bound, and never waits longer than that needs (DESIGN 5).

    At trained version v the candidate batch is the first B kept groups by (head version, admission order). R is every
    other group, kept or running; a running group counts with the served version at its admission. The batch goes only
    if for every deadline d: #{g in R : head(g) + S <= d} <= (d - v) * B, else the trainer waits.

    Policies:
        ``wait``: exactly that. No trained token is older than S.
        ``mask``: a group whose last chance on time is this batch (head + S <= v) and that isn't in it leaves R. It is
            trained late, first of all, and the trainer masks its tokens that are older than S.
        ``allow``: R is empty; any B kept groups go, oldest first.

    A kept group without any stamped token (replayed, external) is ordered and counted as if its head were the version
    at its admission. It can't break the age bound; counting it keeps the order fair and the schedule feasible.

    Only counts per head version are looked at to decide, and at most S + 1 heads are live: planning costs O(S) per
    call, O(log kept) per kept group. Nothing locks: the planner belongs to whoever holds the orchestrator's lock.

    Args:
        batch_size: Groups per training step (B), ``>= 1``.
        max_staleness: The age bound in versions (S), ``>= 0``; ``None`` only with ``allow``.
        stale_policy: ``"wait"``, ``"mask"`` or ``"allow"``.

    Raises:
        ValueError: If a value is out of range, or the bound is missing where the policy needs it.

    Example:
        >>> planner = BatchPlanner(batch_size=1, max_staleness=1, stale_policy="wait")
        >>> planner.admitted(0, version=0)
        >>> planner.plan(trained=0)
        Plan(groups=(), waiting_for='1 more group')
        >>> planner.keep(0, head=0)
        >>> planner.plan(trained=0)
        Plan(groups=(0,), waiting_for='')
    """

    def __init__(
        self, *, batch_size: int, max_staleness: int | None, stale_policy: Literal["wait", "mask", "allow"]
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1 group, got {batch_size}")
        if stale_policy not in ("wait", "mask", "allow"):
            raise ValueError(f"stale_policy must be wait, mask or allow, got {stale_policy!r}")
        if max_staleness is None and stale_policy != "allow":
            raise ValueError(f"stale_policy={stale_policy} needs max_staleness; without a bound use stale_policy=allow")
        if max_staleness is not None and max_staleness < 0:
            raise ValueError(f"max_staleness must be at least 0 versions, got {max_staleness}")
        self._batch_size = batch_size
        self._max_staleness = max_staleness if stale_policy != "allow" else None
        self._mask = stale_policy == "mask"
        self._admission: dict[int, int] = {}  # running group -> served version at its admission
        self._running: dict[int, dict[int, None]] = {}  # that version -> its running groups, in admission order
        self._head: dict[int, int] = {}  # kept group -> head version
        self._kept: dict[int, list[int]] = {}  # head version -> heap of its kept groups
        self._chosen: set[int] = set()  # the batch in training

    def admitted(self, group_id: int, version: int) -> None:
        """A group entered the system, or re-entered it at a resume.

        Args:
            group_id: Admission number; the order among groups of one head.
            version: Lowest served version at the admission.

        Raises:
            ValueError: If the group is known already.
        """
        if group_id in self._admission or group_id in self._head or group_id in self._chosen:
            raise ValueError(f"group {group_id} is in the system already")
        self._admission[group_id] = version
        self._running.setdefault(version, {})[group_id] = None

    def keep(self, group_id: int, head: int | None) -> None:
        """A running group finished and waits to be trained.

        Args:
            group_id: The group.
            head: Oldest version that sampled one of its tokens; ``None`` if no token carries a version.

        Raises:
            LookupError: If the group is not running.
            ValueError: If ``head`` is older than the served version at its admission: a stamp can't be.
        """
        version = self._admission.get(group_id)
        if version is None:
            raise LookupError(f"can't keep group {group_id}: it is not running")
        if head is not None and head < version:
            raise ValueError(f"group {group_id} has head version {head}, older than version {version} at its admission")
        self._forget_running(group_id)
        key = version if head is None else head
        self._head[group_id] = key
        heapq.heappush(self._kept.setdefault(key, []), group_id)

    def end(self, group_id: int) -> None:
        """A group is out, whatever its state: running, kept or in the batch.

        Raises:
            LookupError: If the group is not known.
        """
        if group_id in self._chosen:
            self._chosen.remove(group_id)
        elif group_id in self._admission:
            self._forget_running(group_id)
        elif group_id in self._head:
            head = self._head.pop(group_id)
            kept = self._kept[head]  # dropping a kept group is rare, so its cost may be linear
            kept.remove(group_id)
            heapq.heapify(kept)
            if not kept:
                del self._kept[head]
        else:
            raise LookupError(f"can't end group {group_id}: it was never admitted, or ended before")

    def plan(self, trained: int, *, exhausted: bool = False, short_ok: bool = False) -> Plan:
        """Choose the batch of this step. Its groups are out of later plans and stay known until ``end``.

        Args:
            trained: The trained version (v).
            exhausted: Whether no prompt is left to admit. It takes effect once nothing runs.
            short_ok: Whether fewer than ``batch_size`` groups left at the end of the data are a batch.

        Raises:
            RuntimeError: If the batch chosen before has not ended, or if no wait can help: the groups kept can't all be
                trained within the bound (a resume with a smaller one, see ``within_bound``).
        """
        if self._chosen:
            raise RuntimeError(f"the batch before has not ended: group {min(self._chosen)} is still in training")
        missing = self._batch_size - len(self._head)
        if missing > 0:
            if not exhausted or self._admission:
                return Plan((), f"{missing} more group{'s' if missing > 1 else ''}")
            return Plan(self._take(len(self._head)) if short_ok else (), "")
        if self._max_staleness is not None:
            reason = self._reason_to_wait(trained, self._max_staleness)
            if reason:
                return Plan((), reason)
        return Plan(self._take(self._batch_size), "")

    def _reason_to_wait(self, trained: int, max_staleness: int) -> str:
        to_take = self._batch_size
        rest = 0  # groups of R with a head up to `head`
        for head in sorted(self._kept.keys() | self._running.keys()):
            due = head + max_staleness
            kept, running = len(self._kept.get(head, ())), len(self._running.get(head, ()))
            taken = min(to_take, kept)
            to_take -= taken
            if self._mask and due <= trained:
                continue
            rest += kept - taken + running
            if rest > (due - trained) * self._batch_size:
                return self._explain(trained, due, head, rest)
        return ""

    def _explain(self, trained: int, due: int, head: int, rest: int) -> str:
        oldest = next(
            ((g, version) for version in sorted(self._running) if version <= head for g in self._running[version]), None
        )
        if oldest is None or due < trained:
            raise RuntimeError(
                f"groups of head version {head} were due by version {due}, and at version {trained} they can't all be "
                "trained in time: after a resume with a smaller max_staleness, re-issue what `within_bound` names"
            )
        group, version = oldest
        if rest == 1:
            return f"group {group} (admitted at version {version}) is due by version {due}"
        return f"{rest} groups are due by version {due}, the oldest is group {group} (admitted at version {version})"

    def _take(self, count: int) -> tuple[int, ...]:
        taken: list[int] = []
        for head in sorted(self._kept):
            kept = self._kept[head]
            while kept and len(taken) < count:
                taken.append(heapq.heappop(kept))
                del self._head[taken[-1]]
            if kept:
                break
            del self._kept[head]
        self._chosen.update(taken)
        return tuple(taken)

    def _forget_running(self, group_id: int) -> None:
        version = self._admission.pop(group_id)
        running = self._running[version]
        del running[group_id]
        if not running:
            del self._running[version]
