"""Checks the arguments of the Python constructors by the types and ranges of the config keys they stand for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from async_rl.config import EvaluationConfig, Problem, RolloutConfig, RunConfig, RunSettings, keys_of
from async_rl.value_types import type_fault

_UNDER_ITS_OWN_NAME: Mapping[type[Any], tuple[str, ...]] = {
    RunConfig: (
        *("max_steps", "max_staleness", "admit_ahead", "oversample_factor", "batch_size", "group_size"),
        *("max_concurrent", "stale_policy", "sampling_policy", "acknowledge_staleness", "seed", "resume"),
        *("resume_allow", "eval_every"),
    ),
    RunSettings: (
        *("checkpoint_every", "checkpoint_every_s", "keep_last", "parity_check", "load_timeout_s"),
        *("max_engine_restarts", "stall_timeout_s", "checkpoint_timeout_s"),
    ),
    RolloutConfig: (
        *("max_turns", "max_generated_tokens", "max_context", "template_rewrite", "epochs", "shuffle", "mixture"),
        *("last_batch", "group_completion", "min_group_size", "straggler_timeout_s", "max_retries", "max_failures"),
        *("rollout_timeout_s", "reward_timeout_s", "rollout_threads", "filter_zero_variance"),
    ),
}
_KEYS: Mapping[str, tuple[type[Any], str]] = {
    **{name: (schema, name) for schema, names in _UNDER_ITS_OWN_NAME.items() for name in names},
    "evaluate_at": (EvaluationConfig, "at"),
    "eval_samples": (EvaluationConfig, "samples"),
    "eval_limit": (EvaluationConfig, "limit"),
    "eval_pass_threshold": (EvaluationConfig, "pass_threshold"),
}
"""Section and key of the config, by the argument's name."""


def refuse_impossible(owner: str, arguments: Mapping[str, Any]) -> None:
    """Refuse values that the config would refuse.

    Args:
        owner: Whose arguments; stands before the message.
        arguments: By name; those without a config key are not looked at.

    Raises:
        ValueError: A line for each: the argument, its value, and what is possible.
    """
    refuse(owner, _problems(arguments))


def refuse(owner: str, problems: Iterable[Problem]) -> None:
    """Raise a config's problems, if there are any, as those of arguments.

    Raises:
        ValueError: A line for each.
    """
    if lines := [f"{owner}: {p.key}={p.message}" for p in problems]:
        raise ValueError("\n".join(lines))


def refuse_other(owner: str, name: str, value: object, kind: type[Any]) -> None:
    """Refuse an object of another kind; it would be noticed only deep in a run.

    Args:
        owner: Whose argument; stands before the message.
        name: The argument.
        value: What was given.
        kind: The class it has to be of.

    Raises:
        TypeError: Names the argument, the type given, and the one wanted.
    """
    if isinstance(value, kind):
        return
    given = f"the class {value.__name__}, no object" if isinstance(value, type) else f"of type {type(value).__name__}"
    wanted = f"{kind.__module__}.{kind.__qualname__}"
    raise TypeError(f"{owner}: {name} is {given}; give an object of a class derived from {wanted}")


def _problems(arguments: Mapping[str, Any]) -> Iterator[Problem]:
    sections = {schema: keys_of(schema) for schema, _ in _KEYS.values()}
    for name, value in arguments.items():
        if name in _KEYS:
            schema, key = _KEYS[name]
            annotation, about = sections[schema][key]
            if fault := type_fault(value, annotation, about.range):
                yield Problem(name, f"{value!r} is not possible; give {fault}")
