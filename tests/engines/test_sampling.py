"""draw: the distribution tokens come from is the one their log-probabilities describe."""

from __future__ import annotations

import math

import pytest
import torch

from async_rl.engines.base import SamplingParams
from async_rl.engines.sampling import draw

LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -3.0])


def reference(sampling: SamplingParams) -> list[float]:
    """Probabilities by plain Python: temperature, then min_p, then top_k, then top_p."""
    weights = [math.exp(x / sampling.temperature) for x in LOGITS.tolist()]

    def normalised(kept: set[int]) -> list[float]:
        total = sum(weights[i] for i in kept)
        return [weights[i] / total if i in kept else 0.0 for i in range(len(weights))]

    kept = {i for i, w in enumerate(weights) if w >= sampling.min_p * max(weights)}
    if sampling.top_k:
        kept = set(sorted(kept, key=lambda i: -weights[i])[: sampling.top_k])
    probabilities, mass, nucleus = normalised(kept), 0.0, set()
    for i in sorted(kept, key=lambda i: -weights[i]):
        if mass < sampling.top_p:
            nucleus.add(i)
        mass += probabilities[i]
    return normalised(nucleus)


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(),
        SamplingParams(temperature=0.6),
        SamplingParams(temperature=1.5),
        SamplingParams(top_p=0.8),
        SamplingParams(top_k=3),
        SamplingParams(min_p=0.2),
        SamplingParams(temperature=1.3, min_p=0.05, top_k=4, top_p=0.9),
    ],
)
def test_frequencies_and_logprobs_follow_the_filtered_distribution(sampling: SamplingParams) -> None:
    """CASES 20 and 21, against a distribution worked out by hand; uniforms on a grid make the frequencies exact."""
    expected, n = reference(sampling), 2000
    tokens, logprobs = draw(LOGITS.expand(n, -1), sampling, [(i + 0.5) / n for i in range(n)])
    counts = [tokens.count(t) / n for t in range(6)]
    assert counts == pytest.approx(expected, abs=1.5 / n)
    for token, logprob in zip(tokens, logprobs, strict=True):
        assert logprob == pytest.approx(math.log(expected[token]), abs=1e-5)


def test_greedy_takes_the_best_with_its_untempered_logprob() -> None:
    tokens, logprobs = draw(LOGITS[None], SamplingParams(temperature=0.0), [0.99])
    assert tokens == [0]
    assert logprobs == pytest.approx([LOGITS.log_softmax(-1)[0].item()])


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2**-53])
def test_no_token_of_probability_zero_at_either_end(uniform: float) -> None:
    logits = torch.tensor([[-math.inf, 1.0, 2.0, -math.inf], [5.0, 0.0, 5.0, -9.0]])
    tokens, logprobs = draw(logits, SamplingParams(top_k=2), [uniform, uniform])
    assert tokens[0] in (1, 2)
    assert tokens[1] in (0, 2)
    assert all(math.isfinite(p) for p in logprobs)


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_broken_logits_give_nan_logprobs_and_leave_other_rows_alone(temperature: float) -> None:
    """CASES 22: unknown is NaN, never 0."""
    nan, inf = math.nan, math.inf
    logits = torch.tensor([[nan] * 4, [-inf] * 4, [inf, 0.0, 0.0, 0.0], [nan, 1.0, nan, nan], [0.0, 9.0, 0.0, 0.0]])
    tokens, logprobs = draw(logits, SamplingParams(temperature=temperature), [0.5] * 5)
    assert all(0 <= t < 4 for t in tokens)
    assert all(math.isnan(p) for p in logprobs[:3])
    assert (tokens[3], logprobs[3]) == (1, pytest.approx(0.0))
    assert tokens[4] == 1
    assert -0.01 < logprobs[4] < 0
