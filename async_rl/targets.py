"""Checks ``_target_`` nodes against the signatures of their targets, read from source wherever that is possible."""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from async_rl.annotations import annotated_type
from async_rl.config import ConfigError, OptimizerExtras, Problem, RunConfig, keys_of
from async_rl.config_check import nearest, unknown_key
from async_rl.value_types import type_fault

HYDRA_KEYS = frozenset({"_target_", "_partial_", "_args_", "_recursive_", "_convert_"})
TRAINER_ARGUMENTS = (
    *("max_steps", "max_epochs", "accelerator", "devices", "precision", "callbacks", "logger", "default_root_dir"),
    *("num_sanity_val_steps", "val_check_interval", "check_val_every_n_epoch", "limit_val_batches"),
)
"""What the trainer's constructor gets from other keys."""
Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Parameters:
    """What can be passed to a target by name.

    Attributes:
        annotations: By parameter; ``None`` where nothing is known about its type.
        required: Those without a default.
        open: It takes any other name as well (``**kwargs``).
    """

    annotations: Mapping[str, Any]
    required: frozenset[str]
    open: bool


def check_targets(config: RunConfig) -> None:
    """Check every ``_target_`` node of a config.

    Signatures are read from the source where that is possible: importing an engine or a logger takes seconds. What
    can't be read is imported, once all that can be read is right.

    Raises:
        ConfigError: with every problem found without importing anything, else with those of the others.
    """
    nodes = list(_nodes(config))
    for read in (_from_source, parameters_of):
        problems: list[Problem] = []
        for path, node, given, extra in nodes:
            problems += _check(path, node, given, extra, read)
        if problems:
            raise ConfigError(problems)


def _nodes(config: RunConfig) -> Iterator[tuple[str, Any, Collection[str], Collection[str]]]:
    """Path, node, the arguments passed beside the node's keys, and the keys that are not for the target."""
    if "_target_" in config.environment:
        yield "environment", config.environment, (), ()
    else:
        for name, node in config.environment.items():
            yield f"environment.{name}", node, (), ()
    if config.model.warm_up is not None:
        yield "model.warm_up", config.model.warm_up, (), ()
    yield "engine", config.engine, ("model",), ("replicas",)
    if config.run.evaluation.engine is not None:
        yield "run.evaluation.engine", config.run.evaluation.engine, ("model",), ("replicas",)
    yield "algorithm.advantage", config.algorithm.advantage, (), ()
    yield "algorithm.loss", config.algorithm.loss, (), ()
    yield "optimizer", config.optimizer, ("params",), keys_of(OptimizerExtras)
    for section in ("callbacks", "logger"):
        for name, node in getattr(config, section).items():
            if node is not None:
                yield f"{section}.{name}", node, (), ()
    if config.run.lightning:
        trainer = {"_target_": "lightning.pytorch.Trainer", **config.run.lightning}
        yield "run.lightning", trainer, TRAINER_ARGUMENTS, ()


def _check(
    path: str,
    node: Any,
    given: Collection[str],
    extra: Collection[str],
    read: Callable[[str], Parameters | None],
) -> Iterator[Problem]:
    if not isinstance(node, Mapping) or not isinstance(node.get("_target_"), str):
        yield Problem(path, "needs a _target_: the dotted name of the class or function to build it with")
        return
    target = node["_target_"]
    for name, value in node.items():
        if isinstance(value, Mapping) and "_target_" in value:
            yield from _check(f"{path}.{name}", value, (), (), read)
    try:
        parameters = read(target)
    except LookupError as error:
        yield Problem(f"{path}._target_", str(error))
        return
    if parameters is None:
        return
    names = {str(name) for name in node} - HYDRA_KEYS - set(extra)
    for name in sorted(names):
        if name in given:
            yield Problem(f"{path}.{name}", "is set by the run itself; remove it")
        elif name in parameters.annotations:
            annotation = parameters.annotations[name]
            if annotation is not None and (fault := type_fault(node[name], annotation)):
                yield Problem(f"{path}.{name}", f"{node[name]!r} is not possible; give {fault}")
        elif not parameters.open:
            problem = unknown_key(f"{path}.{name}", {*parameters.annotations, *extra} - set(given), ())
            yield Problem(problem.key, f"{problem.message} ({target})")
    if not node.get("_partial_") and not node.get("_args_"):
        for name in sorted(parameters.required - names - set(given)):
            yield Problem(f"{path}.{name}", f"is missing: {target} needs it")


def parameters_of(target: str) -> Parameters | None:
    """The parameters of a dotted name, or ``None`` where they can't be known (some built-in functions).

    Raises:
        LookupError: there is no such module or name, or importing it failed; says so, with the nearest name.
    """
    return _from_source(target) or _signature(_locate(target))


def refused_by(target: str, error: Exception) -> str:
    """What the constructor of a target had against it, or which methods its class lacks."""
    missing = sorted(getattr(_locate(target), "__abstractmethods__", ()))
    if missing and isinstance(error, TypeError):
        return f"{target} has no method {' and no '.join(missing)} yet; add {'it' if len(missing) == 1 else 'them'}"
    return f"{target}: {error}"


def _locate(target: str) -> Any:
    parts = target.split(".")
    for n in range(len(parts) - 1, 0, -1):
        name = ".".join(parts[:n])
        try:
            found: Any = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
                continue
            raise LookupError(f"importing {name} failed: {error}") from error
        except Exception as error:
            raise LookupError(f"importing {name} failed: {type(error).__name__}: {error}") from error
        for part in parts[n:]:
            if not hasattr(found, part):
                close = nearest(part, [a for a in dir(found) if not a.startswith("_")])
                hint = f"; did you mean {name}.{close}?" if close else ""
                raise LookupError(f"{target}: {name} has no {part}{hint}")
            found = getattr(found, part)
        return found
    raise LookupError(
        f"{target}: there is no module {parts[0]}; install it, or add its folder to PYTHONPATH"
        if len(parts) > 1
        else f"{target!r} is no dotted name, such as my_package.my_module.MyClass"
    )


def _signature(found: Any) -> Parameters | None:
    try:
        parameters = _evaluated(found).parameters.values()
        named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        annotations = {p.name: _given_type(p) for p in named}
    except (TypeError, ValueError):
        return None
    return Parameters(
        annotations=annotations,
        required=frozenset(p.name for p in named if p.default is p.empty),
        open=any(p.kind is p.VAR_KEYWORD for p in parameters),
    )


def _evaluated(found: Any) -> inspect.Signature:
    try:
        return inspect.signature(found, eval_str=True)
    except Exception:  # an annotation may be any text, such as a name that is imported for type checkers only
        return inspect.signature(found)


def _given_type(parameter: inspect.Parameter) -> Any:
    if parameter.annotation is parameter.empty or isinstance(parameter.annotation, str):
        return None
    return Optional[parameter.annotation] if parameter.default is None else parameter.annotation  # noqa: UP045


def _from_source(target: str) -> Parameters | None:
    module, _, name = target.rpartition(".")
    found = _find(module, name)
    return None if found is None else _read(*found)


@functools.cache
def _source(module: str) -> tuple[ast.Module, bool] | None:
    """The parsed source of a module, and whether it is a package; ``None`` where there is none to read."""
    top, _, rest = module.partition(".")
    try:
        spec = importlib.util.find_spec(top) if top else None
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    if not rest and not spec.submodule_search_locations:
        files = [Path(spec.origin)] if spec.origin and spec.origin.endswith(".py") else []
    else:
        parts = rest.split(".") if rest else []
        bases = [Path(folder).joinpath(*parts) for folder in spec.submodule_search_locations or ()]
        files = [file for base in bases for file in (base / "__init__.py", base.with_suffix(".py"))]
    for file in files:
        if file.is_file():
            try:
                return ast.parse(file.read_text(encoding="utf-8")), file.name == "__init__.py"
            except (SyntaxError, ValueError):
                return None
    return None


def _find(module: str, name: str, depth: int = 8) -> tuple[str, Definition] | None:
    """The definition of a name, through re-exports, and the module it stands in."""
    source = _source(module)
    if source is None or depth == 0:
        return None
    tree, is_package = source
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
            return module, node
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return _find(_imported(module, is_package, node), alias.name, depth - 1)
    return None


def _imported(module: str, is_package: bool, node: ast.ImportFrom) -> str:
    """The absolute name of the module an import statement reads from."""
    if not node.level:
        return node.module or ""
    parts = module.split(".")
    parts = parts[: len(parts) - node.level + is_package]
    return ".".join([*parts, node.module] if node.module else parts)


def _read(module: str, node: Definition) -> Parameters | None:
    """Parameters of a definition; ``None`` where its source doesn't tell (decorators, bases that can't be read)."""
    if not isinstance(node, ast.ClassDef):
        return None if node.decorator_list else _from_arguments(module, node.args, skip=0)
    is_dataclass = any("dataclass" in ast.unparse(d) for d in node.decorator_list)
    if node.decorator_list and not is_dataclass:
        return None
    for item in node.body:
        if isinstance(item, ast.FunctionDef) and item.name in ("__init__", "__new__"):
            return None if item.decorator_list else _from_arguments(module, item.args, skip=1)
    if is_dataclass:
        return None if node.bases else _from_fields(module, node)
    for base in node.bases:
        found = _find(module, base.id) if isinstance(base, ast.Name) else None
        if found is None:
            return None
        if (parameters := _read(*found)) is not None:
            return parameters
    return Parameters({}, frozenset(), open=False) if not node.keywords else None


def _from_fields(module: str, node: ast.ClassDef) -> Parameters | None:
    annotations: dict[str, Any] = {}
    required = set()
    for item in node.body:
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            if "ClassVar" in ast.unparse(item.annotation):
                continue
            if isinstance(item.value, ast.Call):  # field(...): may be kept out of the constructor
                return None
            annotations[item.target.id] = _annotation(module, item.annotation, item.value)
            if item.value is None:
                required.add(item.target.id)
    return Parameters(annotations, frozenset(required), open=False)


def _from_arguments(module: str, arguments: ast.arguments, skip: int) -> Parameters:
    positional = [*arguments.posonlyargs, *arguments.args][skip:]
    optional = positional[len(positional) - len(arguments.defaults) :] if arguments.defaults else []
    required = {a.arg for a in positional if a not in optional}
    required |= {a.arg for a, d in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if d is None}
    pairs = [
        *zip(optional, arguments.defaults, strict=True),
        *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True),
    ]
    defaults = {a.arg: default for a, default in pairs}
    return Parameters(
        annotations={
            a.arg: _annotation(module, a.annotation, defaults.get(a.arg)) for a in [*positional, *arguments.kwonlyargs]
        },
        required=frozenset(required),
        open=arguments.kwarg is not None,
    )


def _annotation(module: str, node: ast.expr | None, default: ast.expr | None) -> Any:
    """The type an annotation in a module stands for, and null where that is the default; ``None``: not known."""
    found = annotated_type(node, functools.partial(_defined, module))
    nullable = isinstance(default, ast.Constant) and default.value is None
    return Optional[found] if nullable and found is not None else found  # noqa: UP045


def _defined(module: str, name: str) -> ast.expr | None:
    source = _source(module)
    for item in source[0].body if source else ():
        if isinstance(item, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in item.targets):
            return item.value
    return None
