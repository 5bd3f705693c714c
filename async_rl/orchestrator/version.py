"""A policy version that threads can read, wait for and follow; it only ever grows."""

from __future__ import annotations

import threading
from collections.abc import Callable


class PolicyVersion:
    """A thread-safe, monotone version number.

    One instance holds the trained version, one more per engine holds the version that engine serves.

    Args:
        value: Where to start, ``>= 0`` (the checkpoint's version at a resume).
        name: What the number is, for error messages: ``"trained version"``, ``"served version of engine 1"``.

    Raises:
        ValueError: If ``value`` is negative.

    Example:
        >>> trained = PolicyVersion(name="trained version")
        >>> trained.advance_to(1)
        >>> trained.value, trained.wait_at_least(1, timeout_s=0.0)
        (1, True)
    """

    def __init__(self, value: int = 0, *, name: str = "policy version") -> None:
        if value < 0:
            raise ValueError(f"{name} must be at least 0, got {value}")
        self._name = name
        self._value = value
        self._changed = threading.Condition()
        self._subscribers: list[Callable[[int], None]] = []

    @property
    def value(self) -> int:
        """The version now."""
        with self._changed:
            return self._value

    def advance_to(self, version: int) -> None:
        """Move to ``version``, wake every waiter, then call the subscribers from this thread.

        Advancing to the version already held changes nothing and calls nobody.

        Raises:
            ValueError: If ``version`` is older than the version now.
        """
        with self._changed:
            if version < self._value:
                raise ValueError(f"{self._name} can't go back from {self._value} to {version}")
            if version == self._value:
                return
            self._value = version
            subscribers = tuple(self._subscribers)
            self._changed.notify_all()
        for callback in subscribers:  # outside the lock: a subscriber may read `value` or take its own lock
            callback(version)

    def wait_at_least(self, version: int, timeout_s: float) -> bool:
        """Block until the version is ``version`` or newer.

        Args:
            version: What to wait for.
            timeout_s: Longest wait, ``>= 0``.

        Returns:
            Whether it was reached in time.
        """
        with self._changed:
            return self._changed.wait_for(lambda: self._value >= version, timeout_s)

    def subscribe(self, callback: Callable[[int], None]) -> None:
        """Call ``callback(version)`` after each later change, in the thread that makes it, without this object's lock.

        When several threads advance at once, calls may arrive out of order; ``value`` is always the newest.
        """
        with self._changed:
            self._subscribers.append(callback)
