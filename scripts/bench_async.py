"""Synchronous against asynchronous training of a real model on a real vLLM, runs interleaved, medians printed.

    python scripts/bench_async.py [--json FILE] [--pairs 3] [--steps 12] [--setting tool plain]

Every run is its own process of ``train.py``. ``tool``: each rollout first waits for a tool, log-normally distributed
with a heavy tail and a mean of about one training step. ``plain``: rollouts that only generate.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent


def run(setting: str, staleness: int, pair: int, args: argparse.Namespace, directory: Path) -> dict[str, float]:
    """One training run in a process of its own; returns its closing figures."""
    run_dir = directory / f"{setting}-S{staleness}-{pair}"
    command = [
        sys.executable, str(ROOT / "train.py"), "+recipe=arithmetic", f"run_dir={run_dir}", f"max_steps={args.steps}",
        f"max_staleness={staleness}", f"seed={pair}", f"batch_size={args.batch_size}",
        f"sampling_policy={args.sampling_policy}", *args.overrides,
    ]  # fmt: skip
    if setting == "tool":
        command += ["environment=tool_latency", f"environment.mean_s={args.tool_mean_s}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(
            f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        )
    figures = json.loads((run_dir / "run.json").read_text())["summary"]
    print(
        f"  {setting} S={staleness} pair {pair}: {figures['step_s']:.1f} s/step, overlap {figures['overlap']:.0%}, "
        f"max age {figures['age_max']}, evaluation {figures['eval_end']:.1%}",
        flush=True,
    )
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--setting", nargs="+", default=["tool", "plain"], choices=["tool", "plain"])
    parser.add_argument("--staleness", type=int, default=2, help="S of the asynchronous runs")
    parser.add_argument("--sampling-policy", default="auto")
    parser.add_argument("--batch-size", type=int, default=4, help="prompts per step, of 8 samples each")
    parser.add_argument("--tool-mean-s", type=float, default=2.5, help="about one training step")
    parser.add_argument("overrides", nargs="*", help="further overrides of every run, for example model=tiny")
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        for setting in args.setting:
            runs: dict[int, list[dict[str, float]]] = {0: [], args.staleness: []}
            for pair in range(args.pairs):
                for staleness in (0, args.staleness) if pair % 2 == 0 else (args.staleness, 0):
                    runs[staleness].append(run(setting, staleness, pair, args, Path(directory)))
            step_s = {s: statistics.median(f["step_s"] for f in r) for s, r in runs.items()}
            for staleness, results in runs.items():
                rows.append(
                    {
                        "setting": setting,
                        "S": staleness,
                        "sampling_policy": results[0]["sampling_policy"],
                        "step_s": step_s[staleness],
                        "speedup": step_s[0] / step_s[staleness],
                        "overlap": statistics.median(f["overlap"] for f in results),
                        "max_age": max(f["age_max"] for f in results),
                        "eval": statistics.median(f["eval_end"] for f in results),
                    }
                )
    table = Table(title=f"{args.pairs} interleaved pairs of {args.steps} steps, medians")
    for column in rows[0]:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*(f"{v:.3g}" if isinstance(v, float) else str(v) for v in row.values()))
    Console().print(table)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
