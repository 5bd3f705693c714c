"""What is contradictory about how old the data may get: the rules of the config and of the trainer's arguments."""

from __future__ import annotations

from collections.abc import Iterator

from async_rl.config import Problem


def staleness_problems(
    *, max_staleness: int, admit_ahead: int | None, oversample_factor: float, stale_policy: str, acknowledged: bool
) -> Iterator[Problem]:
    """What can't be, each value by itself being possible.

    Args:
        max_staleness: S, versions.
        admit_ahead: W, versions; ``None``: ``min(S, 2)``.
        oversample_factor: f.
        stale_policy: ``"wait"``, ``"mask"`` or ``"allow"``.
        acknowledged: The user accepts training on stale data without protection.
    """
    if stale_policy != "wait" and not acknowledged:
        yield Problem(
            "stale_policy",
            f"{stale_policy} gives up the exact age bound; take stale_policy=wait, or accept it with "
            "acknowledge_staleness=true",
        )
    if stale_policy == "allow":
        return
    ahead = min(max_staleness, 2) if admit_ahead is None else admit_ahead
    if ahead > max_staleness:
        yield Problem(
            "admit_ahead",
            f"{ahead} has no effect above max_staleness={max_staleness}; lower admit_ahead to at most "
            f"{max_staleness} or raise max_staleness",
        )
    elif oversample_factor > 1 and ahead >= max_staleness:
        yield Problem(
            "oversample_factor",
            f"{oversample_factor:g} has no room with admit_ahead={ahead} and max_staleness={max_staleness}; lower "
            "admit_ahead below max_staleness, raise max_staleness, or set oversample_factor=1",
        )
