"""PolicyVersion: a policy version that any thread may read and move on; it only ever grows."""

from __future__ import annotations

import threading


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
        >>> trained.value
        1
    """

    def __init__(self, value: int = 0, *, name: str = "policy version") -> None:
        if value < 0:
            raise ValueError(f"{name} must be at least 0, got {value}")
        self._name = name
        self._value = value
        self._lock = threading.Lock()

    @property
    def value(self) -> int:
        """The version now."""
        return self._value

    def advance_to(self, version: int) -> None:
        """Move to ``version``; to the one already held changes nothing.

        Raises:
            ValueError: If ``version`` is older than the version now.
        """
        with self._lock:
            if version < self._value:
                raise ValueError(f"{self._name} can't go back from {self._value} to {version}")
            self._value = version
