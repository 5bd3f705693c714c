"""Small models and batches that the tests of the policy share."""

import random

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from async_rl.types import Batch, Group, Prompt, Segment, Trajectory


def tiny_llama(seed=0, **overrides):
    torch.manual_seed(seed)
    sizes = dict(
        vocab_size=31,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        initializer_range=0.3,  # far from uniform, so that a wrong mask or position shows
    )
    return LlamaForCausalLM(LlamaConfig(**(sizes | overrides))).float()


def trajectory(prompt, completion, *, index=0, version=0, reward=0.0, logprobs=None, mask=None):
    start, end = len(prompt), len(prompt) + len(completion)
    return Trajectory(
        sample_index=index,
        attempt=0,
        token_ids=[*prompt, *completion],
        loss_mask=[0] * start + (mask or [1] * len(completion)),
        logprobs=[0.0] * start + (logprobs or [-2.0] * len(completion)),
        segments=(Segment(version, start, end),),
        prompt_length=start,
        reward=reward,
    )


def make_batch(groups=3, samples=4, *, version=0, max_staleness=0, seed=0, sampled_by=None):
    """Groups with prompts that begin alike and completions of 1 to 6 tokens."""
    rng = random.Random(seed)
    made, advantages = [], []
    for g in range(groups):
        prompt = [1, 2, 3, *(rng.randrange(31) for _ in range(rng.randint(2, 5)))]
        trajectories = [
            trajectory(
                prompt,
                completion := [rng.randrange(31) for _ in range(rng.randint(1, 6))],
                index=i,
                version=version if sampled_by is None else sampled_by,
                reward=float(rng.random() < 0.5),
                logprobs=[rng.uniform(-4, -1) for _ in completion],
            )
            for i in range(samples)
        ]
        made.append(Group(g, Prompt(f"test/0/{g}", "test", {}), version, tuple(trajectories)))
        advantages.append(tuple(rng.uniform(-1, 1) for _ in trajectories))
    return Batch(version, tuple(made), tuple(advantages), max_staleness)
