"""Sweep: checks every job of a sweep before the first one starts, announces each, and ends with their results."""

from __future__ import annotations

import itertools
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, open_dict

from async_rl.compose import check_choices, check_continued, explain, report
from async_rl.config import ConfigError
from async_rl.earlier_config import RECORD, continued
from async_rl.reward_text import mean_reward
from async_rl.run_end import EXIT_CONFIG, EXIT_INTERRUPTED


@dataclass(frozen=True, slots=True)
class JobEnd:
    """What a job returns: its exit code, and whether somebody wants it and the rest of the sweep to end."""

    code: int
    interrupted: bool = False


class Sweep(Callback):
    """What Hydra tells of a sweep (``-m``), and nothing for a single run."""

    def __init__(self) -> None:
        self._jobs: list[list[str]] = []  # overrides of each; none where the sweeper chooses them as it goes
        self._ended: list[tuple[str, Path, JobEnd]] = []

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Compose and check each job; a wrong one ends the process here, with all its problems."""
        from hydra._internal.core_plugins.basic_sweeper import BasicSweeper

        if not str(config.hydra.sweeper._target_).endswith("BasicSweeper"):
            return
        loader = GlobalHydra.instance().config_loader()
        job: list[str] = []
        try:
            parsed = OverridesParser.create(loader).parse_overrides(list(config.hydra.overrides.task))
            self._jobs = [list(j) for j in itertools.chain.from_iterable(BasicSweeper.split_arguments(parsed, None))]
            for job in self._jobs:
                check_choices(job)
                composed = loader.load_sweep_config(config, job)
                choices = composed.hydra.runtime.choices
                with open_dict(composed):
                    del composed["hydra"]
                check_continued(continued(composed, job, choices), job)
        except Exception as error:
            # Hydra turns what a callback raises into a warning; this has to end the process.
            message = str(error) if isinstance(error, ConfigError) else explain(error, job)
            report(f"in the job {' '.join(job)}: {message}")
            raise SystemExit(2) from error

    def on_job_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Say which job begins."""
        if config.hydra.mode == RunMode.MULTIRUN:
            number, jobs = config.hydra.job.num + 1, len(self._jobs)
            before = "\n" if number > 1 else ""
            print(f"{before}job {number}{f' of {jobs}' if jobs else ''}: {self._name(config)}", flush=True)

    def on_job_end(self, config: DictConfig, job_return: Any, **kwargs: Any) -> None:
        """Remember how the job ended and where it left its results; an interruption ends the sweep."""
        if config.hydra.mode != RunMode.MULTIRUN or not isinstance(end := job_return._return_value, JobEnd):
            return  # an error that Hydra raises in a moment
        self._ended.append((self._name(config), Path(job_return.cfg.run_dir), end))
        if end.interrupted:
            of = f" of {len(self._jobs)}" if self._jobs else ""
            self._print_results(f"results of the sweep, which ends with job {len(self._ended)}{of}")
            if job_return.cfg.replay is None:  # a replay is not gone on with
                print(self._how_to_go_on(), flush=True)
            raise SystemExit(end.code)

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Say how each job ended."""
        if self._ended:
            self._print_results("results of the sweep")

    def _print_results(self, title: str) -> None:
        width = max(len(name) for name, _, _ in self._ended)
        directory = os.path.commonpath([path.parent for _, path, _ in self._ended])
        lines = [f"  {name:<{width}}  {_result(path, end.code)}" for name, path, end in self._ended]
        print("\n".join([f"\n{title}: {directory}", *lines]), flush=True)

    def _how_to_go_on(self) -> str:
        _, last, end = self._ended[-1]
        first = "" if end.code == EXIT_INTERRUPTED else f"delete {last}, which holds nothing to go on from, then "
        if len({path.parent for _, path, _ in self._ended}) > 1:  # one run_dir would mix up the recipes' own
            return f"to go on with a job: {first}resume=true and its directory as run_dir"
        jobs = f"all {len(self._jobs)} jobs" if self._jobs else "all jobs"
        return f"to go on with {jobs}: {first}the same command with resume=true run_dir={last.parent}"

    def _name(self, config: DictConfig) -> str:
        """What tells the job from the others."""
        own = list(config.hydra.overrides.task)
        swept = [override for override in own if any(override not in job for job in self._jobs)]
        return " ".join(swept or own)


def never_began(run_dir: Path) -> bool:
    """Whether a job has no run yet, but others of its sweep have: an interruption came before it."""
    return not (run_dir / RECORD).is_file() and any(run_dir.parent.glob(f"*/{RECORD}"))


def _result(run_dir: Path, code: int) -> str:
    """Version, last evaluation and directory of a run, and how it ended where it did not finish."""
    if code == EXIT_CONFIG:
        return f"exit code {code}: refused, see above"  # what is in its directory is another run's
    try:
        record = json.loads((run_dir / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return f"no result in {run_dir}"
    figures = record["summary"]
    told = [f"version {figures['version']}"] if figures else []
    told += [f"evaluation {mean_reward(figures['eval_end'])}"] if "eval_end" in figures else []
    told += [f"exit code {record['exit_code']}: {record['exit_reason'].splitlines()[0]}"] if record["exit_code"] else []
    return ", ".join([*told, str(run_dir)])
