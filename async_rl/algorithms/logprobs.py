"""Log-probabilities of chosen tokens from logits, with little memory: no float32 copy of the logits is ever whole."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

_CHUNK_ELEMENTS = {"cpu": 1 << 20}  # what fits a core's cache; elsewhere large enough to keep the device busy
_CHUNK_ELEMENTS_ELSEWHERE = 1 << 27


def token_logprobs(logits: Tensor, rows: Tensor, targets: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    r"""Log-probabilities of targets, and the entropy of every distribution.

    .. math:: \log p_i = \frac{z_{row_i, target_i}}{T} - \log \sum_k e^{z_{row_i, k} / T}, \qquad
              H_r = -\sum_k p_{r,k} \log p_{r,k}

    Several targets may share a row: a prompt's last position predicts the first token of all of its samples.
    Sums are taken in float32 whatever the type of the logits. The gradient flows through the log-probabilities only.

    Args:
        logits: ``[positions, vocabulary]``.
        rows: Which distribution each target is scored under, ``[tokens]``, in ``[0, positions)``.
        targets: Token ids, ``[tokens]``.
        temperature: :math:`T` > 0; the distribution sampled from has the logits divided by it.

    Returns:
        Log-probabilities, float32 ``[tokens]``, and entropies in nats, float32 ``[positions]`` without gradient.
    """
    logprobs, entropy = _TokenLogprobs.apply(logits, rows, targets, temperature)  # type: ignore[no-untyped-call]
    return logprobs, entropy


class _TokenLogprobs(Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, rows: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        log_total = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
        entropy = torch.empty_like(log_total)
        for chunk in _chunks(logits):
            scaled = logits[chunk].float() / temperature
            log_total[chunk] = scaled.logsumexp(-1)
            # H = log Z - E[z]; a probability of 0 must not meet a logit of -inf.
            expected = torch.softmax(scaled, -1).mul_(scaled.clamp_(min=torch.finfo(torch.float32).min)).sum(-1)
            entropy[chunk] = log_total[chunk] - expected
        ctx.save_for_backward(logits, rows, targets, log_total)
        ctx.temperature = temperature
        ctx.mark_non_differentiable(entropy)
        return logits[rows, targets].float() / temperature - log_total[rows], entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, None, None, None]:
        logits, rows, targets, log_total = ctx.saved_tensors
        grad = grad.float() / ctx.temperature
        row_grad = torch.zeros_like(log_total).index_add_(0, rows, grad)
        order = rows.argsort()
        sorted_rows, sorted_targets, sorted_grad = rows[order], targets[order], grad[order]
        logits_grad = torch.empty_like(logits)
        for chunk in _chunks(logits):
            # d log p_i / d z_k = [k = target_i] - p_k
            part = (logits[chunk].float() / ctx.temperature - log_total[chunk, None]).exp_()
            part.mul_(-row_grad[chunk, None])
            first, last = torch.searchsorted(sorted_rows, sorted_rows.new_tensor([chunk.start, chunk.stop])).tolist()
            index = (sorted_rows[first:last] - chunk.start, sorted_targets[first:last])
            logits_grad[chunk] = part.index_put_(index, sorted_grad[first:last], accumulate=True)
        return logits_grad, None, None, None


def _chunks(logits: Tensor) -> list[slice]:
    elements = _CHUNK_ELEMENTS.get(logits.device.type, _CHUNK_ELEMENTS_ELSEWHERE)
    rows = max(1, elements // max(logits.shape[-1], 1))
    return [slice(start, min(start + rows, len(logits))) for start in range(0, len(logits), rows)]
