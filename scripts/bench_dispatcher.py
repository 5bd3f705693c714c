"""Measures the control plane alone: rollouts that only sleep, through the real gate, dispatcher, sink, ledger, planner.

    python scripts/bench_dispatcher.py [--json FILE] [--trajectories N] [--threads N] [--repeats N]

Prints trajectories per second, the share of what C rollouts at once could do at best, and the cost of the control plane
per rollout. S = 2, no filter; the batch is as large as C, so that concurrency is what limits.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from async_rl.orchestrator.garbage import rare_collections
from async_rl.orchestrator.ledger import Ledger
from async_rl.orchestrator.ledger_null import NullLedger
from async_rl.orchestrator.orchestrator import Orchestrator
from async_rl.orchestrator.prompts import PromptStream
from async_rl.orchestrator.settings import OrchestratorSettings
from async_rl.types import RolloutTask, Segment, Trajectory


class SleepingEngine:
    """Serves whatever version it was told last."""

    name = "sleeping"
    versions_alive = 1
    version = -1

    async def load_weights(self, version: int, source: Any) -> None:
        """Loads nothing."""
        self.version = version


class NoWeights:
    """Weights that need no memory."""

    def reserve(self) -> None:
        """Keeps nothing."""

    def release(self) -> None:
        """Frees nothing."""


def make_rollout(sleep_s: float) -> Any:
    async def rollout(task: RolloutTask, engine: SleepingEngine) -> Trajectory:
        began_s = time.time()
        version = engine.version
        await asyncio.sleep(sleep_s)
        return Trajectory(
            sample_index=task.sample_index,
            attempt=task.attempt,
            token_ids=[1, 2, 3, 4],
            loss_mask=[0, 0, 1, 1],
            logprobs=[0.0, 0.0, -0.5, -0.5],
            segments=(Segment(version, 2, 4),),
            prompt_length=2,
            reward=float(task.seed & 1),
            started_s=began_s,
            ended_s=time.time(),
        )

    return rollout


def measure(
    sleep_ms: int, concurrent: int, group_size: int, with_ledger: bool, trajectories: int, threads: int
) -> dict:
    """One row: run until ``trajectories`` are trained and take the time."""
    batch_size = max(concurrent // group_size, 1)
    steps = -(-trajectories // (batch_size * group_size))
    settings = OrchestratorSettings(
        max_steps=steps,
        max_staleness=2,
        admit_ahead=2,
        batch_size=batch_size,
        group_size=group_size,
        max_concurrent=concurrent,
        rollout_threads=threads,
    )
    with tempfile.TemporaryDirectory() as directory:
        ledger = Ledger(Path(directory) / "run.db") if with_ledger else NullLedger()
        orchestrator = Orchestrator(
            settings,
            engines=[SleepingEngine()],
            prompts=PromptStream({"sleep": [{"n": n} for n in range(1000)]}, epochs=None, shuffle=True, seed=0),
            rollout=make_rollout(sleep_ms / 1000),
            advantages=lambda rewards: [[r - sum(g) / len(g) for r in g] for g in rewards],
            ledger=ledger,
        )
        orchestrator.start()
        orchestrator.fleet.publish(0, NoWeights())
        orchestrator.fleet.wait_served(0, lambda: None)
        began_s, cpu_s = time.perf_counter(), time.process_time()
        orchestrator.resume()
        while (batch := orchestrator.next_batch(lambda: None)) is not None:
            orchestrator.events()
            orchestrator.batch_trained(batch)
            orchestrator.fleet.publish(batch.version + 1, NoWeights())
        seconds, cpu_s = time.perf_counter() - began_s, time.process_time() - cpu_s
        left = orchestrator.close(10.0)
        ledger.close()
    if left:
        raise RuntimeError(f"threads that did not stop: {left}")
    done = steps * batch_size * group_size
    return {
        "sleep_ms": sleep_ms,
        "C": concurrent,
        "G": group_size,
        "ledger": with_ledger,
        "trajectories": done,
        "tasks_per_s": done / seconds,
        "ideal_fraction": done / seconds * sleep_ms / 1000 / concurrent if sleep_ms else None,
        "us_per_rollout": cpu_s / done * 1e6,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the rows here")
    parser.add_argument("--trajectories", type=int, default=20_000, help="trajectories per row")
    parser.add_argument("--threads", type=int, default=2, help="rollout threads")
    parser.add_argument(
        "--repeats", type=int, default=5, help="rounds over all rows; a row shows the round in the middle"
    )
    arguments = parser.parse_args()
    settings = list(itertools.product((False, True), (0, 10), (1, 8), (256, 4096)))
    rounds: dict[tuple, list[dict]] = {setting: [] for setting in settings}
    for _, setting in itertools.product(range(arguments.repeats), settings):
        with_ledger, sleep_ms, group_size, concurrent = setting
        with rare_collections():  # as a fit does
            row = measure(sleep_ms, concurrent, group_size, with_ledger, arguments.trajectories, arguments.threads)
        rounds[setting].append(row)
    rows = [sorted(rounds[setting], key=lambda row: row["tasks_per_s"])[arguments.repeats // 2] for setting in settings]
    print(f"{'sleep':>6} {'C':>5} {'G':>2} {'ledger':>6} {'tasks/s':>9} {'of ideal':>8} {'us/rollout':>10}")
    for row in rows:
        ideal = f"{row['ideal_fraction']:.0%}" if row["ideal_fraction"] else "-"
        print(
            f"{row['sleep_ms']:>4}ms {row['C']:>5} {row['G']:>2} {'on' if row['ledger'] else 'off':>6} "
            f"{row['tasks_per_s']:>9.0f} {ideal:>8} {row['us_per_rollout']:>10.1f}"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
