"""token_logprobs against log_softmax and autograd, in one piece and in chunks."""

import math

import pytest
import torch

from async_rl.algorithms import logprobs as module
from async_rl.algorithms.logprobs import token_logprobs


def reference(logits, rows, targets, temperature):
    scaled = torch.log_softmax(logits.float() / temperature, -1)
    return scaled[rows, targets], -(scaled.exp() * scaled).sum(-1)


def example(dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    logits = (3 * torch.randn(9, 13, generator=generator)).to(dtype)
    rows = torch.tensor([8, 0, 0, 0, 3, 5, 4, 0, 8])  # unsorted, several targets per row, rows 1, 2, 6, 7 unused
    targets = torch.tensor([1, 5, 5, 2, 12, 0, 7, 5, 3])
    return logits, rows, targets, torch.randn(9, generator=generator)


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.5])
@pytest.mark.parametrize("chunk_elements", [13, 40, 1 << 20])
def test_equals_log_softmax_and_its_gradient(monkeypatch, temperature, chunk_elements):
    monkeypatch.setitem(module._CHUNK_ELEMENTS, "cpu", chunk_elements)
    logits, rows, targets, weights = example()
    ours, plain = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    got, entropy = token_logprobs(ours, rows, targets, temperature)
    want, want_entropy = reference(plain, rows, targets, temperature)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(entropy, want_entropy)
    assert not entropy.requires_grad
    (got * weights).sum().backward()
    (want * weights).sum().backward()
    torch.testing.assert_close(ours.grad, plain.grad)


def test_bfloat16_logits_are_summed_in_float32():
    logits, rows, targets, weights = example(torch.bfloat16)
    ours, plain = logits.clone().requires_grad_(), logits.float().requires_grad_()
    got, _ = token_logprobs(ours, rows, targets)
    want, _ = reference(plain, rows, targets, 1.0)
    torch.testing.assert_close(got, want)
    (got * weights).sum().backward()
    (want * weights).sum().backward()
    assert ours.grad.dtype == torch.bfloat16
    torch.testing.assert_close(ours.grad.float(), plain.grad, rtol=2**-8, atol=1e-6)


def test_a_forbidden_token_is_no_nan():
    logits = torch.tensor([[0.0, 0.0, -math.inf]], requires_grad=True)
    got, entropy = token_logprobs(logits, torch.tensor([0]), torch.tensor([1]))
    assert got.item() == pytest.approx(-math.log(2))
    assert entropy.item() == pytest.approx(math.log(2))
    got.sum().backward()
    assert torch.isfinite(logits.grad).all()


def test_no_tokens():
    got, entropy = token_logprobs(
        torch.zeros(0, 5, requires_grad=True), torch.tensor([], dtype=int), torch.tensor([], dtype=int)
    )
    assert got.shape == (0,)
    assert entropy.shape == (0,)
    got.sum().backward()
