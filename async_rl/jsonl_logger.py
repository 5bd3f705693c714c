"""JsonlLogger: every logged metric as one JSON object per step in ``metrics.jsonl``."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers.logger import Logger, rank_zero_experiment
from lightning.pytorch.utilities import rank_zero_only
from typing_extensions import override

from async_rl.strict_json import strict_json

log = logging.getLogger(__name__)


class JsonlLogger(Logger):
    """Appends ``{"step": ..., "time_s": ..., <metric>: ...}`` lines to a file; readable while the run goes on.

    A figure that is not finite is ``null``. A line that can't be written (a full disk) is lost with a warning: metrics
    are no reason to end a run.

    Args:
        path: The file; its directory is created.
    """

    def __init__(self, path: str | Path) -> None:
        super().__init__()
        self.path = Path(path)
        self._failing = False

    @property
    @rank_zero_experiment
    def experiment(self) -> Path:
        """The file written to."""
        return self.path

    @property
    @override
    def name(self) -> str:
        return "jsonl"

    @property
    @override
    def version(self) -> str:
        return ""

    @override
    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        row = {"step": step, "time_s": round(time.time(), 3), **{k: v for k, v in metrics.items() if k != "epoch"}}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a") as file:
                file.write(strict_json(row) + "\n")
        except OSError as error:
            if not self._failing:
                log.warning("%s can't be written: %s; the run goes on without it", self.path, error.strerror or error)
            self._failing = True
        else:
            self._failing = False

    @override
    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Nothing to do: the resolved config is a file of its own in the run directory."""
