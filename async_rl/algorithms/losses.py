"""The policy loss: a clipped surrogate of three policies, with the off-policy correction capped and measured.

Everything here works on flat token tensors: one entry per trainable token of a batch or of a micro-batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

Correction = Literal["truncate", "mask", "none"]
Normalise = Literal["token", "sequence", "constant"]

MAX_LOG_RATIO = 20.0
"""Log ratios are clamped to ± this before the exponential, so that float32 sums and squares stay finite."""


class PolicyLoss(Protocol):
    """What the policy module needs of a loss: how tokens are weighted in the batch, and the loss of some of them."""

    @property
    def corrects_off_policy(self) -> bool:
        """False where tokens of an older version are trained as if the current policy had sampled them."""
        ...

    @property
    def skips_zero_advantage(self) -> bool:
        """True where a token of advantage 0 adds nothing to the gradient, so that it needs no forward pass."""
        ...

    @property
    def cap(self) -> float:
        """Largest importance weight, for the share of capped tokens in the metrics."""
        ...

    def token_weights(self, lengths: Tensor) -> Tensor:
        """Weight of each token of each sequence, ``[sequences]``: a function of that sequence's trainable length alone.

        So that some sequences can be trained while others of the batch are still being generated.
        """
        ...

    def normaliser(self, lengths: Tensor) -> float:
        """What the sum over the *whole* batch, with these trainable lengths, is divided by, > 0."""
        ...

    def __call__(
        self, current: Tensor, proximal: Tensor, behaviour: Tensor, advantages: Tensor, weights: Tensor
    ) -> Tensor:
        """Loss of some tokens, a scalar; the batch's loss is the sum over its micro-batches over the normaliser."""
        ...


def behaviour_ratio(proximal: Tensor, behaviour: Tensor) -> Tensor:
    r"""Importance ratio :math:`\pi_{prox}(t) / \pi_{behav}(t)` of each token, before any cap.

    A token whose behaviour log-probability is NaN or infinite gets ratio 1: it is trained as if it were on-policy.

    Args:
        proximal: Log-probabilities at the start of the step, ``[tokens]``, without gradient.
        behaviour: Log-probabilities under the version that sampled each token, ``[tokens]``; NaN where unknown.

    Returns:
        Ratios, ``[tokens]``, in ``[exp(-20), exp(20)]``.
    """
    log_ratio = torch.where(torch.isfinite(behaviour), proximal - behaviour, 0.0)
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def importance_weight(ratio: Tensor, correction: Correction, cap: float) -> Tensor:
    r"""Importance weight from the raw ratio.

    .. math:: w = \min(r, c) \;\text{(truncate)}, \qquad w = r \cdot [r \le c] \;\text{(mask)}, \qquad
              w = 1 \;\text{(none)}

    Truncation keeps every token at the price of a bias: truncated importance sampling, Ionides 2008; the
    :math:`\bar\rho` of IMPALA, Espeholt et al. 2018 (arXiv:1802.01561). Masking drops the tokens above the cap, as
    AReaL does (Fu et al. 2025, arXiv:2505.24298).

    Args:
        ratio: From :func:`behaviour_ratio`, ``[tokens]``.
        correction: ``"truncate"``, ``"mask"`` or ``"none"``.
        cap: :math:`c`, >= 1.

    Returns:
        Weights, ``[tokens]``.
    """
    if correction == "truncate":
        return ratio.clamp(max=cap)
    if correction == "mask":
        return torch.where(ratio <= cap, ratio, 0.0)
    return torch.ones_like(ratio)


def clipped_surrogate(
    current: Tensor, proximal: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> Tensor:
    r"""PPO's pessimistic objective of each token, to be maximised.

    .. math:: u = \pi_\theta / \pi_{prox}, \qquad
              \min\left(u A,\; \mathrm{clip}(u, 1 - \epsilon_{low}, 1 + \epsilon_{high}) A\right)

    Source: Schulman et al. 2017 (arXiv:1707.06347), equation 7; two clip ranges: DAPO, Yu et al. 2025
    (arXiv:2503.14476), "clip-higher".

    Args:
        current: Log-probabilities with gradient, ``[tokens]``.
        proximal: Log-probabilities at the start of the step, ``[tokens]``, without gradient.
        advantages: ``[tokens]``.
        clip_low: :math:`\epsilon_{low}` in ``[0, 1]``.
        clip_high: :math:`\epsilon_{high}` >= 0.

    Returns:
        Objective of each token, ``[tokens]``.
    """
    ratio = (current - proximal).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return torch.minimum(ratio * advantages, clipped * advantages)


def token_weights(lengths: Tensor, normalise: Normalise, constant: int) -> Tensor:
    r"""What one token of each sequence counts, before the batch's sum is divided by :func:`normaliser`.

    With :math:`n_i` trainable tokens in sequence :math:`i`:

    .. math:: 1 \;\text{(token)}, \qquad \frac{1}{n_i} \;\text{(sequence)}, \qquad
              \frac{1}{L} \;\text{(constant } L \text{)}

    No weight depends on another sequence: cutting the batch anywhere doesn't change the gradient.

    Source: token: DAPO, Yu et al. 2025 (arXiv:2503.14476), token-level loss; sequence: GRPO, Shao et al. 2024
    (arXiv:2402.03300), equation 3; constant: Dr. GRPO, Liu et al. 2025 (arXiv:2503.20783).

    Args:
        lengths: Trainable tokens of each sequence, ``[sequences]``.
        normalise: ``"token"``, ``"sequence"`` or ``"constant"``.
        constant: :math:`L` in tokens, used by ``"constant"`` only.

    Returns:
        Weights, float32 ``[sequences]``; 0 where a sequence has no trainable token.
    """
    counts = lengths.to(torch.float32)
    if normalise == "token":
        weights = torch.ones_like(counts)
    elif normalise == "sequence":
        weights = 1.0 / counts.clamp(min=1.0)
    else:
        weights = torch.full_like(counts, 1.0 / constant)
    return torch.where(counts > 0, weights, 0.0)


def normaliser(lengths: Tensor, normalise: Normalise) -> float:
    r"""What the weighted sum over the whole batch is divided by.

    .. math:: \sum_j n_j \;\text{(token)}, \qquad N \;\text{(sequence, constant)}

    with :math:`n_j` trainable tokens in sequence :math:`j` and :math:`N` sequences that have any. Masked tokens are in
    no length, so they leave numerator and denominator.

    Args:
        lengths: Trainable tokens of each sequence of the batch, ``[sequences]``.
        normalise: ``"token"``, ``"sequence"`` or ``"constant"``.

    Returns:
        A number >= 1.
    """
    return max(float(lengths.sum() if normalise == "token" else (lengths > 0).sum()), 1.0)


@dataclass(frozen=True, slots=True)
class DecoupledPPOLoss:
    r"""Decoupled clipped surrogate: corrects for the behaviour policy, keeps close to the proximal one.

    .. math:: L = -\frac{1}{Z} \sum_t \omega_t \, w_t
              \min\left(u_t A_t,\; \mathrm{clip}(u_t, 1 - \epsilon_{low}, 1 + \epsilon_{high}) A_t\right), \qquad
              u_t = \frac{\pi_\theta}{\pi_{prox}}, \quad r_t = \frac{\pi_{prox}}{\pi_{behav}}

    with :math:`w_t` from :func:`importance_weight` of :math:`r_t`, :math:`\omega_t` from :func:`token_weights` and
    :math:`Z` from :func:`normaliser`.
    With one update per batch the proximal policy is the current one, detached: :math:`u_t = 1` in value, nothing is
    clipped, and the gradient is the importance-weighted policy gradient.

    Source: AReaL, Fu et al. 2025 (arXiv:2505.24298), equation 5; after Hilton et al. 2022 (arXiv:2110.00641). There
    is no KL term.

    Attributes:
        clip_low: :math:`\epsilon_{low}` in ``[0, 1]``.
        clip_high: :math:`\epsilon_{high}` >= 0.
        correction: What a ratio above the cap becomes: ``"truncate"`` (the cap), ``"mask"`` (0); ``"none"``: every
            weight is 1, which is right for on-policy data only.
        cap: Largest importance weight, >= 1.
        normalise: ``"token"``, ``"sequence"`` or ``"constant"``.
        constant: Tokens by which ``"constant"`` divides, >= 1; usually the sampling's ``max_tokens``. 0 otherwise.

    Raises:
        ValueError: a value is out of range.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    correction: Correction = "truncate"
    cap: float = 5.0
    normalise: Normalise = "token"
    constant: int = 0

    def __post_init__(self) -> None:
        if not 0.0 <= self.clip_low <= 1.0:
            raise ValueError(f"clip_low={self.clip_low!r}: give a number in [0, 1], for example 0.2")
        if not (self.clip_high >= 0.0 and math.isfinite(self.clip_high)):
            raise ValueError(f"clip_high={self.clip_high!r}: give a number >= 0, for example 0.2")
        if self.correction not in ("truncate", "mask", "none"):
            raise ValueError(f'correction={self.correction!r}: give "truncate", "mask" or "none"')
        if not (self.cap >= 1.0 and math.isfinite(self.cap)):
            raise ValueError(f"cap={self.cap!r}: give a number >= 1, for example 5.0")
        if self.normalise not in ("token", "sequence", "constant"):
            raise ValueError(f'normalise={self.normalise!r}: give "token", "sequence" or "constant"')
        if self.normalise == "constant" and self.constant < 1:
            raise ValueError(f'constant={self.constant!r}: normalise="constant" needs tokens >= 1, e.g. max_tokens')
        if self.normalise != "constant" and self.constant != 0:
            raise ValueError(f'constant={self.constant!r} is used by normalise="constant" only: leave it out')

    @property
    def corrects_off_policy(self) -> bool:
        """Whether tokens of older versions are importance-weighted."""
        return self.correction != "none"

    @property
    def skips_zero_advantage(self) -> bool:
        """True: there is no term without the advantage as a factor."""
        return True

    def token_weights(self, lengths: Tensor) -> Tensor:
        """:func:`token_weights` of sequences with trainable ``lengths`` (``[sequences]``)."""
        return token_weights(lengths, self.normalise, self.constant)

    def normaliser(self, lengths: Tensor) -> float:
        """:func:`normaliser` of the batch with trainable ``lengths`` (``[sequences]``)."""
        return normaliser(lengths, self.normalise)

    def __call__(
        self, current: Tensor, proximal: Tensor, behaviour: Tensor, advantages: Tensor, weights: Tensor
    ) -> Tensor:
        """Loss of some tokens of the batch.

        Args:
            current: Log-probabilities now, with gradient, ``[tokens]``.
            proximal: Log-probabilities at the start of the step, without gradient, ``[tokens]``.
            behaviour: Log-probabilities under the sampling version, ``[tokens]``; NaN where unknown.
            advantages: ``[tokens]``.
            weights: From :meth:`token_weights`, ``[tokens]``.

        Returns:
            Scalar; the batch's loss is the sum over its micro-batches, divided by :meth:`normaliser`.
        """
        ratio = behaviour_ratio(proximal, behaviour)
        weight = importance_weight(ratio, self.correction, self.cap)
        surrogate = clipped_surrogate(current, proximal, advantages, self.clip_low, self.clip_high)
        return -(weights * weight * surrogate).sum()


def importance_metrics(proximal: Tensor, behaviour: Tensor, ages: Tensor, cap: float) -> dict[str, float]:
    r"""How far the batch is from on-policy, measured on the raw ratios, before any cap.

    The effective sample size is Kish's, as a share of the tokens: :math:`(\sum r)^2 / (n \sum r^2)`, in (0, 1]
    (Kish 1965, Survey Sampling).

    Args:
        proximal: Log-probabilities at the start of the step, ``[tokens]``.
        behaviour: Log-probabilities under the sampling version, ``[tokens]``; NaN where unknown.
        ages: Version being trained minus the token's version, ``[tokens]``; negative where it has no stamp.
        cap: Where a ratio counts as capped.

    Returns:
        ``ratio/min``, ``ratio/mean``, ``ratio/max``, ``ratio/ess``, ``ratio/capped`` (share of tokens),
        ``ratio/unknown`` (tokens without a behaviour log-probability, which count with ratio 1) and, where the batch
        has tokens of age 0, ``ratio/mismatch_age0``: mean absolute difference of trainer's and engine's
        log-probabilities for the same weights.
    """
    if len(proximal) == 0:
        return {}
    known = torch.isfinite(behaviour)
    ratio = behaviour_ratio(proximal, behaviour).double()
    metrics = {
        "ratio/min": float(ratio.min()),
        "ratio/mean": float(ratio.mean()),
        "ratio/max": float(ratio.max()),
        "ratio/ess": float(ratio.sum() ** 2 / (len(ratio) * (ratio**2).sum())),
        "ratio/capped": float((ratio > cap).double().mean()),
        "ratio/unknown": float((~known).sum()),
    }
    fresh = known & (ages == 0)
    if bool(fresh.any()):
        metrics["ratio/mismatch_age0"] = float((proximal[fresh] - behaviour[fresh]).abs().mean())
    return metrics
