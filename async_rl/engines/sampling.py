"""Draws next tokens from logits, with the log-probability each was drawn with."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from async_rl.engines.base import SamplingParams


@functools.lru_cache(maxsize=64)
def processors(sampling: SamplingParams) -> LogitsProcessorList:
    """Transformers' own warpers for ``sampling``, in vLLM's order: temperature, min_p, top_k, top_p."""
    warpers = LogitsProcessorList()
    if sampling.temperature not in (0.0, 1.0):
        warpers.append(TemperatureLogitsWarper(float(sampling.temperature)))
    if sampling.min_p > 0:
        warpers.append(MinPLogitsWarper(sampling.min_p))
    if sampling.top_k > 0:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    return warpers


def draw(logits: torch.Tensor, sampling: SamplingParams, uniforms: Sequence[float]) -> tuple[list[int], list[float]]:
    """Sample one token per row by inverting the distribution function at that row's uniform number.

    A row depends on its own logits and number only, so a request's randomness does not depend on its neighbours.

    Args:
        logits: ``[rows, vocabulary]``, any float dtype. NaN counts as impossible.
        sampling: How to sample; the same for all rows. Temperature 0 takes the most likely token.
        uniforms: One number in [0, 1) per row.

    Returns:
        Token ids, and log-probabilities under the distribution drawn from (tempered, filtered, renormalised; at
        temperature 0 that of temperature 1), each ``[rows]``. NaN where the logits give no distribution.
    """
    scores = torch.nan_to_num(logits.float(), nan=-math.inf, posinf=math.inf, neginf=-math.inf)
    if sampling.temperature > 0:
        scores = processors(sampling)(None, scores)
    logprobs = scores.log_softmax(-1)
    if sampling.temperature > 0:
        distribution = logprobs.double().exp().nan_to_num(0.0).cumsum(-1)
        # Below 1 by more than rounding, so that the product stays below the last step and never falls on a token of
        # probability 0.
        at = torch.tensor(uniforms, dtype=torch.float64, device=logits.device).clamp(max=1 - 1e-12)
        tokens = torch.searchsorted(distribution, (at * distribution[:, -1])[:, None], right=True)
        tokens = tokens.clamp(max=logits.shape[-1] - 1)
    else:
        tokens = scores.argmax(-1, keepdim=True)
    chosen = logprobs.gather(-1, tokens).squeeze(-1)
    return tokens.squeeze(-1).tolist(), [p if math.isfinite(p) else math.nan for p in chosen.tolist()]
