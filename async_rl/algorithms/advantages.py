"""Advantages: what a trajectory's reward is worth next to the other rewards of its group or batch.

The functions take the rewards of one group (or of one batch) as tensors. The classes wrap them as an
:class:`AdvantageFn`, which is what a config's ``_target_`` names and what the train sink calls.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

Nested = tuple[tuple[float, ...], ...]


class AdvantageFn(Protocol):
    """Rewards nested per group in, advantages nested the same way out; groups may differ in size."""

    @property
    def needs_batch(self) -> bool:
        """True where a group's advantages depend on the other groups, so they exist only once the batch is known."""
        ...

    def __call__(self, rewards: Sequence[Sequence[float]]) -> Nested:
        """Advantages of ``rewards[group][sample]``."""
        ...


def grpo(rewards: Tensor, epsilon: float = 1e-6) -> Tensor:
    r"""Rewards standardised within their group.

    .. math:: A_i = \frac{r_i - \mathrm{mean}(r)}{\mathrm{std}(r) + \epsilon}

    with the sample standard deviation (divisor :math:`G - 1`). A group of equal rewards, or of one, gets zeros.

    Source: GRPO, Shao et al. 2024, DeepSeekMath (arXiv:2402.03300), section 4.1.2, outcome supervision.

    Args:
        rewards: Rewards of one group, ``[group]``.
        epsilon: Added to the standard deviation, > 0.

    Returns:
        Advantages, ``[group]``.
    """
    if _all_equal(rewards):
        return torch.zeros_like(rewards)
    return (rewards - rewards.mean()) / (rewards.std() + epsilon)


def dr_grpo(rewards: Tensor) -> Tensor:
    r"""Rewards minus their group's mean, not divided by the standard deviation.

    .. math:: A_i = r_i - \mathrm{mean}(r)

    Dividing by the standard deviation gives prompts that are nearly always or nearly never solved a larger say.

    Source: Dr. GRPO, Liu et al. 2025, Understanding R1-Zero-Like Training (arXiv:2503.20783), section 3.2. Its loss
    is ``DecoupledPPOLoss(normalise="constant")``.

    Args:
        rewards: Rewards of one group, ``[group]``.

    Returns:
        Advantages, ``[group]``.
    """
    if _all_equal(rewards):
        return torch.zeros_like(rewards)
    return rewards - rewards.mean()


def rloo(rewards: Tensor) -> Tensor:
    r"""Rewards minus the mean of the *other* rewards of the group: an unbiased baseline.

    .. math:: A_i = r_i - \frac{1}{G - 1} \sum_{j \ne i} r_j = \frac{G}{G - 1} (r_i - \mathrm{mean}(r))

    A group of one has nothing to compare with and gets zero.

    Source: RLOO, Ahmadian et al. 2024, Back to Basics (arXiv:2402.14740), the REINFORCE leave-one-out estimator;
    first in Kool et al. 2019.

    Args:
        rewards: Rewards of one group, ``[group]``.

    Returns:
        Advantages, ``[group]``.
    """
    if _all_equal(rewards):
        return torch.zeros_like(rewards)
    return (rewards - rewards.mean()) * (len(rewards) / (len(rewards) - 1))


def batch_normalised(rewards: Sequence[Tensor], epsilon: float = 1e-6, group_baseline: bool = True) -> list[Tensor]:
    r"""Rewards centred within their group, then standardised over the whole batch.

    .. math:: A'_{g,i} = r_{g,i} - \mathrm{mean}(r_g), \qquad
              A_{g,i} = \frac{A'_{g,i} - \mathrm{mean}(A')}{\mathrm{std}(A') + \epsilon}

    One divisor for all groups: its dependence on any one reward vanishes as the batch grows, where GRPO's does not.
    Without ``group_baseline`` the first step is left out (:math:`A' = r`), which also works with groups of one.

    Source: REINFORCE++ with baseline (and without: REINFORCE++), Hu et al. 2025 (arXiv:2501.03262).

    Args:
        rewards: Rewards of each group, ``[group]`` each.
        epsilon: Added to the standard deviation, > 0.
        group_baseline: Subtract the group's mean first.

    Returns:
        Advantages of each group, shaped as ``rewards``. All zero where every centred reward of the batch is equal.
    """
    centred = [dr_grpo(group) if group_baseline else group for group in rewards]
    flat = torch.cat(centred)
    if _all_equal(flat):
        return [torch.zeros_like(group) for group in rewards]
    mean, std = flat.mean(), flat.std() + epsilon
    return [(group - mean) / std for group in centred]


@dataclass(frozen=True, slots=True)
class GRPO:
    """:func:`grpo` as an :class:`AdvantageFn`."""

    epsilon: float = 1e-6
    needs_batch: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _check_epsilon(self.epsilon)

    def __call__(self, rewards: Sequence[Sequence[float]]) -> Nested:
        """Advantages of ``rewards[group][sample]``."""
        return _by_group(lambda group: grpo(group, self.epsilon), rewards)


@dataclass(frozen=True, slots=True)
class DrGRPO:
    """:func:`dr_grpo` as an :class:`AdvantageFn`."""

    needs_batch: ClassVar[bool] = False

    def __call__(self, rewards: Sequence[Sequence[float]]) -> Nested:
        """Advantages of ``rewards[group][sample]``."""
        return _by_group(dr_grpo, rewards)


@dataclass(frozen=True, slots=True)
class RLOO:
    """:func:`rloo` as an :class:`AdvantageFn`."""

    needs_batch: ClassVar[bool] = False

    def __call__(self, rewards: Sequence[Sequence[float]]) -> Nested:
        """Advantages of ``rewards[group][sample]``."""
        return _by_group(rloo, rewards)


@dataclass(frozen=True, slots=True)
class BatchNormalised:
    """:func:`batch_normalised` as an :class:`AdvantageFn`; it needs the whole batch."""

    epsilon: float = 1e-6
    group_baseline: bool = True
    needs_batch: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _check_epsilon(self.epsilon)

    def __call__(self, rewards: Sequence[Sequence[float]]) -> Nested:
        """Advantages of ``rewards[group][sample]``."""
        if not rewards:
            return ()
        return _as_floats(batch_normalised([_tensor(group) for group in rewards], self.epsilon, self.group_baseline))


def _check_epsilon(epsilon: float) -> None:
    if not (epsilon > 0 and math.isfinite(epsilon)):
        raise ValueError(f"epsilon={epsilon!r}: give a small positive number, for example 1e-6")


def _all_equal(rewards: Tensor) -> bool:
    # Checked, not left to the subtraction: rounding would turn "no signal" into a tiny one, and dividing inflate it.
    return len(rewards) < 2 or bool((rewards == rewards[0]).all())


def _tensor(rewards: Sequence[float]) -> Tensor:
    return torch.tensor(rewards, dtype=torch.float64)


def _by_group(function: Callable[[Tensor], Tensor], rewards: Sequence[Sequence[float]]) -> Nested:
    return _as_floats([function(_tensor(group)) for group in rewards])


def _as_floats(advantages: Sequence[Tensor]) -> Nested:
    return tuple(tuple(float(value) for value in group.tolist()) for group in advantages)
