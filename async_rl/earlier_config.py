"""The config of a run that is resumed or replayed: it goes under the command line's, and is compared with it."""

from __future__ import annotations

import copy
import dataclasses
import json
import typing
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from async_rl.config import ConfigError, Problem, RunConfig, keys_of
from async_rl.durable import durable_file
from async_rl.resume_rules import MEANING, refusal

CONFIG, RECORD = "config.yaml", "run.json"
_OF_THE_COMMAND = ("run_dir", "resume", "resume_allow", "replay", "overwrite")
"""Keys that always come from the command line."""
_UNUSED_BY_REPLAY = (
    *("environment", "engine", "rollout", "batch_size", "group_size", "max_concurrent", "admit_ahead"),
    *("oversample_factor", "sampling_policy", "eval_every", "run.evaluation"),
)
_OF_THE_RECORD = ("max_staleness", "stale_policy", "acknowledge_staleness")
"""What a replay takes from the record, version by version, whatever is said."""
_WRITING = ("engine", "callbacks", "logger", "run")
"""Sections with paths in the run directory."""
_MISSING: Any = object()


@dataclass(frozen=True, slots=True)
class Continued:
    """A config that goes on from an earlier run's, or one that does not.

    Attributes:
        config: What to run.
        choices: What was chosen from each config group, by Hydra or by the earlier run.
        directory: The earlier run; ``None``: there is none.
        before: Its config.
        given: Dotted keys the command line gave a value.
        absent_recipe: The earlier run's recipe, where it is none of those that are known now.
    """

    config: DictConfig
    choices: Mapping[str, Any]
    directory: Path | None = None
    before: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    given: tuple[str, ...] = ()
    absent_recipe: str = ""

    @property
    def note(self) -> str:
        """One line for people: where the settings come from and what is different now; empty without earlier run."""
        if self.directory is None:
            return ""
        now = _plain(self.config)
        changed = [
            f"{key} {_shown(old)} -> {_shown(new)}"
            for key, old, new in _differences(self.before, now)
            if any(_inside(key, given) for given in self.given) and (self.config.resume or key not in _OF_THE_RECORD)
        ]
        verb = "going on with" if self.config.resume else "replaying with"
        absent = f" (recipe {self.absent_recipe} is not among the recipes here)" * bool(self.absent_recipe)
        return f"{verb} the settings in {self.directory / CONFIG}{absent}" + (
            f"; changed: {', '.join(changed)}" * bool(changed)
        )

    def check(self, config: RunConfig) -> None:
        """Refuse changes that make something else of recorded data, or that a replay would not use.

        Raises:
            ConfigError: it names the keys, their values and the fix.
        """
        if self.directory is None:
            return
        now = _plain(self.config)
        if config.resume:
            whole = _target(self.before) != _target(now)  # of another environment no key is left to compare
            then, wanted = (_meaning(c, whole_environment=whole) for c in (self.before, now))
            why = refusal(self.directory, then, wanted, config.resume_allow)
            if why:
                raise ConfigError([Problem("", why)])
            return
        unused = [
            Problem(key, f"{_shown(new)} changes nothing in a replay, which trains recorded batches; remove it")
            for key, _, new in _differences(self.before, now)
            if any(_inside(key, name) for name in _UNUSED_BY_REPLAY) and any(_inside(key, g) for g in self.given)
        ]
        if unused:
            raise ConfigError(unused)


def earlier_choices(arguments: Sequence[str], recipes: Collection[str]) -> list[str]:
    """Overrides that choose from each config group what the earlier run chose, where the command line does not.

    So that its keys are there to be changed; the values come from its config.

    Args:
        arguments: The command line.
        recipes: Names of the recipes there are.
    """
    given = {o.key_or_group: o for o in _parsed(arguments)}
    said = {name: override.value() for name, override in given.items() if name in ("resume", "run_dir", "replay")}
    directory = _earlier_run(said)
    if directory is None:
        return []
    return [
        f"+recipe={choice}" if group == "recipe" else f"{group}={choice}"
        for group, choice in _choices_of(directory).items()
        if group not in given and choice is not None and (group != "recipe" or choice in recipes)
    ]


def continued(config: DictConfig, overrides: Iterable[str], choices: Mapping[str, Any]) -> Continued:
    """Put a composed config on top of that of the run it resumes or replays: what the command line does not say stays.

    A group that is chosen as the earlier run chose it changes nothing.

    Args:
        config: As composed, without Hydra's own node.
        overrides: The command line's overrides.
        choices: Hydra's choice per config group.

    Raises:
        ConfigError: another recipe, or a resume of a replay.
    """
    directory = _earlier_run(config)
    if directory is None or not (directory / CONFIG).is_file():
        return Continued(config, choices)
    before = _plain(typing.cast("DictConfig", OmegaConf.load(directory / CONFIG)))
    if config.resume and before.get("replay") is not None:
        raise ConfigError(
            [
                Problem(
                    "resume",
                    f"{directory} is a replay of {before['replay']}, and a replay keeps no record to go on with; "
                    f"replay it again (replay={before['replay']}) in a new run_dir",
                )
            ]
        )
    earlier = _choices_of(directory)
    given, said = [], set()
    for override in _parsed(overrides):
        said.add(override.key_or_group)
        name = override.get_key_element().lstrip("+~")
        if override.key_or_group in _OF_THE_COMMAND or name.startswith("hydra"):
            continue
        if name == "recipe":
            if (recipe := _record_of(directory).get("recipe")) not in (override.value(), None):
                raise ConfigError([_other_recipe(directory, str(override.value()), recipe)])
            continue
        is_group = name in choices or override.key_or_group in choices
        if is_group and _shown(override.value()) == _shown(earlier.get(name)):
            continue
        given.append((override.package if is_group else None) or override.key_or_group)
    try:
        composed = _plain(_filled(config, before, given))
    except OmegaConfBaseException:
        return Continued(config, choices)  # the check says what is wrong with it
    merged = _under(composed, _moved(before, composed["run_dir"]), RunConfig)
    for key in given:
        _put(merged, key, _at(composed, key))
    kept = {group: choice for group, choice in earlier.items() if group not in said}
    absent = str(earlier["recipe"]) if earlier.get("recipe") and not choices.get("recipe") else ""
    return Continued(OmegaConf.create(merged), {**choices, **kept}, directory, before, tuple(given), absent)


def save(config: Any, run_dir: Path) -> None:
    """Keep a run's settings, resolved: the new ones or, whatever happens, those that were there."""
    with durable_file(run_dir / CONFIG) as file:
        file.write(OmegaConf.to_yaml(config, resolve=True).encode())


def keep(run_dir: Path, key: str, value: str) -> None:
    """Write what was found out into the saved settings, so that a resume goes on with it."""
    saved = OmegaConf.load(run_dir / CONFIG)
    OmegaConf.update(saved, key, value)
    save(saved, run_dir)


def _earlier_run(config: Mapping[str, Any] | DictConfig) -> Path | None:
    """The run whose settings a config goes on with."""
    for wanted, name in ((config.get("resume") is True, config.get("run_dir")), (True, config.get("replay"))):
        if wanted and isinstance(name, str):
            return Path(name)
    return None


def _choices_of(directory: Path) -> dict[str, Any]:
    """What a run chose from each config group; ``None``: nothing."""
    choices = _record_of(directory).get("choices")
    return choices if isinstance(choices, dict) else {}


def _record_of(directory: Path) -> dict[str, Any]:
    try:
        record = json.loads((directory / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def _parsed(arguments: Iterable[str]) -> Iterator[Override]:
    parser = OverridesParser.create()
    for argument in arguments:
        try:
            yield from parser.parse_overrides([argument])
        except HydraException:
            continue  # Hydra says what is wrong with it


def _other_recipe(directory: Path, recipe: str, earlier: str) -> Problem:
    return Problem(
        "recipe",
        f"{recipe}, but the run in {directory} has recipe {earlier}; leave it out (its settings are used anyway), "
        "and set single keys",
    )


def _filled(config: DictConfig, before: Mapping[str, Any], given: Collection[str]) -> DictConfig:
    """The config with what has to be given (``???``), and was not given again, as the earlier run had it."""
    filled = copy.deepcopy(config)
    for key in OmegaConf.missing_keys(config):
        if not any(_inside(key, section) for section in given) and (value := _at(before, key)) is not _MISSING:
            OmegaConf.update(filled, key, value)
    return filled


def _under(now: Mapping[str, Any], before: Mapping[str, Any], schema: Any) -> dict[str, Any]:
    """``before`` wherever it has a value, section by section of the schema; what it does not know yet from ``now``."""
    merged = {**before, **{key: now[key] for key in _OF_THE_COMMAND if key in now}}
    for key, (annotation, _) in keys_of(schema).items():
        if key not in merged and key in now:
            merged[key] = now[key]
        elif dataclasses.is_dataclass(annotation) and isinstance(before.get(key), Mapping):
            merged[key] = _under(now.get(key) or {}, before[key], annotation)
    return copy.deepcopy(merged)


def _moved(config: dict[str, Any], run_dir: str) -> dict[str, Any]:
    """The config with what the run writes itself going to another directory."""
    before = config.get("run_dir")

    def moved(node: Any) -> Any:
        if isinstance(node, dict):
            return {name: moved(value) for name, value in node.items()}
        if isinstance(node, str) and (node == before or node.startswith(f"{before}/")):
            return run_dir + node[len(str(before)) :]
        return node

    return {name: moved(node) if name in _WRITING else node for name, node in config.items()}


def _at(config: Mapping[str, Any], key: str) -> Any:
    node: Any = config
    for part in key.split("."):
        if not isinstance(node, Mapping) or part not in node:
            return _MISSING
        node = node[part]
    return node


def _put(config: dict[str, Any], key: str, value: Any) -> None:
    """Set or, where the value is missing, remove a key."""
    *sections, name = key.split(".")
    for section in sections:
        if not isinstance(config.get(section), dict):
            config[section] = {}
        config = config[section]
    if value is _MISSING:
        config.pop(name, None)
    else:
        config[name] = value


def _plain(config: DictConfig) -> dict[str, Any]:
    return typing.cast("dict[str, Any]", OmegaConf.to_container(config, resolve=True, throw_on_missing=True))


def _leaves(node: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(node, Mapping) and node:
        for name, value in node.items():
            yield from _leaves(value, f"{key}.{name}" if key else str(name))
    else:
        yield key, node


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    old, new = dict(_leaves(before)), dict(_leaves(now))
    values = [(key, old.get(key, _MISSING), new.get(key, _MISSING)) for key in {**old, **new}]
    return [(key, a, b) for key, a, b in values if a != b]


def _meaning(config: Mapping[str, Any], *, whole_environment: bool) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key in MEANING:
        if (node := _at(config, key)) is not _MISSING:
            values |= {key: node} if whole_environment and key == "environment" else dict(_leaves(node, key))
    return values


def _target(config: Mapping[str, Any]) -> Any:
    return _at(config, "environment._target_")


def _inside(key: str, section: str) -> bool:
    return key == section or key.startswith(f"{section}.")


def _shown(value: Any) -> str:
    return "nothing" if value is _MISSING else "null" if value is None else str(value)
