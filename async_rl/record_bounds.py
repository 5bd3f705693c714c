"""RecordedBounds: which bound on the age of its data a run trained with, version by version; kept in its record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_KEY = "bounds"


@dataclass(frozen=True, slots=True)
class RecordedBounds:
    """The bounds of a run that may have been resumed with others.

    Attributes:
        phases: ``(version, max_staleness, stale_policy)``, oldest first: the version is the first that was trained so.
    """

    phases: tuple[tuple[int, int, str], ...] = ()

    @classmethod
    def from_meta(cls, meta: Mapping[str, Any]) -> RecordedBounds:
        """What the meta values of a record say; no phases where an earlier async-rl wrote it."""
        return cls(tuple((version, bound, policy) for version, bound, policy in meta.get(_KEY, ())))

    def to_meta(self) -> dict[str, Any]:
        """As :meth:`from_meta` reads it."""
        return {_KEY: [list(phase) for phase in self.phases]}

    def changed(self, version: int, max_staleness: int, stale_policy: str) -> RecordedBounds:
        """From ``version`` on it is another bound; what was said of later versions is no more."""
        before = tuple(phase for phase in self.phases if phase[0] < version)
        if before and before[-1][1:] == (max_staleness, stale_policy):
            return RecordedBounds(before)
        return RecordedBounds((*before, (version, max_staleness, stale_policy)))

    def masked_below(self, version: int) -> int | None:
        """The oldest version whose tokens ``mask`` left in at ``version``; ``None`` where nothing was masked."""
        at = next((phase for phase in reversed(self.phases) if phase[0] <= version), None)
        return version - at[1] if at is not None and at[2] == "mask" else None

    @property
    def exact(self) -> int | None:
        """The age in versions that no trained token exceeds; ``None`` where some phase, or nothing known, bounds it."""
        if not self.phases or any(policy != "wait" for _, _, policy in self.phases):
            return None
        return max(bound for _, bound, _ in self.phases)

    def described(self) -> str:
        """For people: ``max_staleness 2, 0 from version 5 on``."""
        if not self.phases:
            return "max_staleness not recorded"
        return "max_staleness " + ", ".join(map(_described, self.phases, range(len(self.phases))))


def _described(phase: Sequence[Any], number: int) -> str:
    version, bound, policy = phase
    text = f"{bound}" if policy == "wait" else f"{bound} ({policy})"
    return text if number == 0 else f"{text} from version {version} on"
