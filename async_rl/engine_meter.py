"""EngineMeter: what the engines did since it was last read, from their counters."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from async_rl.engines.base import Engine, EngineStats


class EngineMeter:
    """Differences of the counters of all engines.

    Args:
        engines: The engines; with none there is nothing to tell.
        clock: Seconds, monotonic.
    """

    def __init__(self, engines: Sequence[Engine], clock: Callable[[], float] = time.monotonic) -> None:
        self._engines = engines
        self._clock = clock
        self._before_s = clock()
        self._before = [engine.stats() for engine in engines]

    def drain(self) -> dict[str, float]:
        """What happened since the last call.

        Returns:
            ``engine/tokens_per_s``, ``engine/idle_share`` (time without a running request), ``engine/loads``,
            ``engine/pause_s`` (generation stood still for loads), ``engine/recomputes`` (loads at which the running
            requests computed their keys and values anew): sums, the share a mean, over the engines; ``engine/kv_age``:
            how many versions behind the oldest keys and values were after the newest load, the highest of all engines.
        """
        now_s, stats = self._clock(), [engine.stats() for engine in self._engines]
        seconds, self._before_s = max(now_s - self._before_s, 1e-9), now_s
        pairs, self._before = list(zip(self._before, stats, strict=True)), stats
        if not pairs:
            return {}

        def grown(counter: Callable[[EngineStats], float]) -> float:
            return float(sum(max(counter(now) - counter(before), 0.0) for before, now in pairs))

        return {
            "engine/tokens_per_s": grown(lambda s: s.generated_tokens) / seconds,
            "engine/idle_share": max(1.0 - grown(lambda s: s.busy_s) / (seconds * len(pairs)), 0.0),
            "engine/loads": grown(lambda s: s.loads),
            "engine/pause_s": grown(lambda s: s.pauses_s),
            "engine/recomputes": grown(lambda s: s.recomputes),
            "engine/kv_age": float(max(now.kv_age for _, now in pairs)),
        }
