"""Rollouts of several turns on a real (tiny) model: what is kept is what the model computes over it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from async_rl.engines.base import SamplingParams
from async_rl.engines.transformers import TransformersEngine
from async_rl.environments import Arithmetic, BudgetError, Environment, make_rollout
from async_rl.models import CHAT_TEMPLATE
from async_rl.types import Prompt, RolloutTask, Trajectory


class Source:
    backend = "test"
    version = 0

    def __init__(self, model: Any) -> None:
        self._model = model

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._model.named_parameters()


class Dialogue(Environment):
    name = "dialogue"

    def prompts(self, split: str) -> list[dict[str, Any]]:
        return [{"q": "hello"}]

    async def rollout(self, prompt: Mapping[str, Any], chat: Any) -> float:
        await chat.generate(prompt["q"], max_tokens=5)
        chat.add({"role": "tool", "content": "{'result': 7}"})
        await chat.generate(stop=("e",))
        return float(len(await chat.generate("And now?")))


FORGETFUL = CHAT_TEMPLATE.replace(
    "message['content']", "('...' if message['role'] == 'assistant' and not loop.last else message['content'])"
)


@pytest.mark.parametrize(
    ("environment", "template", "contexts"),
    [(Arithmetic(), CHAT_TEMPLATE, 1), (Dialogue(), CHAT_TEMPLATE, 1), (Dialogue(), FORGETFUL, 3)],
)
def test_behaviour_logprobs_are_those_of_the_whole_context(
    tiny_model_dir: Path, environment: Environment, template: str, contexts: int
) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32).eval()
    with torch.no_grad():
        model.model.norm.weight *= 5.0
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    tokenizer.chat_template = template
    sampling = SamplingParams(max_tokens=12, temperature=0.8)
    rollout = make_rollout({environment.name: environment}, tokenizer, sampling, template_rewrite="split")
    prompt = Prompt("p", environment.name, environment.prompts("train")[0])

    async def go() -> list[Trajectory]:
        engine = TransformersEngine(str(tiny_model_dir), device="cpu")
        await engine.start()
        await engine.load_weights(3, Source(model))  # type: ignore[arg-type]
        try:
            tasks = (RolloutTask(0, prompt, i, 0, seed=i) for i in range(4))
            return list(await asyncio.gather(*(rollout(task, engine) for task in tasks)))
        finally:
            await engine.close()

    trajectories = asyncio.run(go())
    assert len({tuple(t.token_ids) for t in trajectories}) == 4
    for t in trajectories:
        assert len(t.starts) == contexts
        logprobs = []
        for start, stop in pairwise((*t.starts, len(t.token_ids))):
            with torch.no_grad():
                logprobs += (model(torch.tensor([t.token_ids[start:stop]])).logits[0] / 0.8).log_softmax(-1)
        assert sum(t.loss_mask) == sum(s.end - s.start for s in t.segments)
        assert {s.version for s in t.segments} == {3}
        assert len(t.segments) == t.turns
        for at, (token, mask, logprob) in enumerate(zip(t.token_ids, t.loss_mask, t.logprobs, strict=True)):
            if mask:
                assert logprob == pytest.approx(logprobs[at - 1][token].item(), abs=1e-4)
            else:
                assert logprob == 0.0


class Chatter(Environment):
    name = "chatter"

    def prompts(self, split: str) -> list[dict[str, Any]]:
        return [{}]

    async def rollout(self, prompt: Mapping[str, Any], chat: Any) -> float:
        try:
            while True:
                await chat.generate("And then?")
        except BudgetError:
            return float(chat.turns)


def test_a_conversation_may_outgrow_the_engine_without_anybody_having_set_a_limit(tiny_model_dir: Path) -> None:
    model, tokenizer = (kind.from_pretrained(tiny_model_dir) for kind in (AutoModelForCausalLM, AutoTokenizer))
    rollout = make_rollout({"chatter": Chatter()}, tokenizer, SamplingParams(max_tokens=16))

    async def go() -> Trajectory:
        engine = TransformersEngine(str(tiny_model_dir), device="cpu", max_model_len=100)
        await engine.start()
        await engine.load_weights(0, Source(model))  # type: ignore[arg-type]
        try:
            return await rollout(RolloutTask(0, Prompt("p", "chatter", {}), 0, 0, seed=1), engine)
        finally:
            await engine.close()

    trajectory = asyncio.run(go())
    assert trajectory.turns >= 2
    assert 60 < len(trajectory.token_ids) <= 100
