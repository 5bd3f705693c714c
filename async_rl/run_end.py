"""RunEnd: why a run ended, and the exit code that says so."""

from __future__ import annotations

from dataclasses import dataclass

EXIT_FINISHED = 0
EXIT_ERROR = 1
"""An error, or something that would not stop in time."""
EXIT_CONFIG = 2
"""Refused before anything was started."""
EXIT_GUARD = 3
"""A guard stopped a run that could not get any better."""
EXIT_INTERRUPTED = 75
"""SIGINT or SIGTERM, and there is a checkpoint to go on from (the code for "try again later")."""


@dataclass(frozen=True, slots=True)
class RunEnd:
    """Why a run ended, and the exit code that says so."""

    reason: str
    exit_code: int
