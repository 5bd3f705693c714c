"""JsonlLogger: every logged metric as one JSON object per step in ``metrics.jsonl``."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers.logger import Logger, rank_zero_experiment
from lightning.pytorch.utilities import rank_zero_only
from typing_extensions import override


class JsonlLogger(Logger):
    """Appends ``{"step": ..., "time_s": ..., <metric>: ...}`` lines to a file; readable while the run goes on.

    Args:
        path: The file; its directory is created.
    """

    def __init__(self, path: str | Path) -> None:
        super().__init__()
        self.path = Path(path)

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
        self.path.parent.mkdir(parents=True, exist_ok=True)
        row = {"step": step, "time_s": round(time.time(), 3), **{k: v for k, v in metrics.items() if k != "epoch"}}
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")

    @override
    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Nothing to do: the resolved config is a file of its own in the run directory."""
