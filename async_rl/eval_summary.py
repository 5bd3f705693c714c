"""What the samples of an evaluation come to: mean reward with and without failures, pass@k, by environment."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from async_rl.types import EvalResult

_ROUNDING = 1e-9  # a sum of weights such as 0.7 + 0.2 + 0.1 may fall that short of 1


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """Probability that at least one of ``k`` samples passes: the unbiased estimator of Chen et al. 2021, equation 1.

    Args:
        samples: n, how many were drawn, ``>= k``.
        passed: c, how many of them passed.
        k: How many one may draw, ``>= 1``.

    Returns:
        ``1 - C(n - c, k) / C(n, k)``, in [0, 1].
    """
    return 1.0 - math.comb(samples - passed, k) / math.comb(samples, k)


def which_k(samples: int) -> list[int]:
    """The k that pass@k is told for: 1, 2, 4, ... and the number of samples itself."""
    return sorted({1 << i for i in range(samples.bit_length())} | {samples}) if samples else []


def summarise(results: Sequence[EvalResult], pass_threshold: float) -> dict[str, float]:
    """The numbers of one evaluation.

    Args:
        results: One entry per prompt, all with the same number of samples, failed ones included.
        pass_threshold: Least reward with which a sample passes. A failed sample never does.

    Returns:
        ``reward``: mean over the samples that finished, NaN where none did; ``reward_lower_bound``: mean over all
        samples, a failed one counted as 0, or as the lowest reward seen where that is less; ``pass@1``, ``pass@2``,
        ``pass@4``, ... up to the number of samples, and ``pass_at_k``, the last of them; ``samples`` that finished,
        ``failures``, ``prompts``. ``reward/<environment>`` and ``reward/<environment>/<part>`` are means; with several
        environments each has the rest too, ``pass@4/<environment>`` for instance.
    """
    summary = {"reward": math.nan, **_scores(results, pass_threshold), "prompts": float(len(results))}
    environments = list(dict.fromkeys(r.prompt.environment for r in results))
    for environment in environments:
        theirs = [r for r in results if r.prompt.environment == environment]
        scores = _scores(theirs, pass_threshold)
        told = scores if len(environments) > 1 else {"reward"} & scores.keys()
        summary |= {f"{name}/{environment}": scores[name] for name in told}
        parts: dict[str, list[float]] = {}
        for t in (t for r in theirs for t in r.trajectories):
            for part, value in t.reward_parts.items():
                parts.setdefault(part, []).append(value)
        summary |= {f"reward/{environment}/{part}": fmean(values) for part, values in parts.items()}
    return summary


def _scores(results: Sequence[EvalResult], pass_threshold: float) -> dict[str, float]:
    rewards = [t.reward for r in results for t in r.trajectories]
    failures = sum(len(r.failures) for r in results)
    scores = {"samples": float(len(rewards)), "failures": float(failures)}
    if rewards:
        scores["reward"] = fmean(rewards)
    if rewards or failures:
        scores["reward_lower_bound"] = fmean(rewards + [min([*rewards, 0.0])] * failures)
    drawn = [len(r.trajectories) + len(r.failures) for r in results]
    passed = [sum(t.reward >= pass_threshold - _ROUNDING for t in r.trajectories) for r in results]
    for k in which_k(min(drawn, default=0)):
        scores[f"pass@{k}"] = scores["pass_at_k"] = fmean(map(pass_at_k, drawn, passed, [k] * len(drawn)))
    return scores
