"""Which precision trains fastest on this machine: on a CPU that is measured, everywhere else it is bfloat16.

Autocast to bfloat16 pays on a CPU with matrix units for it (AMX); on one that has only instructions it was half as fast
as float32, and on one with neither (AVX2) several times slower (``scripts/bench_precision.py``).
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

AUTO = "auto"
BFLOAT16, FLOAT32 = "bf16-mixed", "32-true"

# Where it is about as fast, float32 is the better choice: it is exact, and nothing has to be cast.
_LEAST_GAIN = 1.3
_REPEATS = 5


def resolve_precision(precision: str, accelerator: str, seconds: Callable[[torch.dtype], float] | None = None) -> str:
    """``precision``, or what ``"auto"`` stands for here.

    Args:
        precision: As Lightning names it, or ``"auto"``.
        accelerator: As Lightning names it.
        seconds: How long a training step's products take in a dtype; default: they are done and timed, in about 0.1 s
            (a second where there is nothing for bfloat16).

    Returns:
        ``"bf16-mixed"`` or ``"32-true"`` for ``"auto"``.
    """
    if precision != AUTO:
        return precision
    if accelerator != "cpu" and (accelerator != "auto" or torch.accelerator.is_available()):
        return BFLOAT16
    seconds = seconds or _Products()
    taken = [(seconds(torch.float32), seconds(torch.bfloat16)) for _ in range(_REPEATS)]
    float32_s, bfloat16_s = map(min, zip(*taken, strict=True))  # the least is what the machine can do undisturbed
    return BFLOAT16 if _LEAST_GAIN * bfloat16_s <= float32_s else FLOAT32


class _Products:
    """The matrix products of one linear layer, forward and backward, for 128 tokens of a small model."""

    def __init__(self) -> None:
        self._operands = {
            dtype: (
                torch.ones(128, 576, dtype=dtype),
                torch.ones(1536, 576, dtype=dtype),
                torch.ones(128, 1536, dtype=dtype),
            )
            for dtype in (torch.float32, torch.bfloat16)
        }
        for dtype in self._operands:
            self(dtype)  # the first call of a kernel is slow

    def __call__(self, dtype: torch.dtype) -> float:
        inputs, weight, gradient = self._operands[dtype]
        began_s = time.perf_counter()
        inputs @ weight.T
        gradient @ weight
        gradient.T @ inputs
        return time.perf_counter() - began_s
