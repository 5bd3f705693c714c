"""How often Python's cyclic garbage collector runs while thousands of rollouts are alive."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_THRESHOLDS = (10_000, 10, 10)


@contextmanager
def rare_collections() -> Iterator[None]:
    """Run the collector fourteen times less often inside.

    Python starts a collection every 700 new containers. Rollouts make hundreds of thousands that are all in use, and
    looking through them over and over costs a fifth of the control plane's time (``scripts/bench_dispatcher.py``).
    """
    before = gc.get_threshold()
    if gc.isenabled() and before[0]:
        gc.set_threshold(*map(max, _THRESHOLDS, before))
    try:
        yield
    finally:
        gc.set_threshold(*before)
