"""What the age bound costs on the real loop: a real model on a real vLLM, rollouts behind a tool with a heavy tail.

    python scripts/bench_staleness_loop.py [--json FILE] [--steps 8] [--staleness 0 1 2 4] [override ...]

Every run is its own process of ``train.py``, without evaluation; the figures come from its ``run.json`` and
``metrics.jsonl``. The first step of a run is left out of step time and waits: it starts with an empty system.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
POLICIES = ("segment", "trajectory")


def run(staleness: int, policy: str, args: argparse.Namespace, run_dir: Path) -> dict[str, Any]:
    """One training run; returns its row of the table."""
    command = [
        sys.executable, str(ROOT / "train.py"), "+recipe=arithmetic", "environment=tool_latency",
        f"environment.mean_s={args.tool_mean_s}", f"run_dir={run_dir}", f"max_steps={args.steps}",
        f"batch_size={args.batch_size}", f"max_staleness={staleness}", f"sampling_policy={policy}",
        "run.evaluation.at=never", *args.overrides,
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(
            f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        )
    figures = json.loads((run_dir / "run.json").read_text())["summary"]
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "train/loss" in row]
    later = steps[1:]
    seconds = steps[-1]["time_s"] - steps[0]["time_s"]
    # The horizon binds in the last W steps of every run, which is much of a short one, and says nothing.
    terms = {key for row in later for key in row if key.startswith("limit/") and key != "limit/horizon"}
    limits = sorted(((sum(row.get(key, 0.0) for row in later), key) for key in terms), reverse=True)
    return {
        "S": staleness,
        "sampling_policy": policy,
        "age_mean": round(figures["age_mean"], 2),
        "age_p99": figures["age_p99"],
        "age_max": figures["age_max"],
        "wait_share": round(sum(row.get("time/wait_for_batch_s", 0.0) for row in later) / seconds, 3),
        "step_s": round(seconds / len(later), 2),
        "latency_max_s": round(max(row.get("rollout/latency_max_s", 0.0) for row in steps), 1),
        "limited_by": limits[0][1].removeprefix("limit/") if limits else "",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--steps", type=int, default=8, help="training steps of each run, at least 2")
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 2, 4], help="S")
    parser.add_argument("--sampling-policy", nargs="+", default=POLICIES, choices=POLICIES)
    parser.add_argument("--batch-size", type=int, default=4, help="prompts per step, of 8 samples each")
    parser.add_argument("--tool-mean-s", type=float, default=2.5, help="mean wait of a rollout for its tool")
    parser.add_argument("overrides", nargs="*", help="further overrides of every run, for example model=tiny")
    args = parser.parse_args()
    if args.steps < 2:
        parser.error(f"--steps {args.steps}: the first step is left out, give at least 2")
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        for staleness in args.staleness:
            for policy in args.sampling_policy:
                rows.append(run(staleness, policy, args, Path(directory) / f"S{staleness}-{policy}"))
                print("  " + ", ".join(f"{name} {value}" for name, value in rows[-1].items()), flush=True)
                if args.json:
                    args.json.write_text(json.dumps(rows, indent=2) + "\n")
    table = Table(title=f"{args.steps} steps each, tool latency lognormal, mean {args.tool_mean_s:g} s, sigma 1")
    for column in rows[0]:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*(f"{value:.0%}" if name == "wait_share" else str(value) for name, value in row.items()))
    Console(width=None if sys.stdout.isatty() else 120).print(table)


if __name__ == "__main__":
    main()
