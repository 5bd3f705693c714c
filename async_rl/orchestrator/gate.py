"""Decides how many more groups may enter the system now, and names the term that binds."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from async_rl.orchestrator.settings import OrchestratorSettings


class Capacity(NamedTuple):
    """How many groups may be admitted now, and why not more.

    Attributes:
        groups: Number of groups, ``>= 0``.
        limited_by: The smallest of the four terms; of equal ones the first in the order
            ``"concurrency"``, ``"bound"``, ``"ahead"``, ``"horizon"``.
    """

    groups: int
    limited_by: str


class CapacityGate:
    """Counts the groups in the system and bounds admissions (DESIGN section 5).

    With S = ``max_staleness``, W = ``admit_ahead``, f = ``oversample_factor``, B = ``batch_size``, G = ``group_size``,
    C = ``max_concurrent``, v the served version and accepted = trained version * B + kept groups, the capacity is the
    least of::

        floor((C - running trajectories) / G)                    concurrency
        (S + v + 1) * B - (accepted + running)                   bound
        v * B + ceil((W + 1) * B * f) - (accepted + running)     ahead
        max_steps * B - (accepted + running)                     horizon

    The bound term is the staleness-aware rollout control of AReaL (arXiv 2505.24298, eq. 3), counted in groups and with
    the served version, so that at every instant at most (S + 1) * B groups are in the system.

    Every method is O(1) and none locks: the gate belongs to whoever holds the orchestrator's lock.

    Args:
        batch_size: Groups per training step, ``>= 1``.
        group_size: Trajectories per group, ``>= 1``.
        max_concurrent: Most trajectories running at once, ``>= group_size``.
        max_staleness: The age bound in versions, ``>= 0``; ``None`` switches the bound term off (``allow``).
        admit_ahead: Batches to generate ahead of the served version, in ``[0, max_staleness]``.
        oversample_factor: Widens the ahead term, ``>= 1``; above 1 only with ``admit_ahead < max_staleness``.
        max_steps: Steps of the run, ``>= 1``; ``None`` switches the horizon off.

    Raises:
        ValueError: If a value is out of range or two contradict each other.

    Example:
        >>> gate = CapacityGate(batch_size=8, group_size=1, max_concurrent=12, max_staleness=4, admit_ahead=4,
        ...                     oversample_factor=1.0, max_steps=None)
        >>> gate.capacity(trained=0, served=0)
        Capacity(groups=12, limited_by='concurrency')
    """

    def __init__(
        self,
        *,
        batch_size: int,
        group_size: int,
        max_concurrent: int,
        max_staleness: int | None,
        admit_ahead: int,
        oversample_factor: float,
        max_steps: int | None,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1 group, got {batch_size}")
        if group_size < 1:
            raise ValueError(f"group_size must be at least 1 trajectory, got {group_size}")
        if max_concurrent < group_size:
            raise ValueError(
                f"max_concurrent={max_concurrent} can't hold one group of group_size={group_size} trajectories: "
                f"raise max_concurrent to at least {group_size}"
            )
        if max_staleness is not None and max_staleness < 0:
            raise ValueError(f"max_staleness must be at least 0 versions, got {max_staleness}")
        if admit_ahead < 0:
            raise ValueError(f"admit_ahead must be at least 0 batches, got {admit_ahead}")
        if max_staleness is not None and admit_ahead > max_staleness:
            raise ValueError(
                f"admit_ahead={admit_ahead} has no effect above max_staleness={max_staleness}: "
                f"lower admit_ahead to at most {max_staleness} or raise max_staleness"
            )
        if not 1 <= oversample_factor < math.inf:
            raise ValueError(f"oversample_factor must be at least 1 and finite, got {oversample_factor}")
        if oversample_factor > 1 and max_staleness is not None and admit_ahead == max_staleness:
            raise ValueError(
                f"oversample_factor={oversample_factor} has no room with admit_ahead={admit_ahead} = max_staleness: "
                f"lower admit_ahead below {max_staleness}, raise max_staleness, or set oversample_factor=1"
            )
        if max_steps is not None and max_steps < 1:
            raise ValueError(f"max_steps must be at least 1, got {max_steps}")
        self._batch_size = batch_size
        self._group_size = group_size
        self._max_concurrent = max_concurrent
        self._bound = None if max_staleness is None else (max_staleness + 1) * batch_size
        # As the user wrote it: 1.1 * 10 in floating point is a hair above 11 and would round up to 12.
        self._ahead = math.ceil((admit_ahead + 1) * batch_size * Fraction(repr(float(oversample_factor))))
        self._horizon = None if max_steps is None else max_steps * batch_size
        self._running: dict[int, int] = {}  # group id -> trajectories that still hold a place
        self._running_trajectories = 0
        self._kept: set[int] = set()

    @classmethod
    def of(cls, settings: OrchestratorSettings) -> CapacityGate:
        """The gate of a run; raises as the constructor does."""
        s = settings
        return cls(
            batch_size=s.batch_size,
            group_size=s.group_size,
            max_concurrent=s.max_concurrent,
            max_staleness=None if s.stale_policy == "allow" else s.max_staleness,
            admit_ahead=s.admit_ahead,
            oversample_factor=s.oversample_factor,
            max_steps=s.max_steps,
        )

    @property
    def running_groups(self) -> int:
        """Groups admitted and not finished."""
        return len(self._running)

    @property
    def running_trajectories(self) -> int:
        """Trajectories that hold one of the ``max_concurrent`` places."""
        return self._running_trajectories

    @property
    def kept_groups(self) -> int:
        """Groups finished and waiting to be trained, those of the batch in training included until they end."""
        return len(self._kept)

    def capacity(self, trained: int, served: int) -> Capacity:
        """How many groups may be admitted now.

        Args:
            trained: The trained version; a batch in training still counts through its kept groups.
            served: The lowest version served by an engine that is open to new groups (v).

        Raises:
            ValueError: If ``served`` is ahead of ``trained``: the accepted count was not recovered at a resume, or the
                trained version was read before the served one without holding the lock.
        """
        if served > trained:
            raise ValueError(
                f"served version {served} is ahead of trained version {trained}: advance the trained version first "
                "(at a resume, to the checkpoint's version)"
            )
        counted = trained * self._batch_size + len(self._kept) + len(self._running)
        groups = (self._max_concurrent - self._running_trajectories) // self._group_size
        limited_by = "concurrency"
        moved = served * self._batch_size
        if self._bound is not None and moved + self._bound - counted < groups:
            groups, limited_by = moved + self._bound - counted, "bound"
        if moved + self._ahead - counted < groups:
            groups, limited_by = moved + self._ahead - counted, "ahead"
        if self._horizon is not None and self._horizon - counted < groups:
            groups, limited_by = self._horizon - counted, "horizon"
        return Capacity(max(groups, 0), limited_by)

    def admit(self, group_id: int) -> None:
        """Let a group in: it takes ``group_size`` trajectory places.

        Raises:
            ValueError: If the group is in the system already.
            RuntimeError: If more than ``(S + 1) * B`` groups would be in the system.
        """
        self._check_room(group_id)
        self._running[group_id] = self._group_size
        self._running_trajectories += self._group_size

    def restore_kept(self, group_id: int) -> None:
        """Count a group an earlier process finished, which still waits to be trained; raises as :meth:`admit`."""
        self._check_room(group_id)
        self._kept.add(group_id)

    def trajectory_ended(self, group_id: int) -> None:
        """Give back the place of one trajectory that is out for good; one that is retried keeps its place.

        Raises:
            LookupError: If the group is not running, or all its places were given back before.
        """
        left = self._running.get(group_id)
        if not left:
            why = "is not running" if left is None else "has no trajectory left that holds a place"
            raise LookupError(f"a trajectory ended in group {group_id}, which {why}")
        self._running[group_id] = left - 1
        self._running_trajectories -= 1

    def keep(self, group_id: int) -> None:
        """A running group is finished and waits to be trained; places of cancelled stragglers come back.

        Raises:
            LookupError: If the group is not running.
        """
        self._give_back_places(group_id, "keep")
        self._kept.add(group_id)

    def end(self, group_id: int) -> None:
        """A running or kept group is out: trained, filtered, failed, dropped or saved. All its places come back.

        Raises:
            LookupError: If the group was never admitted or ended before.
        """
        if group_id in self._kept:
            self._kept.remove(group_id)
        else:
            self._give_back_places(group_id, "end")

    def _give_back_places(self, group_id: int, action: str) -> None:
        places = self._running.pop(group_id, None)
        if places is None:
            state = "it is kept already" if group_id in self._kept else "it was never admitted, or ended before"
            raise LookupError(f"can't {action} group {group_id}: {state}")
        self._running_trajectories -= places

    def _check_room(self, group_id: int) -> None:
        if group_id in self._running or group_id in self._kept:
            raise ValueError(f"group {group_id} is in the system already")
        # No capacity leads here: it guards what does not ask for any, above all the groups restored at a resume.
        if self._bound is not None and len(self._running) + len(self._kept) >= self._bound:
            raise RuntimeError(
                f"group {group_id} would be in the system beside {self._bound} others, which is all that "
                f"max_staleness={self._bound // self._batch_size - 1} and batch_size={self._batch_size} allow"
            )
