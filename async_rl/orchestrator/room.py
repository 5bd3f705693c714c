"""The one lock of the control plane, with a condition for each kind of waiter."""

from __future__ import annotations

import threading


class Room:
    """Everything that says where a group is changes under ``lock``; whoever waits for a change waits on a condition.

    Attributes:
        lock: Guards gate, planner, engine slots and the counts of groups.
        capacity: Notified when a group might be admitted (a place or a version came).
        batch: Notified when a batch might be planned, and for anything else the main thread waits for.
        engines: Notified when an engine has nothing in flight, or a version was published.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.capacity = threading.Condition(self.lock)
        self.batch = threading.Condition(self.lock)
        self.engines = threading.Condition(self.lock)

    def wake_all(self) -> None:
        """Wake every waiter: there was a failure, or it is time to stop."""
        with self.lock:
            self.capacity.notify_all()
            self.batch.notify_all()
            self.engines.notify_all()
