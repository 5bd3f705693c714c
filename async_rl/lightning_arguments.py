"""What AsyncRLTrainer makes of Lightning's arguments: which are refused, what is added, what else is the default."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.loggers import Logger, TensorBoardLogger

from async_rl.arguments import refuse_other
from async_rl.callbacks.checkpoint import RunCheckpoint
from async_rl.callbacks.drain import DrainCallback
from async_rl.callbacks.empty_batch_guard import EmptyBatchGuard
from async_rl.callbacks.progress import RunProgress
from async_rl.callbacks.resume import ResumeVersionRecovery
from async_rl.callbacks.run_loop import RunLoop
from async_rl.callbacks.summary import RunSummary
from async_rl.jsonl_logger import JsonlLogger
from async_rl.precision import AUTO, resolve_precision

_VERSIONS = "max_steps and eval_every, which count policy versions"
_OURS = {
    "max_epochs": _VERSIONS,
    "num_sanity_val_steps": _VERSIONS,
    "val_check_interval": _VERSIONS,
    "check_val_every_n_epoch": _VERSIONS,
    "limit_val_batches": "evaluate_at, and eval_limit of RolloutDataModule",
    "default_root_dir": "run_dir",
}
"""Lightning's arguments that are refused, and what is used instead."""


def lightning_arguments(
    given: dict[str, Any],
    *,
    max_steps: int,
    eval_every: int,
    evaluates: bool,
    run_dir: Path,
    callbacks: Sequence[pl.Callback] | pl.Callback | None,
    default_callbacks: bool,
    logger: Any,
    make_checkpoint: Callable[[], RunCheckpoint],
) -> dict[str, Any]:
    """The arguments of ``lightning.Trainer``.

    Args:
        given: Those the user gave beyond ours.
        max_steps: Optimizer steps to train.
        eval_every: Steps between evaluations; 0: none by steps.
        evaluates: Whether anything is ever evaluated.
        run_dir: Where logs go.
        callbacks: The user's.
        default_callbacks: Whether to add those of our own that ``callbacks`` holds none of.
        logger: The user's; ``None`` or ``True``: TensorBoard and ``metrics.jsonl``.
        make_checkpoint: Makes the callback that saves checkpoints, where the user gave none and wants some.

    Raises:
        TypeError: One of the callbacks or loggers is none.
        ValueError: One was given that another of ours takes the place of; names both.
    """
    for key, use in _OURS.items():
        if key in given:
            raise ValueError(f"AsyncRLTrainer: {key}={given[key]!r} has no meaning here; use {use}")
    if given.get("precision") == AUTO:
        given = given | {"precision": resolve_precision(AUTO, given.get("accelerator", "auto"))}
    callbacks = _checked("callbacks", callbacks, pl.Callback)
    has_bar = any(isinstance(c, ProgressBar) for c in callbacks)
    shows = given.get("enable_progress_bar", True)
    if default_callbacks:
        ours: list[pl.Callback] = [DrainCallback(), EmptyBatchGuard(), ResumeVersionRecovery()]
        ours.insert(0, RunSummary(show=shows))
        if shows and not has_bar:
            ours.insert(0, RunProgress())  # before the summary, whose table comes when the live line is gone
        callbacks += [c for c in ours if not any(isinstance(theirs, type(c)) for theirs in callbacks)]
    if given.get("enable_checkpointing", True) and not any(isinstance(c, RunCheckpoint) for c in callbacks):
        callbacks.append(make_checkpoint())
    return {
        "enable_checkpointing": True,
        "devices": 1,
        "log_every_n_steps": 1,
        "enable_model_summary": False,
        **given,
        "enable_progress_bar": has_bar and shows,  # ours is a callback, Lightning's are left to who wants one
        "max_steps": max_steps,
        "max_epochs": -1,
        "num_sanity_val_steps": 0,
        "val_check_interval": eval_every or None,
        "check_val_every_n_epoch": None,
        "limit_val_batches": None if evaluates else 0,
        "callbacks": [RunLoop(), *callbacks],
        "logger": _default_loggers(run_dir) if logger is None or logger is True else _checked("logger", logger, Logger),
        "default_root_dir": run_dir,
    }


def _checked(name: str, given: Any, kind: type[Any]) -> list[Any]:
    """What was given for an argument that takes one or several, as a list; nothing for ``None`` and ``False``."""
    if given is None or given is False:
        return []
    if isinstance(given, kind) or not isinstance(given, Iterable):
        refuse_other("AsyncRLTrainer", name, given, kind)
        return [given]
    several = list(given)
    for i, one in enumerate(several):
        refuse_other("AsyncRLTrainer", f"{name}[{i}]", one, kind)
    return several


def _default_loggers(run_dir: Path) -> list[Logger]:
    return [TensorBoardLogger(run_dir, name="", version="tensorboard"), JsonlLogger(run_dir / "metrics.jsonl")]
