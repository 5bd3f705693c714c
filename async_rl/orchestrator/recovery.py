"""What an earlier process left: fitted to the bound and group size of the run that goes on with it, and described."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from async_rl.orchestrator.records import Recovery
from async_rl.types import Group, Trajectory


class Recovered(NamedTuple):
    """What a resumed run goes on with.

    Attributes:
        recovery: What is left of what the earlier process left.
        reissued: Groups to be run again from scratch, under their ids; what they brought is to be forgotten.
        withdrawn: Version of the first recorded batch that is not trained again as recorded; ``None``: all are.
    """

    recovery: Recovery
    reissued: tuple[int, ...]
    withdrawn: int | None


def within_bound(
    recovery: Recovery, *, batch_size: int, group_size: int, max_staleness: int | None, deadlines: bool = True
) -> Recovered:
    """Take out what can't be trained in time any more.

    With the settings it ran with nothing changes. With a smaller bound, recorded batches are trained again up to the
    first that holds a group older than the bound. The groups of that one and of those after it wait to be planned anew;
    what was sampled by versions that these batches had led to is re-issued, for those versions are no more. Then groups
    that wait are re-issued, oldest first, until the others can all be trained in time, even if nothing else is trained
    meanwhile; at most ``(S + 1) * batch_size`` are left.

    Args:
        recovery: As the ledger tells it.
        batch_size: Groups per step (B), ``>= 1``.
        group_size: Trajectories per group (G); unfinished groups with a sample beyond it are re-issued too.
        max_staleness: The bound in versions (S); ``None``: there is none.
        deadlines: Whether groups have to be trained in time (``stale_policy="wait"``), or only be few enough.
    """
    again = {group_id for group_id, landed in recovery.unfinished if any(i >= group_size for i in landed)}
    withdrawn = _first_too_old(recovery, max_staleness) if max_staleness is not None and deadlines else None
    if withdrawn is not None:
        recovery = _without_batches_from(recovery, withdrawn)
        again.update(_sampled_after(recovery, withdrawn))
    if max_staleness is not None:
        version = recovery.version + len(recovery.batches)
        waiting = sorted((head, group_id) for group_id, head in _waiting(recovery, version) if group_id not in again)
        # Without the first n of them, the i-th is trained at `version + (i - n) // B`: it needs one of the places up to
        # its deadline. An older group takes a place from every younger one, so the oldest go.
        late = 0
        for i, (head, _) in enumerate(waiting):
            steps = (head + max_staleness - version if deadlines else max_staleness) + 1
            late = max(late, i + 1 - max(steps, 0) * batch_size)
        again.update(group_id for _, group_id in waiting[:late])
    if not again:
        return Recovered(recovery, (), withdrawn)
    unfinished: dict[int, dict[int, Trajectory]] = {i: dict(landed) for i, landed in recovery.unfinished}
    unfinished |= {group_id: {} for group_id in again}
    recovery = replace(
        recovery,
        kept=tuple(group for group in recovery.kept if group.id not in again),
        unfinished=tuple(sorted(unfinished.items())),
    )
    return Recovered(recovery, tuple(sorted(again)), withdrawn)


def described(recovery: Recovery) -> str:
    """What is trained again, reused and generated again, in numbers, for people."""
    batches, kept, unfinished = len(recovery.batches), len(recovery.kept), len(recovery.unfinished)
    parts = []
    if batches:
        parts.append(f"{_counted(batches, 'recorded batch', 'es')} trained again from the record")
    if kept:
        parts.append(f"{_counted(kept, 'finished group')} reused")
    if unfinished:
        landed = sum(len(landed) for _, landed in recovery.unfinished)
        whose = "its" if unfinished == 1 else "their"
        but = f" but for {whose} {landed} finished rollout{'s' * (landed > 1)}" if landed else ""
        parts.append(f"{_counted(unfinished, 'unfinished group')} generated again{but}")
    return ", ".join(parts) or "nothing recorded waits to be trained"


def _counted(number: int, what: str, plural: str = "s") -> str:
    return f"{number} {what} is" if number == 1 else f"{number} {what}{plural} are"


def _first_too_old(recovery: Recovery, max_staleness: int) -> int | None:
    """Version of the first recorded batch with a group that is older than the bound at that version."""
    for version, groups in enumerate(recovery.batches, recovery.version):
        if any(group.head is not None and version - group.head > max_staleness for group in groups):
            return version
    return None


def _without_batches_from(recovery: Recovery, version: int) -> Recovery:
    """The groups of recorded batches from ``version`` on wait to be planned."""
    trained_again = version - recovery.version
    taken_back = [group for groups in recovery.batches[trained_again:] for group in groups]
    kept = sorted([*recovery.kept, *taken_back], key=lambda group: group.id)
    return replace(recovery, batches=recovery.batches[:trained_again], kept=tuple(kept))


def _sampled_after(recovery: Recovery, version: int) -> Iterable[int]:
    """Groups that wait and have a token of a version after ``version``."""
    brought = [(group.id, group.trajectories) for group in recovery.kept]
    brought += [(group_id, tuple(landed.values())) for group_id, landed in recovery.unfinished]
    for group_id, trajectories in brought:
        if any(t.tail is not None and t.tail > version for t in trajectories):
            yield group_id


def _waiting(recovery: Recovery, version: int) -> Iterable[tuple[int, int]]:
    """Id and head of each group that is in the system from the start; without a stamp it counts as the books do."""
    for group in recovery.kept:
        yield group.id, _head(group)
    for group_id, landed in recovery.unfinished:
        if landed:
            yield group_id, min((t.head for t in landed.values() if t.head is not None), default=version)


def _head(group: Group) -> int:
    return group.admitted_version if group.head is None else group.head
