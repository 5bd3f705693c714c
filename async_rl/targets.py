"""Checks ``_target_`` nodes against the signatures of their targets, reading our own ones without importing them."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from async_rl.config import ConfigError, OptimizerExtras, Problem, RunConfig, keys_of
from async_rl.config_check import nearest, type_fault, unknown_key

HYDRA_KEYS = frozenset({"_target_", "_partial_", "_args_", "_recursive_", "_convert_"})
OURS = "async_rl."


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
    """Check every ``_target_`` node of a config, our own first, so that a mistake in them imports nothing.

    Raises:
        ConfigError: with every problem found among our own nodes, else with those of the others.
    """
    nodes = list(_nodes(config))
    for ours in (True, False):
        problems: list[Problem] = []
        for path, node, given, extra in nodes:
            problems += _check(path, node, given, extra, ours)
        if problems:
            raise ConfigError(problems)


def _nodes(config: RunConfig) -> Iterator[tuple[str, Any, Collection[str], Collection[str]]]:
    """Path, node, the arguments passed beside the node's keys, and the keys that are not for the target."""
    if "_target_" in config.environment:
        yield "environment", config.environment, (), ()
    else:
        for name, node in config.environment.items():
            yield f"environment.{name}", node, (), ()
    yield "engine", config.engine, ("model",), ()
    yield "algorithm.advantage", config.algorithm.advantage, (), ()
    yield "algorithm.loss", config.algorithm.loss, (), ()
    yield "optimizer", config.optimizer, (), keys_of(OptimizerExtras)
    for section in ("callbacks", "logger"):
        for name, node in getattr(config, section).items():
            if node is not None:
                yield f"{section}.{name}", node, (), ()
    if config.run.lightning:
        trainer = {"_target_": "lightning.pytorch.Trainer", **config.run.lightning}
        yield "run.lightning", trainer, (), ()


def _check(path: str, node: Any, given: Collection[str], extra: Collection[str], ours: bool) -> Iterator[Problem]:
    if not isinstance(node, Mapping) or not isinstance(node.get("_target_"), str):
        if ours:
            yield Problem(path, "needs a _target_: the dotted name of the class or function to build it with")
        return
    target = node["_target_"]
    for name, value in node.items():
        if isinstance(value, Mapping) and "_target_" in value:
            yield from _check(f"{path}.{name}", value, (), (), ours)
    if target.startswith(OURS) is not ours:
        return
    try:
        parameters = parameters_of(target)
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
    if target.startswith(OURS):
        definition = _find(*target.rpartition(".")[::2])
        if definition is not None and (parameters := _static_parameters(*definition)) is not None:
            return parameters
    return _signature(_locate(target))


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
        parameters = inspect.signature(found).parameters.values()
    except (TypeError, ValueError):
        return None
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return Parameters(
        annotations={p.name: None for p in named},
        required=frozenset(p.name for p in named if p.default is p.empty),
        open=any(p.kind is p.VAR_KEYWORD for p in parameters),
    )


# -- our own signatures, read from the source: importing an engine or a callback takes seconds -----------------------


@functools.cache
def _source(module: str) -> ast.Module | None:
    base = Path(__file__).parent.joinpath(*module.split(".")[1:])
    for file in (base.with_suffix(".py"), base / "__init__.py"):
        if file.is_file():
            return ast.parse(file.read_text(encoding="utf-8"))
    return None


def _find(module: str, name: str) -> tuple[str, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef] | None:
    """The definition of a name of ours, through re-exports, and the module it stands in."""
    tree = _source(module)
    for node in tree.body if tree else ():
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
            return module, node
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith(OURS):
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return _find(node.module, alias.name)
    return None


def _static_parameters(module: str, node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> Parameters | None:
    if not isinstance(node, ast.ClassDef):
        return _from_arguments(module, node.args, skip=0)
    for item in node.body:
        if isinstance(item, ast.FunctionDef) and item.name == "__init__":
            return _from_arguments(module, item.args, skip=1)
    if any("dataclass" in ast.unparse(d) for d in node.decorator_list) and not node.bases:
        fields = [
            item
            for item in node.body
            if isinstance(item, ast.AnnAssign)
            and isinstance(item.target, ast.Name)
            and "ClassVar" not in ast.unparse(item.annotation)
        ]
        names = [cast("ast.Name", item.target).id for item in fields]
        return Parameters(
            annotations={n: _annotation(module, item.annotation) for n, item in zip(names, fields, strict=True)},
            required=frozenset(n for n, item in zip(names, fields, strict=True) if item.value is None),
            open=False,
        )
    return None


def _from_arguments(module: str, arguments: ast.arguments, skip: int) -> Parameters:
    positional = [*arguments.posonlyargs, *arguments.args][skip:]
    optional = positional[len(positional) - len(arguments.defaults) :] if arguments.defaults else []
    required = {a.arg for a in positional if a not in optional}
    required |= {a.arg for a, d in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if d is None}
    return Parameters(
        annotations={a.arg: _annotation(module, a.annotation) for a in [*positional, *arguments.kwonlyargs]},
        required=frozenset(required),
        open=arguments.kwarg is not None,
    )


def _annotation(module: str, node: ast.expr | None) -> Any:
    """The type an annotation stands for, if it is made of plain values; ``None``: not known."""
    if isinstance(node, ast.Constant) and node.value is None:
        return type(None)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        left, right = _annotation(module, node.left), _annotation(module, node.right)
        return None if left is None or right is None else left | right
    if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "Literal":
        return Literal[ast.literal_eval(node.slice)]
    if isinstance(node, ast.Name):
        plain = {"int": int, "float": float, "str": str, "bool": bool}
        if node.id in plain:
            return plain[node.id]
        tree = _source(module)
        for item in tree.body if tree else ():
            if isinstance(item, ast.Assign) and any(isinstance(t, ast.Name) and t.id == node.id for t in item.targets):
                return _annotation(module, item.value)
    return None
