"""Rubric: one reward made of several weighted ones, whose parts are logged by name."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from async_rl.environments.base import Reward, RewardError
from async_rl.environments.offload import call_user
from async_rl.environments.rollout import to_reward

Score = Callable[..., Any]


class Rubric:
    """The weighted sum of several rewards; use it wherever a reward function goes.

    Each part is logged under its own name, unweighted, as ``reward/<environment>/<part>``; the names are those given
    here, whatever the functions are called. The parts are computed side by side.

    Example::

        class Poem(SingleTurn):
            reward = Rubric({"rhymes": rhymes, "short": (is_short, 0.2)})

    In a config::

        reward:
          _target_: async_rl.environments.Rubric
          parts:
            rhymes: {_target_: my_package.rhymes, _partial_: true}
            short: {reward: {_target_: my_package.is_short, _partial_: true}, weight: 0.2}

    Args:
        parts: By name: a function (weight 1), ``(function, weight)``, or ``{"reward": function, "weight": weight}``.
            Functions take ``(prompt, completion)``, those of a ``ToolEnvironment`` also ``(prompt, completion, chat)``;
            any callable will do, sync or async, and returns a number or a ``Reward`` of its own.

    Raises:
        ValueError: no part, something that cannot be called, or a weight that is no finite number.
    """

    def __init__(self, parts: Mapping[str, Any]) -> None:
        if not isinstance(parts, Mapping) or not parts:
            raise ValueError(f"a rubric needs parts, {{name: function or (function, weight)}}; got {parts!r}")
        self._parts = {str(name): _part(str(name), part) for name, part in parts.items()}

    async def __call__(self, prompt: Mapping[str, Any], completion: str, *more: Any) -> Reward:
        """Score a completion.

        Raises:
            RewardError: a part is no finite number; the message names it.
        """
        names = list(self._parts)
        scores = await asyncio.gather(
            *(call_user(score, prompt, completion, *more[:taken]) for score, _, taken in self._parts.values())
        )
        total, logged = 0.0, {}
        for name, score in zip(names, scores, strict=True):
            try:
                part = to_reward(score, prompt, completion)
            except RewardError as error:
                raise RewardError(f"the part {name!r} of the rubric: {error}") from error
            total += self._parts[name][1] * part.value
            logged[name] = part.value
            logged.update({f"{name}/{inner}": value for inner, value in part.parts.items()})
        return Reward(total, logged)


def _part(name: str, part: Any) -> tuple[Score, float, int]:
    """The function, its weight, and how many arguments it takes beside prompt and completion."""
    if isinstance(part, Mapping):
        if unknown := set(part) - {"reward", "weight"}:
            raise ValueError(f"rubric part {name!r}: there is no {min(unknown)!r}; it has reward and weight")
        score, weight = part.get("reward"), part.get("weight", 1.0)
    elif isinstance(part, Sequence) and len(part) == 2:
        score, weight = part
    else:
        score, weight = part, 1.0
    if not callable(score):
        raise ValueError(f"rubric part {name!r}: {score!r} cannot be called; give a function of (prompt, completion)")
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
        raise ValueError(f"rubric part {name!r}: weight={weight!r} must be a finite number")
    return score, float(weight), _more(score)


def _more(score: Score) -> int:
    try:
        parameters = inspect.signature(score).parameters.values()
    except (TypeError, ValueError):  # some built-in functions
        return 0
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return 1
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return int(sum(p.default is p.empty for p in positional) >= 3)
