"""check_parity: engine and trainer must give the same tokens the same log-probabilities, or the run must not go on."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from async_rl.types import RunError

MEAN_TOLERANCES = {"float32": 1e-4, "float16": 0.03, "bfloat16": 0.15}
"""Largest mean |difference| by the coarser of the two dtypes. Measured on a 135M model: 7e-6 in float32, 0.05 in
bfloat16; a stale output projection after a large update gives 0.25, and any other wrong weight far more."""


class WeightParityError(RunError):
    """The engine does not compute what the trainer computes: its weights are not the ones that were published."""


class Scorer(Protocol):
    """The part of an engine that the check needs."""

    name: str

    async def score(self, token_ids: tuple[int, ...]) -> list[float]:
        """Log-probabilities of ``token_ids[1:]`` at temperature 1."""
        ...


@dataclass(frozen=True, slots=True)
class ParityReport:
    """How far engine and trainer are apart.

    Attributes:
        mean_abs: Mean |engine log-probability - trainer log-probability| over the tokens.
        max_abs: The largest.
        tokens: Number of tokens compared.
    """

    mean_abs: float
    max_abs: float
    tokens: int


def mean_tolerance(*dtypes: str) -> float:
    """Largest mean difference that rounding explains, for the dtypes the engine and the trainer compute in.

    Args:
        dtypes: Names such as ``"bfloat16"``; the coarsest counts.

    Raises:
        ValueError: an unknown dtype.
    """
    unknown = [d for d in dtypes if d not in MEAN_TOLERANCES]
    if unknown or not dtypes:
        raise ValueError(f"no parity tolerance for {unknown or 'no dtype'}: known are {sorted(MEAN_TOLERANCES)}")
    return max(MEAN_TOLERANCES[d] for d in dtypes)


def compare_logprobs(engine: Sequence[Sequence[float]], trainer: Sequence[Sequence[float]]) -> ParityReport:
    """Differences over several sequences. A value that is not finite on either side counts as infinitely far.

    Args:
        engine: Log-probabilities by the engine, one list per sequence.
        trainer: The same tokens by the trainer.

    Raises:
        ValueError: the lengths differ, or there is no token.
    """
    differences: list[float] = []
    for ours, theirs in zip(engine, trainer, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            differences.append(abs(a - b) if math.isfinite(a) and math.isfinite(b) else math.inf)
    if not differences:
        raise ValueError("parity needs at least one token: pass sequences of two tokens or more")
    return ParityReport(math.fsum(differences) / len(differences), max(differences), len(differences))


async def check_parity(
    engine: Scorer,
    reference_logprobs: Callable[[list[int]], Sequence[float]],
    sequences: Sequence[Sequence[int]],
    *,
    tolerance: float,
    version: int,
) -> ParityReport:
    """Score ``sequences`` with the engine and with the trainer and compare.

    Args:
        engine: The engine, serving ``version``.
        reference_logprobs: The trainer's log-probabilities of ``token_ids[1:]`` at temperature 1; blocks.
        sequences: Token ids, at least two each. A hundred tokens in all are plenty.
        tolerance: Largest mean difference, see :func:`mean_tolerance`.
        version: Policy version that both hold, for the message.

    Returns:
        The differences.

    Raises:
        WeightParityError: the mean is above ``tolerance``, or a value is not finite.
    """
    theirs = [await engine.score(tuple(sequence)) for sequence in sequences]
    report = compare_logprobs(theirs, [reference_logprobs(list(sequence)) for sequence in sequences])
    if not report.mean_abs <= tolerance:
        raise WeightParityError(
            f"engine {engine.name} does not compute what the trainer computes at policy version {version}: mean "
            f"|log-probability difference| {report.mean_abs:.3g} (max {report.max_abs:.3g}) over {report.tokens} "
            f"tokens, tolerance {tolerance:g}; a weight did not arrive, or the two models differ (dtype, rope "
            "scaling, tied embeddings)"
        )
    return report
