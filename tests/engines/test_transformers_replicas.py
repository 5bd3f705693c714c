"""Several transformers engines in one process: ``engine=transformers engine.replicas=N``."""

from __future__ import annotations

import asyncio

import torch

from async_rl.engines.base import GenerationRequest, SamplingParams
from async_rl.engines.replicas import replica_arguments
from async_rl.engines.transformers import TransformersEngine
from async_rl.weights.shared_memory import SharedMemoryPublisher


def test_replicas_start_at_once_and_sample_the_same_from_the_same_weights(tiny_model_dir):
    from transformers import AutoModelForCausalLM

    arguments = {"model": str(tiny_model_dir), "dtype": "float32", "threads": 1}
    engines = [TransformersEngine(**one) for one in replica_arguments("transformers", arguments, 4, range(2))]
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32)
    publisher = SharedMemoryPublisher(torch.float32)
    request = GenerationRequest("r", (5, 6, 7), SamplingParams(max_tokens=8), seed=3)

    async def run():
        try:
            await asyncio.gather(*(engine.start() for engine in engines))
            source = publisher.publish(model.named_parameters(), 0)
            for engine in engines:
                await engine.load_weights(0, source)
            return await asyncio.gather(*(engine.generate(request) for engine in engines))
        finally:
            await asyncio.gather(*(engine.close() for engine in engines))
            publisher.close()

    assert [engine.name for engine in engines] == [f"transformers-{i}" for i in range(4)]
    first, *others = asyncio.run(run())
    assert first.token_ids
    assert all(other.token_ids == first.token_ids for other in others)
