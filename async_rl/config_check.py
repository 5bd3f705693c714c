"""The check of a whole config: unknown keys, types, ranges, contradictions. Imports nothing heavy."""

from __future__ import annotations

import dataclasses
import difflib
import typing
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

from async_rl.config import (
    COMPONENT_RANGES,
    ConfigError,
    OptimizerExtras,
    Problem,
    Range,
    RunConfig,
    keys_of,
    known_keys,
    optimizer_extras,
)
from async_rl.config_engine import engine_rules
from async_rl.resume_rules import MEANING, may_be_allowed
from async_rl.staleness_rules import staleness_problems
from async_rl.value_types import is_number, type_fault

T = TypeVar("T")


def parse(config: Mapping[str, Any]) -> RunConfig:
    """Check a composed and resolved config and return it with types.

    Keys of ``_target_`` nodes are checked by :mod:`async_rl.targets`; here they are only known to be mappings.

    Raises:
        ConfigError: with every problem found.
    """
    problems: list[Problem] = []
    parsed = _parse_section(RunConfig, config, "", problems)
    if parsed is None or problems:
        raise ConfigError(problems)
    _parse_section(OptimizerExtras, optimizer_extras(parsed.optimizer), "optimizer", problems)
    for path, allowed in COMPONENT_RANGES.items():
        value = _select(config, path)
        # What is no number is told by the signatures of the targets, but torch's optimizers leave theirs open.
        wrong = value not in allowed if is_number(value) else value is not None and path.startswith("optimizer.")
        if wrong:
            problems.append(Problem(path, f"{value!r} is not possible; give a number {allowed}"))
    problems.extend(_contradictions(parsed))
    if problems:
        raise ConfigError(problems)
    return parsed


def nearest(name: str, candidates: Iterable[str]) -> str | None:
    """The candidate most like ``name``, comparing whole paths and last parts; ``None`` if none is near."""
    best, best_score = None, 0.6
    for candidate in sorted(set(candidates), key=lambda c: (c.count("."), c)):
        pairs = ((name, candidate), (name.rpartition(".")[2], candidate.rpartition(".")[2]))
        score = max(difflib.SequenceMatcher(None, a, b).ratio() for a, b in pairs)
        if score > best_score:
            best, best_score = candidate, score
    return best


def unknown_key(path: str, siblings: Iterable[str], everywhere: Iterable[str]) -> Problem:
    """The problem of a key that does not exist, with the nearest one that does."""
    section, _, name = path.rpartition(".")
    siblings = sorted(siblings)
    close = nearest(name, siblings)
    if close is not None:
        return Problem(path, f"there is no such key; did you mean {f'{section}.{close}' if section else close}?")
    far = nearest(path, everywhere)
    hint = f"did you mean {far}?" if far else f"{section or 'the root'} has {', '.join(siblings) or 'no keys'}"
    return Problem(path, f"there is no such key; {hint}")


def _parse_section(schema: type[T], node: Any, path: str, problems: list[Problem]) -> T | None:
    if not isinstance(node, Mapping):
        problems.append(Problem(path, f"{node!r} is one value, but this is a section with keys of its own"))
        return None
    prefix, keys = f"{path}." if path else "", keys_of(schema)
    before = len(problems)
    siblings = keys if path else [*keys, "recipe"]
    problems += [unknown_key(f"{prefix}{name}", siblings, known_keys()) for name in map(str, node) if name not in keys]
    values: dict[str, Any] = {}
    for name, (annotation, about) in keys.items():
        if name not in node:
            problems.append(Problem(f"{prefix}{name}", f"is missing: {about.help}"))
        elif dataclasses.is_dataclass(annotation):
            section = typing.cast("type[Any]", annotation)
            values[name] = _parse_section(section, node[name], f"{prefix}{name}", problems)
        else:
            if fault := type_fault(node[name], annotation, about.range):
                problems.append(Problem(f"{prefix}{name}", f"{node[name]!r} is not possible; give {fault}"))
            values[name] = node[name]
    return schema(**values) if len(problems) == before else None


def _select(config: Mapping[str, Any], path: str) -> Any:
    node: Any = config
    for part in path.split("."):
        node = node.get(part) if isinstance(node, Mapping) else None
    return node


def _contradictions(config: RunConfig) -> list[Problem]:
    rules = (
        _staleness_rules,
        _group_rules,
        _ahead_rules,
        _sampling_rules,
        _mixture_rules,
        _budget_rules,
        _loss_rules,
        engine_rules,
        _directory_rules,
        _display_rules,
    )
    return [problem for rule in rules for problem in rule(config)]


def _staleness_rules(c: RunConfig) -> Iterator[Problem]:
    yield from staleness_problems(
        max_staleness=c.max_staleness,
        admit_ahead=c.admit_ahead,
        oversample_factor=c.oversample_factor,
        stale_policy=c.stale_policy,
        acknowledged=c.acknowledge_staleness,
    )
    if c.max_staleness > 0 and c.algorithm.loss.get("correction") == "none" and not c.acknowledge_staleness:
        yield Problem(
            "max_staleness",
            f"{c.max_staleness} with algorithm.loss.correction=none trains old data as if it were new; set "
            "algorithm.loss.correction=truncate (or mask), max_staleness=0, or acknowledge_staleness=true",
        )


def _group_rules(c: RunConfig) -> Iterator[Problem]:
    if c.max_concurrent is not None and c.max_concurrent < c.group_size:
        yield Problem(
            "max_concurrent",
            f"{c.max_concurrent} can't hold one group of group_size={c.group_size} trajectories; raise it to at least "
            f"{c.group_size} or lower group_size",
        )
    quorum = c.rollout.group_completion == "quorum"
    for name in ("min_group_size", "straggler_timeout_s"):
        value = getattr(c.rollout, name)
        if quorum and value is None:
            yield Problem(f"rollout.{name}", "rollout.group_completion=quorum needs it")
        elif not quorum and value is not None:
            yield Problem(
                f"rollout.{name}",
                f"{value} is used with rollout.group_completion=quorum only; set that, or remove rollout.{name}",
            )
    if c.rollout.min_group_size is not None and c.rollout.min_group_size > c.group_size:
        yield Problem(
            "rollout.min_group_size",
            f"{c.rollout.min_group_size} is more than group_size={c.group_size}; lower it to at most {c.group_size}",
        )
    if c.group_size == 1:
        if c.rollout.filter_zero_variance:
            yield Problem(
                "rollout.filter_zero_variance",
                "with group_size=1 every group would be left out; raise group_size or turn it off",
            )
        target = str(c.algorithm.advantage.get("_target_"))
        if target.startswith("async_rl.") and c.algorithm.advantage.get("group_baseline", True):
            yield Problem(
                "group_size",
                f"1 leaves {target.rpartition('.')[2]} nothing to compare a reward with: every advantage would be 0; "
                "raise group_size, or set algorithm=batch_normalised algorithm.advantage.group_baseline=false",
            )


def _ahead_rules(c: RunConfig) -> Iterator[Problem]:
    key, given = "rollout.forward_backward_batch", c.rollout.forward_backward_batch
    if not isinstance(given, Mapping):
        return
    for name, value in given.items():
        if name not in ("min_sequences", "min_tokens"):
            yield unknown_key(f"{key}.{name}", ("min_sequences", "min_tokens"), ())
        elif fault := type_fault(value, int, Range(ge=1)):
            yield Problem(f"{key}.{name}", f"{value!r} is not possible; give {fault}")
    if c.max_staleness > 0 or c.stale_policy != "wait":
        yield Problem(
            key,
            f"is for max_staleness=0 with stale_policy=wait; with max_staleness={c.max_staleness} and "
            f"stale_policy={c.stale_policy} rollouts run ahead instead: set it to auto, or max_staleness=0 and "
            "stale_policy=wait",
        )
    target = str(c.algorithm.advantage.get("_target_"))
    if target.startswith("async_rl.") and target.endswith(".BatchNormalised"):
        yield Problem(
            key,
            "is for group-centred advantages, but BatchNormalised needs the whole batch; set it to auto, or "
            "algorithm=grpo",
        )


def _sampling_rules(c: RunConfig) -> Iterator[Problem]:
    if c.rollout.sampling.temperature == 0:
        yield Problem(
            "rollout.sampling.temperature",
            f"0 makes all group_size={c.group_size} rollouts of a prompt the same: nothing is to be learnt from that; "
            "give a number > 0 (greedy evaluation is run.evaluation.sampling.temperature=0 run.evaluation.samples=1)",
        )
    evaluation = c.run.evaluation
    evaluates = evaluation.at != "never" or c.eval_every > 0
    if evaluates and evaluation.sampling.temperature == 0 and evaluation.samples > 1:
        yield Problem(
            "run.evaluation.samples",
            f"{evaluation.samples} with run.evaluation.sampling.temperature=0 draws the same sample so often for each "
            "prompt; set run.evaluation.samples=1, or a temperature > 0",
        )
    full = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}
    for name, value in full.items():
        if (given := getattr(c.rollout.sampling, name)) != value:
            yield Problem(
                f"rollout.sampling.{name}",
                f"{given} samples from some of the tokens only, while the trainer's probabilities are over all of "
                f"them: every importance ratio would be wrong; set it to {value:g} (for evaluation alone: "
                f"run.evaluation.sampling.{name})",
            )
    if c.rollout.last_batch == "train" and c.rollout.epochs is None:
        yield Problem(
            "rollout.last_batch",
            "train is never used without an end of the data; set rollout.epochs, or rollout.last_batch=drop",
        )


def _budget_rules(c: RunConfig) -> Iterator[Problem]:
    longest, context, generated = c.engine.get("max_model_len"), c.rollout.max_context, c.rollout.max_generated_tokens
    if is_number(longest) and context is not None and context > longest:
        yield Problem(
            "rollout.max_context",
            f"{context} is more than engine.max_model_len={longest} can hold; raise that, or lower it",
        )
    engine, own = ("engine", c.engine), c.run.evaluation.engine
    for section, sampling, (path, node) in (
        ("rollout", c.rollout.sampling, engine),
        ("run.evaluation", c.run.evaluation.sampling, engine if own is None else ("run.evaluation.engine", own)),
    ):
        key = f"{section}.sampling.max_tokens"
        limits = ((f"{path}.max_model_len", node.get("max_model_len")), ("rollout.max_context", context))
        for name, limit in limits:
            if is_number(limit) and sampling.max_tokens >= limit:
                yield Problem(
                    key,
                    f"{sampling.max_tokens} leaves no room for a prompt in {name}={limit}; raise {name} or lower it",
                )
        if generated is not None and sampling.max_tokens > generated:
            yield Problem(
                key,
                f"{sampling.max_tokens} is more than rollout.max_generated_tokens={generated} allows for all turns; "
                "lower it, or raise that",
            )


def _mixture_rules(c: RunConfig) -> Iterator[Problem]:
    key, mixture = "rollout.mixture", c.rollout.mixture
    if mixture is None:
        return
    if "_target_" in c.environment:
        yield Problem(
            key, "is for several environments; give them as environment: {one: {_target_: ...}, two: ...}, or remove it"
        )
        return
    names = ", ".join(map(str, c.environment))
    for name, weight in mixture.items():
        if name not in c.environment:
            close = nearest(str(name), map(str, c.environment))
            hint = f"; did you mean {key}.{close}? There are" if close else "; there are"
            yield Problem(f"{key}.{name}", f"there is no environment {name}{hint} {names}")
        elif not is_number(weight) or weight not in Range(gt=0):
            yield Problem(f"{key}.{name}", f"{weight!r} is not possible; give a number > 0, or leave it out of both")
    if without := [str(name) for name in c.environment if name not in mixture]:
        one_each = ", ".join(f"{name}: {mixture.get(name, 1)}" for name in c.environment)
        yield Problem(
            key, f"has no weight for {', '.join(without)}; give every environment one, for example {{{one_each}}}"
        )
    if c.rollout.epochs is not None:
        yield Problem(
            key,
            f"with rollout.epochs={c.rollout.epochs}, either each prompt comes so often or each environment has its "
            "share; set one of them to null",
        )


def _loss_rules(c: RunConfig) -> Iterator[Problem]:
    loss = c.algorithm.loss
    if loss.get("normalise") == "constant" and not loss.get("constant"):
        yield Problem(
            "algorithm.loss.constant",
            "algorithm.loss.normalise=constant needs the tokens to divide by, usually "
            f"algorithm.loss.constant={c.rollout.sampling.max_tokens}",
        )
    elif loss.get("constant") and loss.get("normalise", "token") in ("token", "sequence"):
        yield Problem(
            "algorithm.loss.constant",
            f"{loss['constant']} is used with algorithm.loss.normalise=constant only; set that, or remove it",
        )


def _directory_rules(c: RunConfig) -> Iterator[Problem]:
    if c.resume and c.overwrite:
        yield Problem("overwrite", "true with resume=true: a run is either continued or deleted; take one of them")
    if c.resume and c.replay is not None:
        yield Problem("replay", f"{c.replay} with resume=true: a replay starts at version 0; remove one of them")
    if c.resume_allow and not c.resume:
        yield Problem("resume_allow", f"{c.resume_allow} without resume=true has no effect; remove it")
    for name in c.resume_allow:
        if not may_be_allowed(name):
            close = nearest(name, MEANING)
            hint = f"did you mean {close}?" if close else f"these matter: {', '.join(MEANING)}"
            yield Problem("resume_allow", f"{name} is no key that a resume would refuse; {hint}")


def _display_rules(c: RunConfig) -> Iterator[Problem]:
    if c.run.lightning.get("enable_progress_bar") is False and (
        c.callbacks.get("progress") or c.callbacks.get("summary")
    ):
        yield Problem(
            "run.lightning.enable_progress_bar",
            "false would not switch off callbacks that are configured; set callbacks.progress=null "
            "callbacks.summary=null instead",
        )
