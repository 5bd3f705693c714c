"""RunSummary: the table a run ends with, and the same figures as data."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch import LightningModule
from rich.console import Console
from rich.table import Table
from typing_extensions import override

from async_rl.callbacks.base import RLCallback
from async_rl.reward_text import mean_reward
from async_rl.types import Batch

if TYPE_CHECKING:
    from async_rl.trainer import AsyncRLTrainer

_ENDED = ("trained", "filtered", "failed", "dropped", "saved")
_LEFT = ("running", "kept", "reissued", "recorded")  # what the end of the run saves for a resume


def age_quantile(tokens_by_age: Counter[int], q: float) -> int:
    """Smallest age that at least a share ``q`` of the tokens does not exceed; 0 without tokens."""
    target, seen = q * tokens_by_age.total(), 0
    for age in sorted(tokens_by_age):
        seen += tokens_by_age[age]
        if seen >= target:
            return age
    return 0


def _tensorboard() -> str:
    """The command as it can be typed here: beside the running interpreter, if it is not on the PATH."""
    beside = Path(sys.executable).with_name("tensorboard")
    if shutil.which("tensorboard") or not beside.exists():
        return "tensorboard"
    return os.path.relpath(beside) if beside.is_relative_to(Path.cwd()) else str(beside)


def _groups(trainer: AsyncRLTrainer) -> dict[str, int]:
    """Groups of the whole run, by how they ended or are about to."""
    groups = trainer.orchestrator.outcomes()
    if trainer.replay is None:  # a replay saves nothing
        groups["saved"] += sum(groups[name] for name in _LEFT)
    return {f"groups_{name}": groups[name] for name in ("admitted", *_ENDED)}


class RunSummary(RLCallback):
    """Collects what the closing table shows and prints it when training ended without an error.

    Groups are counted over the whole run, whatever processes it took, so that ``groups_admitted`` is the sum of the
    other ``groups_...``; all else is of this process, which went on from ``start_version``.

    Args:
        show: Print the table; the figures go into ``run.json`` in any case.
    """

    def __init__(self, show: bool = True) -> None:
        self.show = show
        self.figures: dict[str, float | str] = {}
        self._tokens_by_age: Counter[int] = Counter()
        self._began_s = time.monotonic()
        self._step_ends_s: list[float] = []

    @override
    def on_train_start(self, trainer: AsyncRLTrainer, pl_module: LightningModule) -> None:  # type: ignore[override]
        self._began_s = time.monotonic()

    @override
    def on_batch_planned(self, trainer: AsyncRLTrainer, policy: LightningModule, batch: Batch) -> None:
        for trajectory in batch.trajectories:
            for s in trajectory.segments:
                if s.version is not None:  # masked tokens are not trained
                    self._tokens_by_age[batch.version - s.version] += sum(trajectory.loss_mask[s.start : s.end])

    @override
    def on_train_batch_end(  # type: ignore[override]
        self, trainer: AsyncRLTrainer, pl_module: LightningModule, outputs: Any, batch: Batch, batch_idx: int
    ) -> None:
        self._step_ends_s.append(time.monotonic())

    @override
    def on_train_end(self, trainer: AsyncRLTrainer, pl_module: LightningModule) -> None:  # type: ignore[override]
        session, ages = trainer.session, +self._tokens_by_age  # ages that a trained token has
        settings = trainer.orchestrator.settings
        bound = None if settings.stale_policy == "allow" else settings.max_staleness
        if not self._step_ends_s:
            return
        self.figures = {
            "steps": trainer.global_step - session.first_version,
            "start_version": session.first_version,
            "version": trainer.global_step,
            "seconds": time.monotonic() - self._began_s,
            # From the end of the first step on: before it, the engine also runs the first evaluation.
            "step_s": (self._step_ends_s[-1] - self._step_ends_s[0]) / max(len(self._step_ends_s) - 1, 1),
            "age_mean": sum(a * n for a, n in ages.items()) / max(ages.total(), 1),
            "age_p99": age_quantile(ages, 0.99),
            "age_max": max(ages, default=0),
            "age_bound": "none" if bound is None else bound,
            "train_s": session.overlap.train_s,
            **_groups(trainer),
        }
        if trainer.replay is None:
            self.figures |= {
                "sampling_policy": settings.sampling_policy,
                "tokens_per_s": session.tokens_per_s(),
                "overlap": session.overlap.overlap(session.generation_s()),
                "generation_s": session.generation_s(),
                "limited_by": trainer.orchestrator.limits(),
            }
        else:
            self.figures["replayed"] = trainer.datamodule.run.described(trainer.global_step)  # type: ignore[attr-defined]
        if session.first_version == 0:  # later it is none of the start, even if a resume made up for it
            self.figures |= trainer.evaluated.told("eval_start", 0)
        self.figures |= trainer.evaluated.told("eval_end", trainer.global_step)

    @override
    def teardown(self, trainer: AsyncRLTrainer, pl_module: LightningModule, stage: str) -> None:  # type: ignore[override]
        f = self.figures
        if not f:
            return
        f |= _groups(trainer)  # again, for since then the run was drained, and what was running may have ended
        if self.show:
            self._print(trainer)

    def _print(self, trainer: AsyncRLTrainer) -> None:
        f = self.figures
        table = Table(title=f"run ended: {trainer.ending}", show_header=False, title_justify="left")
        table.add_column(style="bold")
        table.add_column(overflow="fold")
        versions = f"up to version {f['version']}"
        if trainer.resume:
            versions = f"since the resume, version {f['start_version']} to {f['version']}"
        table.add_row("steps", f"{f['steps']} in {f['seconds']:.0f} s, {versions}")
        for name, title in (("eval_start", "evaluation, start"), ("eval_end", "evaluation, end")):
            if name in f:
                failed = f", {f[f'{name}_failures']:.0f} samples failed" if f[f"{name}_failures"] else ""
                table.add_row(title, f"{mean_reward(float(f[name]))} (version {f[f'{name}_version']:.0f}{failed})")
        if "replayed" in f:
            table.add_row("replayed", str(f["replayed"]))
        shown = {"saved": "saved for a resume"}
        ended = [f"{f[f'groups_{name}']} {shown.get(name, name)}" for name in _ENDED if f[f"groups_{name}"]]
        admitted = "" if trainer.replay else f"{f['groups_admitted']} admitted: "
        table.add_row("groups, whole run" if trainer.resume else "groups", admitted + ", ".join(ended))
        if "tokens_per_s" in f:
            table.add_row("generated", f"{f['tokens_per_s']:.0f} tokens/s")
        table.add_row(
            "age (versions)",
            f"mean {f['age_mean']:.2f}, p99 {f['age_p99']}, max {f['age_max']}, bound {f['age_bound']}",
        )
        if "limited_by" in f:
            table.add_row("admission limited by", str(f["limited_by"]))
            table.add_row(
                "overlap",
                f"{f['overlap']:.0%} of the smaller of training ({f['train_s']:.0f} s) "
                f"and generation ({f['generation_s']:.0f} s)",
            )
        table.add_row("run directory", str(trainer.run_dir))
        table.add_row("look at it", f"{_tensorboard()} --logdir {trainer.run_dir}")
        Console(highlight=False).print(table)
