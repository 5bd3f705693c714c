"""Seconds per weight push into a real vLLM on this machine, and whether the engine then computes what the trainer does.

    python scripts/bench_weights.py --model DIR [--json FILE] [--pushes 10] [--requests 32]

Speed: pushes while requests are running, in bfloat16 and in float32. Parity: in float32, after each of ten random
updates of 0.01 % to 20 % of the weights' spread, every log-probability of more than 200 tokens, and greedy text.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer

from async_rl.engines.base import GenerationRequest, SamplingParams
from async_rl.engines.vllm import VLLMEngine
from async_rl.weights.publishers import make_publisher

UPDATES = (1e-4, 1e-3, 1e-2, 0.05, 0.1, 0.2, 0.2, 0.1, 1e-3, 1e-4)
TEXT = (
    "The quick brown fox jumps over the lazy dog while 12 + 35 = 47 and the rain in Spain stays mainly in the plain. "
)


async def timed_pushes(engine: VLLMEngine, model: torch.nn.Module, prompt: list[int], args) -> list[dict[str, float]]:
    """Push again and again while ``--requests`` requests run; the first push (another path) is left out."""
    publisher = make_publisher(engine.weight_backend, getattr(torch, engine.dtype))
    numbers = itertools.count()

    async def keep_busy() -> None:
        while True:
            seed = next(numbers)
            request = GenerationRequest(f"busy-{seed}", tuple(prompt[:40]), SamplingParams(max_tokens=128), seed)
            await engine.generate(request)

    rows, jobs = [], []
    try:
        for version in range(args.pushes + 1):
            begun_s = time.perf_counter()
            source = publisher.publish(model.named_parameters(), version)
            copied_s = time.perf_counter()
            await engine.load_weights(version, source)
            source.release()
            if version:
                t = engine.last_load
                rows.append(
                    {
                        "copy_s": copied_s - begun_s,
                        "stage_s": t.stage_s,
                        "pause_s": t.pause_s,
                        "load_s": t.load_s,
                        "resume_s": t.resume_s,
                        "paused_s": t.paused_s,
                        "push_s": time.perf_counter() - begun_s,
                    }
                )
            else:
                first_s = engine.last_load.paused_s
                jobs = [asyncio.ensure_future(keep_busy()) for _ in range(args.requests)]
            await asyncio.sleep(1.0)
        for row in rows:
            row["first_paused_s"] = first_s
    finally:
        for job in jobs:
            job.cancel()
        await asyncio.gather(*jobs, return_exceptions=True)
        publisher.close()
    return rows


def reference_logprobs(model: torch.nn.Module, tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits at every position, and the log-probabilities of ``tokens[1:]``, by the Hugging Face model."""
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0].float()
    return logits, logits.log_softmax(-1)[:-1].gather(1, torch.tensor(tokens)[1:, None])[:, 0]


async def parity(engine: VLLMEngine, model: torch.nn.Module, prompt: list[int], first_version: int) -> list[dict]:
    """Ten updates; after each, engine against model over the prompt and a greedy continuation."""
    publisher = make_publisher(engine.weight_backend, torch.float32)
    original = [p.detach().clone() for p in model.parameters()]
    before = reference_logprobs(model, prompt)[1]
    rows = []
    for version, scale in enumerate(UPDATES, start=first_version):
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), original, strict=True):
                parameter.copy_(value + scale * value.std() * torch.randn_like(value))
        source = publisher.publish(model.named_parameters(), version)
        await engine.load_weights(version, source)
        source.release()
        greedy = SamplingParams(max_tokens=64, temperature=0.0)
        generation = await engine.generate(GenerationRequest("greedy", tuple(prompt), greedy, 0))
        tokens = [*prompt, *generation.token_ids]
        scores = torch.tensor(await engine.score(tuple(tokens)))
        logits, reference = reference_logprobs(model, tokens)
        gap = (scores - reference).abs()
        sampled = (torch.tensor(generation.logprobs) - reference[len(prompt) - 1 :]).abs()
        rows.append(
            {
                "update": scale,
                "moved": (reference[: len(before)] - before).abs().mean().item(),
                "tokens": len(gap),
                "mean": gap.mean().item(),
                "max": max(gap.max().item(), sampled.max().item()),
                "greedy_equal": generation.token_ids == logits[len(prompt) - 1 : -1].argmax(-1).tolist(),
            }
        )
    publisher.close()
    return rows


async def run(args: argparse.Namespace) -> dict:
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    prompt = AutoTokenizer.from_pretrained(args.model)(TEXT * 20)["input_ids"][:200]
    pushes, checks = {}, []
    for dtype in ("bfloat16", "float32"):
        engine = VLLMEngine(
            str(args.model), dtype=dtype, max_model_len=512, max_num_seqs=args.requests, log_file=args.log
        )
        try:
            await engine.start()
            pushes[dtype] = await timed_pushes(engine, model, prompt, args)
            if dtype == "float32":
                checks = await parity(engine, model, prompt, args.pushes + 1)
        finally:
            await engine.close()
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "pushes": {d: {k: statistics.median(r[k] for r in rows) for k in rows[0]} for d, rows in pushes.items()},
        "parity": checks,
    }


def show(result: dict) -> None:
    console = Console(width=120)
    table = Table(title=f"One push of {result['parameters'] / 1e6:.0f}M parameters, medians in seconds")
    table.add_column("dtype")
    for name in ("copy", "stage", "pause", "load", "resume", "generation paused", "first load paused", "whole push"):
        table.add_column(name, justify="right")
    for dtype, row in result["pushes"].items():
        keys = ("copy_s", "stage_s", "pause_s", "load_s", "resume_s", "paused_s", "first_paused_s", "push_s")
        table.add_row(dtype, *(f"{row[k]:.3f}" for k in keys))
    console.print(table)
    table = Table(title="float32 engine against the Hugging Face model, after each update")
    for name in ("update / spread", "change from original", "tokens", "mean |d log-prob|", "max", "greedy text equal"):
        table.add_column(name, justify="right")
    for row in result["parity"]:
        values = (
            f"{row['update']:g}",
            f"{row['moved']:.1e}",
            str(row["tokens"]),
            f"{row['mean']:.1e}",
            f"{row['max']:.1e}",
        )
        table.add_row(*values, "yes" if row["greedy_equal"] else "NO")
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="directory of a Hugging Face model")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--pushes", type=int, default=10)
    parser.add_argument("--requests", type=int, default=32, help="requests running meanwhile")
    parser.add_argument("--log", help="file for vLLM's messages")
    args = parser.parse_args()
    torch.manual_seed(0)
    result = asyncio.run(run(args))
    show(result)
    if args.json:
        timings = result["pushes"]["bfloat16"]
        largest = max(row["max"] for row in result["parity"])
        keys = {k: timings[k] for k in ("copy_s", "paused_s", "load_s")}
        args.json.write_text(json.dumps({**keys, "max_abs_dlogprob": largest, **result}, indent=1) + "\n")


if __name__ == "__main__":
    main()
