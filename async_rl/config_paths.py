"""The check of the paths in a config that must be there before a run begins. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from async_rl.config import ConfigError, Problem, RunConfig
from async_rl.models import local_fault

_DATA = ("path", "eval_path")
"""What our environments call the data they read."""


def check_paths(config: RunConfig) -> None:
    """Check that the model and the data are there, where they are given as paths.

    Raises:
        ConfigError: with every one that is not.
    """
    if problems := [*_model_problems(config), *_data_problems(config)]:
        raise ConfigError(problems)


def _model_problems(c: RunConfig) -> Iterator[Problem]:
    if fault := local_fault(c.model.name_or_path):
        yield Problem("model.name_or_path", f"{c.model.name_or_path}: {fault}")


def _data_problems(c: RunConfig) -> Iterator[Problem]:
    if c.replay is not None and c.model.warm_up is None:
        return  # it reads none
    nodes = {"": c.environment} if "_target_" in c.environment else {f".{k}": v for k, v in c.environment.items()}
    for place, node in nodes.items():
        if not str(node["_target_"]).startswith("async_rl."):
            continue  # a path may be anything there
        for name in _DATA:
            given = node.get(name)
            if isinstance(given, str) and not (file := Path(given).expanduser()).exists():
                yield Problem(
                    f"environment{place}.{name}",
                    f"{given}: {file.absolute()} does not exist; give the file or directory with the data",
                )
