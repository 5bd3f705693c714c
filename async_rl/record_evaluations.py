"""RecordedEvaluations: which evaluations a run has finished, and what they brought; kept in its record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_KEY = "evaluations"


@dataclass(frozen=True, slots=True)
class RecordedEvaluations:
    """The evaluations of a run that were finished, in whatever process.

    Attributes:
        finished: The figures by version (``EvalBatch.summary``); empty where they are not known.
    """

    finished: Mapping[int, Mapping[str, float]] = field(default_factory=dict)

    @classmethod
    def from_meta(cls, meta: Mapping[str, Any], version: int) -> RecordedEvaluations:
        """What the meta values of a record say as of the checkpoint at ``version``: later weights are made anew."""
        # An earlier async-rl did not say. Where its run stands counts as evaluated, so that nothing starts for nothing.
        known = meta.get(_KEY, {version: {}} if version else {})
        return cls({int(at): figures for at, figures in known.items() if int(at) <= version})

    def to_meta(self) -> dict[str, Any]:
        """As :meth:`from_meta` reads it."""
        return {_KEY: {str(version): dict(figures) for version, figures in self.finished.items()}}

    def and_also(self, figures: Mapping[str, float]) -> RecordedEvaluations:
        """With one more, or one anew."""
        return RecordedEvaluations({**self.finished, int(figures["version"]): figures})

    def told(self, name: str, version: int) -> dict[str, float]:
        """What a run's summary tells of the evaluation at ``version``, under ``name``; nothing where there is none."""
        figures = self.finished.get(version)
        if not figures:
            return {}
        return {name: figures["reward"], f"{name}_version": version, f"{name}_failures": figures["failures"]}
