"""Sampling seeds as a function of what is sampled, so that samples of a group differ and runs repeat."""

from __future__ import annotations

from hashlib import blake2b


def sampling_seed(run_seed: int, prompt_id: str, sample_index: int, attempt: int) -> int:
    """Seed of one attempt at one sample, in ``[0, 2**63)``.

    Args:
        run_seed: The run's seed.
        prompt_id: Stable name of the prompt (it carries the epoch, so another epoch samples anew).
        sample_index: Which of the group's samples.
        attempt: 0 for the first try, +1 for every retry.
    """
    digest = blake2b(f"{run_seed}/{prompt_id}/{sample_index}/{attempt}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
