"""A run whose scripted model calls a tool and then answers, of a family whose template drops earlier thinking."""

import json
import sys
from pathlib import Path

import torch
from lightning.pytorch import Callback
from repeatable_run import Kill
from transformers import LlamaConfig, LlamaForCausalLM

from async_rl.datamodule import RolloutDataModule
from async_rl.engines.base import SamplingParams
from async_rl.engines.scripted import ScriptedEngine
from async_rl.environments.calculator import Calculator
from async_rl.jsonl_logger import JsonlLogger
from async_rl.policy import PolicyModule
from async_rl.trainer import AsyncRLTrainer

ONCE_MORE = "Are you sure?"
END = "<|im_end|>"
SURE = "<think>\nI looked it up.\n</think>\n\nYes."
UNSURE = "<think>\nToo large.\n</think>\n\nI can't tell."


class AskedAgain(Calculator):
    """Asks once more after the answer: another user's turn, at which Qwen3's template drops the thinking before it."""

    async def rollout(self, prompt, chat):
        reward = await super().rollout(prompt, chat)
        await chat.generate(ONCE_MORE)
        return reward


def environments():
    made = {"calculator": Calculator(train_size=40, name="calculator")}
    return made | {"asked_again": AskedAgain(train_size=40, seed=1, name="asked_again")}


def call_of(expression):
    """The turn that asks for the tool."""
    call = json.dumps({"name": "calculate", "arguments": {"expression": expression}})
    return f"<think>\nI need the tool.\n</think>\n\n<tool_call>\n{call}\n</tool_call>"


def answer_of(result):
    """The turn that answers, where the model believes the tool."""
    return f"<think>\nThe tool says {result}.\n</think>\n\nIt is {result}."


def scripted(tokenizer):
    """An engine that reads what it is shown, and says a call, then an answer (or that it can't tell), then Yes."""
    expressions = {r["question"]: r["expression"] for e in environments().values() for r in e.prompts("train")}

    def say(prompt, seed):
        asked = tokenizer.decode(prompt).rpartition("<|im_start|>user\n")[2].split(END)[0]
        if asked == ONCE_MORE:
            text = SURE
        elif asked.startswith("<tool_response>"):
            text = answer_of(asked.split("\n")[1]) if seed % 2 else UNSURE
        else:
            text = call_of(expressions[asked])
        return tokenizer.encode(text + END, add_special_tokens=False)

    return ScriptedEngine(say, latency_s=0.002)


def write_model(tokenizer, directory):
    """A random Llama of the tokenizer's size, as a Hugging Face directory."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=4096, tie_word_embeddings=True, dtype="float32",
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


class Sequences(Callback):
    """What went through the model in training: token ids and trained places of every sequence, step by step."""

    def __init__(self):
        self.steps = {}

    def on_train_batch_start(self, trainer, policy, batch, batch_idx):
        seen = self.steps[batch.version] = []
        pack = type(policy.scorer).pack

        def packed(sequences):
            listed = list(sequences)
            seen.extend((tuple(s.token_ids), tuple(map(int, s.positions))) for s in listed)
            return pack(policy.scorer, listed)

        policy.scorer.pack = packed


def run(model_dir, run_dir, *callbacks, resume=False):
    """Three steps of four groups (S = 0: in their order), half of them in each environment; returns the engine."""
    policy = PolicyModule(model_dir, optimizer=lambda p: torch.optim.AdamW(p, lr=1e-3))
    engine = scripted(policy.tokenizer)
    trainer = AsyncRLTrainer(
        max_steps=3, max_staleness=0, seed=3, run_dir=run_dir, resume=resume, evaluate_at="never", parity_check=False,
        enable_progress_bar=False, logger=JsonlLogger(Path(run_dir) / "metrics.jsonl"), accelerator="cpu",
        checkpoint_every=1, callbacks=list(callbacks),
    )  # fmt: skip
    data = RolloutDataModule(
        environments(), engine, mixture={"calculator": 1, "asked_again": 1}, batch_size=4, group_size=4, shuffle=False,
        sampling=SamplingParams(max_tokens=200), template_rewrite="split",
    )  # fmt: skip
    trainer.fit(policy, datamodule=data)
    return engine


if __name__ == "__main__":
    torch.set_num_threads(1)
    run(sys.argv[1], sys.argv[2], Kill(1, "step"))
