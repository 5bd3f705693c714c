"""Per-token version stamps to segments, for engines that stamp token by token."""

from __future__ import annotations

from collections.abc import Sequence

from async_rl.types import Segment


def segments_of(versions: Sequence[int | None]) -> tuple[Segment, ...]:
    """Run-length form of per-token versions: contiguous segments covering all tokens."""
    segments: list[Segment] = []
    for i, version in enumerate(versions):
        if segments and segments[-1].version == version:
            segments[-1] = Segment(version, segments[-1].start, i + 1)
        else:
            segments.append(Segment(version, i, i + 1))
    return tuple(segments)
