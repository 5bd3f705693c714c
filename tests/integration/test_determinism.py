"""S = 0 with a deterministic engine: the same seed gives the same losses, bit for bit, and those of a plain loop."""

import asyncio

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from async_rl.datamodule import RolloutDataModule
from async_rl.engines.base import GenerationRequest, SamplingParams
from async_rl.engines.transformers import TransformersEngine
from async_rl.environments.arithmetic import Arithmetic
from async_rl.environments.chat import turn_seed
from async_rl.orchestrator.prompts import PromptStream
from async_rl.orchestrator.seeds import sampling_seed
from async_rl.policy import PolicyModule
from async_rl.trainer import AsyncRLTrainer
from async_rl.weights.shared_memory import SharedMemoryPublisher


class OddLength(Arithmetic):
    """A reward that a random model gets sometimes."""

    def reward(self, prompt, completion):
        return float(len(completion) % 2)


def losses(model_dir, run_dir, seed):
    torch.manual_seed(0)
    seen = []
    policy = PolicyModule(model_dir, optimizer=lambda p: torch.optim.AdamW(p, lr=1e-3))
    data = RolloutDataModule(
        OddLength(),
        TransformersEngine(str(model_dir), deterministic=True, dtype="float32", threads=1),
        batch_size=2,
        group_size=4,
        sampling=SamplingParams(max_tokens=6),
    )
    trainer = AsyncRLTrainer(
        max_steps=3, max_staleness=0, seed=seed, run_dir=run_dir, evaluate_at="never", logger=False, accelerator="cpu",
        enable_progress_bar=False,
        enable_checkpointing=False,
    )  # fmt: skip
    original = policy.training_step

    def training_step(batch, batch_idx):
        original(batch, batch_idx)
        seen.append((policy.last_step.metrics["train/loss"], policy.last_step.metrics["train/grad_norm"]))

    policy.training_step = training_step
    trainer.fit(policy, datamodule=data)
    return seen


def test_two_runs_with_one_seed_give_the_same_losses(tiny_model_dir, tmp_path):
    first = losses(tiny_model_dir, tmp_path / "a", seed=3)
    assert len(first) == 3
    assert any(norm > 0 for _, norm in first)
    assert losses(tiny_model_dir, tmp_path / "b", seed=3) == first
    assert losses(tiny_model_dir, tmp_path / "c", seed=4) != first


async def plain_losses(model_dir, seed):
    """The synchronous loop as one would write it without us: sample, score, advantage, loss, AdamW.

    What is sampled is a function of the seed, so the order of the prompts and the seeds of the samples are ours.
    """
    tokenizer, model = AutoTokenizer.from_pretrained(model_dir), AutoModelForCausalLM.from_pretrained(model_dir)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine = TransformersEngine(str(model_dir), deterministic=True, dtype="float32", threads=1)
    environment, publisher, seen = OddLength(), SharedMemoryPublisher(torch.float32), []
    prompts = PromptStream({"arithmetic": environment.prompts("train")}, epochs=None, shuffle=True, seed=seed)
    await engine.start()
    for step in range(3):
        await engine.load_weights(step, publisher.publish(model.named_parameters(), step))
        loss, tokens = torch.zeros(()), 0
        for prompt in (prompts.at(2 * step), prompts.at(2 * step + 1)):
            text = tokenizer.apply_chat_template(
                environment.messages(prompt.data), add_generation_prompt=True, tokenize=False
            )
            context = tokenizer.encode(text, add_special_tokens=False)
            answers = []
            for sample in range(4):
                own_seed = turn_seed(sampling_seed(seed, prompt.id, sample, 0), 0)
                request = GenerationRequest("", tuple(context), SamplingParams(max_tokens=6), own_seed)
                answers.append((await engine.generate(request)).token_ids)
            texts = tokenizer.batch_decode(answers, skip_special_tokens=True)
            rewards = torch.tensor([environment.reward(prompt.data, text) for text in texts])
            advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
            for answer, advantage in zip(answers, advantages, strict=True):
                logits = model(torch.tensor([context + answer])).logits[0, len(context) - 1 : -1]
                logprobs = logits.log_softmax(-1).gather(1, torch.tensor(answer)[:, None])[:, 0]
                loss = loss - (advantage * (logprobs - logprobs.detach()).exp()).sum()
                tokens += len(answer)
        optimizer.zero_grad()
        (loss / tokens).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        seen.append((loss.item() / tokens, norm.item()))
    await engine.close()
    publisher.close()
    return seen


def test_the_losses_are_those_of_a_plain_synchronous_loop(tiny_model_dir, tmp_path):
    plain = asyncio.run(plain_losses(tiny_model_dir, seed=3))
    assert sum(norm > 0.1 for _, norm in plain) >= 2
    assert max(abs(loss) for loss, _ in plain) > 0.01
    ours = losses(tiny_model_dir, tmp_path, seed=3)
    assert [loss for loss, _ in ours] == pytest.approx([loss for loss, _ in plain], abs=1e-6)
    assert [norm for _, norm in ours] == pytest.approx([norm for _, norm in plain], rel=1e-4)
