"""What asynchrony costs a rollout engine: multi-turn rollouts behind a slow tool, a real vLLM, a real training loop.

    python scripts/bench_rollout.py [--json FILE] [--model DIR] [--window-s 70] [--steps N] [--rounds 2]

The task is the calculator environment's: its problems, its tool, and the tool's log-normal latency with a heavy tail.
The tool is called for the model, twice, between three turns of at most ``--max-tokens`` tokens, and the learning rate
is 0: so every run, whatever it serves, samples the same distribution of texts, without a warm-up. Everything else is
done as always: each step is a forward pass, a backward pass and an update over all trajectories (rewards are random,
so that none has advantage 0), its weights are copied, staged and loaded.

Compared are the tokens the engine generates per second: with the bound S and either sampling policy, and ``free``,
the same rollouts at the same concurrency C = B * G, beside the same trainer on the same cores, but with nothing that
asynchrony costs: no bound (``stale_policy=allow``, any number of versions ahead) and no weight load after the first.
``alone`` is ``free`` beside a trainer whose steps do no work: what sharing the cores costs, with or without a bound.
Rollouts wait for the tool most of the time and are the bottleneck, as in agentic use: C of them last longer than a
training step. W has its default: min(S, 2) with ``segment``, S with ``trajectory``.

The runs take turns, in ``--rounds`` rounds, every other one backwards, on one engine per round; within a round all
draw the same tool latencies. A run is measured from the end of its first step to the first end of a step after
``--window-s`` seconds (or ``--steps`` steps), while admission is still open: no start-up, no drain. Figures are
sums over the rounds. Ages are of groups, in versions; in ``free`` they are what nothing held back.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import logging
import random
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer
from typing_extensions import override

from async_rl.callbacks import DrainCallback, RLCallback
from async_rl.causal_lm import load_causal_lm
from async_rl.datamodule import RolloutDataModule
from async_rl.engines.base import Engine, EngineStats, Generation, GenerationRequest, SamplingParams
from async_rl.engines.vllm import VLLMEngine
from async_rl.environments.calculator import Calculator
from async_rl.environments.chat import Chat
from async_rl.models import SMOLLM2, resolve_model
from async_rl.policy import PolicyModule, StepResult
from async_rl.trainer import AsyncRLTrainer
from async_rl.types import Batch, Segment
from async_rl.weights.base import WeightSource

POLICIES = ("segment", "trajectory")
TOOL_CALLS = 2
ENDLESS = 1_000_000  # steps, and versions ahead: more than any window sees


class ScriptedCalls(Calculator):
    """The calculator, its tool called for the model: turns and token counts do not depend on what it has learned."""

    def __init__(self, seed: int, tool_mean_s: float) -> None:
        super().__init__(seed=seed, tool_latency_s=tool_mean_s)
        self._rewards = random.Random(seed)

    @override
    async def rollout(self, prompt: Mapping[str, Any], chat: Chat) -> float:
        await chat.generate(self.messages(prompt))
        for _ in range(TOOL_CALLS):
            result = await self.calculate(prompt["expression"])
            await chat.generate([{"role": "tool", "content": result}])
        return self._rewards.random()


class Lent:
    """A started engine lent to one run: starting and closing it are left to the owner.

    Args:
        engine: The engine.
        frozen: Load nothing after the run's first load. Tokens are stamped with the version that would have been
            loaded, so that the control plane goes on as if it had been.
    """

    def __init__(self, engine: Engine, frozen: bool) -> None:
        self._engine = engine
        self._frozen = frozen
        self._version = -1

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def start(self) -> None:
        """It runs already."""

    async def close(self) -> None:
        """The next run needs it."""

    async def load_weights(self, version: int, source: WeightSource) -> None:
        """Load, or, where it is frozen, say that it was done."""
        if not self._frozen or self._version < 0:
            await self._engine.load_weights(version, source)
        self._version = version

    async def generate(self, request: GenerationRequest) -> Generation:
        """Sample one turn."""
        version = self._version
        generation = await self._engine.generate(request)
        if not self._frozen:
            return generation
        return replace(generation, segments=(Segment(version, 0, len(generation.token_ids)),))


class IdlePolicy(PolicyModule):
    """Counts a step for every batch and computes nothing."""

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.step()  # without gradients, an empty one
        self.last_step = StepResult(True, "trained", {})


@dataclass
class Measured:
    """What was seen in the windows of a setting's runs."""

    seconds: float = 0.0
    steps: int = 0
    engine: EngineStats = field(default_factory=EngineStats)
    ages: list[int] = field(default_factory=list)

    def add(self, other: Measured) -> None:
        """Take in what another run saw."""
        self.seconds += other.seconds
        self.steps += other.steps
        self.engine += other.engine
        self.ages += other.ages

    def figures(self) -> dict[str, float]:
        """Tokens per second, share of time without a request, seconds per load and step, ages."""
        return {
            "tokens_per_s": self.engine.generated_tokens / self.seconds,
            "engine_idle_fraction": max(1.0 - self.engine.busy_s / self.seconds, 0.0),
            "step_s": self.seconds / self.steps,
            "mean_age": sum(self.ages) / len(self.ages),
            "max_age": max(self.ages),
            "pause_s": self.engine.pauses_s / max(self.engine.loads, 1),
        }


class Window(RLCallback):
    """Measures from the end of the first step on and stops the run when it has seen enough.

    Args:
        engine: Whose counters to read.
        seconds: Least length, unless ``steps`` come first.
        steps: Most steps; ``None``: any number.
    """

    def __init__(self, engine: Engine, seconds: float, steps: int | None) -> None:
        self._engine = engine
        self._enough_s = seconds
        self._enough_steps = steps
        self._began: tuple[float, EngineStats] | None = None
        self.measured = Measured()

    @override
    def on_batch_planned(self, trainer: AsyncRLTrainer, policy: Any, batch: Batch) -> None:
        if self._began is not None:
            self.measured.ages += batch.ages()

    @override
    def on_train_batch_end(self, trainer: AsyncRLTrainer, *_: Any) -> None:
        now_s, now = time.monotonic(), self._engine.stats()
        if self._began is None:
            self._began = now_s, now
            return
        began_s, before = self._began
        done = self.measured
        done.steps += 1
        done.seconds = now_s - began_s
        done.engine = EngineStats(
            generated_tokens=now.generated_tokens - before.generated_tokens,
            busy_s=now.busy_s - before.busy_s,
            pauses_s=now.pauses_s - before.pauses_s,
            loads=now.loads - before.loads,
        )
        if done.seconds >= self._enough_s or done.steps == self._enough_steps:
            trainer.stop("measured")


@dataclass(frozen=True)
class Setting:
    """One kind of run; without S, the free-running one."""

    staleness: int | None
    sampling_policy: str = "segment"
    trains: bool = True

    @property
    def name(self) -> str:
        """For people."""
        if self.staleness is not None:
            return f"S={self.staleness} {self.sampling_policy}"
        return "free" if self.trains else "alone"


FREE, ALONE = Setting(None), Setting(None, trains=False)


def run(setting: Setting, engine: Engine, model: Any, tokenizer: Any, seed: int, args: argparse.Namespace) -> Measured:
    """Train until the window is full."""
    free = setting.staleness is None
    window = Window(engine, args.window_s, args.steps)
    with tempfile.TemporaryDirectory() as directory:
        trainer = AsyncRLTrainer(
            max_steps=ENDLESS,
            max_staleness=ENDLESS if free else setting.staleness,
            admit_ahead=ENDLESS if free else None,
            stale_policy="allow" if free else "wait",
            sampling_policy=setting.sampling_policy,
            acknowledge_staleness=free,
            seed=seed,
            run_dir=Path(directory) / "run",
            evaluate_at="never",
            parity_check=False,
            enable_checkpointing=False,
            logger=False,
            enable_progress_bar=False,
            callbacks=[window, DrainCallback(timeout_s=0.0)],
            accelerator="cpu",
            precision="auto",
        )
        policy = (PolicyModule if setting.trains else IdlePolicy)(
            model, tokenizer, optimizer=partial(torch.optim.AdamW, lr=0.0, weight_decay=0.0, fused=True)
        )
        data = RolloutDataModule(
            ScriptedCalls(seed, args.tool_mean_s),
            Lent(engine, frozen=free),
            batch_size=args.batch_size,
            group_size=args.group_size,
            max_concurrent=args.batch_size * args.group_size,
            sampling=SamplingParams(max_tokens=args.max_tokens),
            max_engine_restarts=0,
        )
        trainer.fit(policy, datamodule=data)
    return window.measured


def measure(settings: list[Setting], directory: Path, args: argparse.Namespace) -> dict[Setting, Measured]:
    """All rounds."""
    path = resolve_model(args.model).path
    model, tokenizer = load_causal_lm(path), AutoTokenizer.from_pretrained(path)
    measured = {setting: Measured() for setting in settings}
    for turn in range(args.rounds):
        engine = VLLMEngine(
            str(path),
            max_model_len=512,
            max_num_seqs=args.batch_size * args.group_size,
            log_file=str(directory / "vllm.log"),
        )
        try:
            asyncio.run(engine.start())
            for setting in settings if turn % 2 == 0 else reversed(settings):
                began_s = time.monotonic()
                seen = run(setting, engine, model, tokenizer, turn, args)
                measured[setting].add(seen)
                gc.collect()  # a trainer is a cycle: without this, optimizer states of 1 GB pile up
                print(
                    f"  round {turn + 1}, {setting.name}: {seen.figures()['tokens_per_s']:.1f} tokens/s over "
                    f"{seen.steps} steps in {seen.seconds:.0f} s ({time.monotonic() - began_s:.0f} s in all)",
                    flush=True,
                )
        finally:
            asyncio.run(engine.close())
    return measured


def show(rows: list[dict[str, Any]], free: dict[str, float], title: str) -> None:
    table = Table(title=title)
    for head in ("S", "sampling_policy", "tokens/s", "of free", "engine idle", "step (s)", "mean age", "max age"):
        table.add_column(head, justify="right")
    table.add_column("pause per load (ms)", justify="right")
    unbounded = {"S": "none", "sampling_policy": "free", **free, "free_tokens_per_s": free["tokens_per_s"]}
    for row in [*rows, unbounded]:
        table.add_row(
            str(row["S"]),
            str(row["sampling_policy"]),
            f"{row['tokens_per_s']:.1f}",
            f"{row['tokens_per_s'] / row['free_tokens_per_s']:.0%}",
            f"{row['engine_idle_fraction']:.0%}",
            f"{row['step_s']:.1f}",
            f"{row['mean_age']:.2f}",
            str(row["max_age"]),
            f"{1000 * row['pause_s']:.1f}" if row is not unbounded else "no load",
        )
    Console(width=None if sys.stdout.isatty() else 120).print(table)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--model", default=SMOLLM2, help="directory or name of a model, or 'tiny'")
    parser.add_argument("--window-s", type=float, default=70.0, help="least seconds to measure of each run")
    parser.add_argument("--steps", type=int, help="measure so many steps of each run at most")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 2, 4], help="S")
    parser.add_argument("--sampling-policy", nargs="+", default=POLICIES, choices=POLICIES)
    parser.add_argument("--batch-size", type=int, default=2, help="B, groups per step")
    parser.add_argument("--group-size", type=int, default=4, help="G, samples per group")
    parser.add_argument("--max-tokens", type=int, default=12, help="of each of the three turns")
    parser.add_argument("--tool-mean-s", type=float, default=4.0, help="mean wait for the tool, per call")
    args = parser.parse_args()
    for name in ("steps", "rounds"):
        if (value := getattr(args, name)) is not None and value < 1:
            parser.error(f"--{name} {value}: give at least 1")
    return args


def compare(args: argparse.Namespace) -> None:
    """Measure, show and write."""
    asked_for = [Setting(staleness, policy) for staleness in args.staleness for policy in args.sampling_policy]
    with tempfile.TemporaryDirectory() as directory:
        measured = measure([ALONE, FREE, *asked_for], Path(directory), args)
    free, alone = measured[FREE].figures(), measured[ALONE].figures()
    rows = [
        {
            "S": setting.staleness,
            "sampling_policy": setting.sampling_policy,
            **measured[setting].figures(),
            "free_tokens_per_s": free["tokens_per_s"],
            "alone_tokens_per_s": alone["tokens_per_s"],
        }
        for setting in asked_for
    ]
    show(
        rows,
        free,
        f"B={args.batch_size}, G={args.group_size}, C={args.batch_size * args.group_size}; {TOOL_CALLS} tool calls per "
        f"rollout, log-normal, mean {args.tool_mean_s:g} s, sigma 1",
    )
    print(
        f"The engine with a trainer that does no work: {alone['tokens_per_s']:.1f} tokens/s; beside one that trains, "
        f"running free: {free['tokens_per_s']:.1f} ({free['tokens_per_s'] / alone['tokens_per_s']:.0%})."
    )
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2) + "\n")


def main() -> None:
    args = parse()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    logging.getLogger("async_rl").setLevel(logging.ERROR)  # that a bound is given up is the point of `free`
    compare(args)


if __name__ == "__main__":
    main()
