"""Measures what an exact age bound costs: `wait` against completion and strict admission order, on a virtual clock.

    python scripts/bench_staleness.py [--json FILE] [--steps N]

The shipped gate admits in all of them; only the planner differs. B = 8 groups of one trajectory, 1 s per training step.
Ends with exit code 1 if a `wait` row is older than S or, under `segment`, more than 2 % above its lower bound.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from rich.console import Console
from rich.table import Table

from async_rl.orchestrator.latencies import Latencies
from async_rl.orchestrator.planner import Plan
from async_rl.orchestrator.simulator import Planner, Scenario, Setting, simulate

BATCH_SIZE = 8
LATENCIES = {
    "uniform(3)": "constant:3",
    "lognormal(0,1)": "lognormal:0,1",
    "lognormal(0,1.5)": "lognormal:0,1.5",
    "pareto(1.5)": "pareto:1.5,0.5",
}
BOUNDS = (0, 1, 2, 4, 8, 16)
UNLIMITED = 10**9  # max_concurrent
SLACK = 1.02


class CompletionOrder:
    """Trains groups as they finish and never waits for one: an admission gate alone."""

    def __init__(self) -> None:
        self._kept: dict[int, None] = {}

    def admitted(self, group_id: int, version: int) -> None:
        """Nothing to note."""

    def keep(self, group_id: int, head: int | None) -> None:
        """Finished."""
        self._kept[group_id] = None

    def end(self, group_id: int) -> None:
        """Out."""
        self._kept.pop(group_id, None)

    def plan(self, trained: int) -> Plan:
        """The first that finished."""
        if len(self._kept) < BATCH_SIZE:
            return Plan((), "more groups")
        return Plan(tuple(self._kept)[:BATCH_SIZE], "")


class AdmissionOrder(CompletionOrder):
    """Trains groups strictly in the order of their admission: a queue."""

    def __init__(self) -> None:
        super().__init__()
        self._in_system: dict[int, None] = {}

    def admitted(self, group_id: int, version: int) -> None:
        """Join the queue."""
        self._in_system[group_id] = None

    def end(self, group_id: int) -> None:
        """Out."""
        super().end(group_id)
        del self._in_system[group_id]

    def plan(self, trained: int) -> Plan:
        """The first that were admitted, once all of them finished."""
        first = tuple(self._in_system)[:BATCH_SIZE]
        if len(first) < BATCH_SIZE or any(group not in self._kept for group in first):
            return Plan((), "the oldest group")
        return Plan(first, "")


def planner_of(policy: str) -> Planner | None:
    return {"wait": None, "completion": CompletionOrder(), "admission": AdmissionOrder()}[policy]


def measure(steps: int) -> list[dict[str, Any]]:
    rows = []
    for name, text in LATENCIES.items():
        for sampling_policy in ("segment", "trajectory"):
            scenario = Scenario(Latencies.from_text(text), BATCH_SIZE, sampling_policy=sampling_policy, steps=steps)
            for bound in BOUNDS:
                for ahead in sorted({min(2, bound), bound}):
                    for policy in ("wait", "completion", "admission"):
                        result = simulate(scenario, Setting(bound, ahead, UNLIMITED), planner_of(policy))
                        rows.append(
                            {
                                "latency": name,
                                "S": bound,
                                "W": ahead,
                                "policy": policy,
                                "sampling_policy": sampling_policy,
                                "max_age": result.max_age,
                                "mean_age": round(result.mean_age, 3),
                                "step_s": round(result.step_s, 4),
                                "lower_bound_s": round(result.lower_bound_s, 4),
                                "wait_fraction": round(result.wait_fraction, 4),
                            }
                        )
    return rows


def broken(row: dict[str, Any]) -> str:
    if row["policy"] != "wait":
        return ""
    if row["max_age"] > row["S"]:
        return f"age {row['max_age']} passes S"
    if row["sampling_policy"] == "segment" and row["step_s"] > SLACK * row["lower_bound_s"]:
        return f"step {row['step_s']} s is above {SLACK} x {row['lower_bound_s']} s"
    return ""


def table_of(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="Ages and steps; training takes 1 s per step, batch 8")
    for column in rows[0]:
        table.add_column(column, justify="left" if isinstance(rows[0][column], str) else "right")
    for before, row in zip([rows[0], *rows], rows, strict=False):
        if before["latency"] != row["latency"]:
            table.add_section()
        table.add_row(*(f"{value:.2f}" if isinstance(value, float) else str(value) for value in row.values()))
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="write the rows there as JSON")
    parser.add_argument("--steps", type=int, default=400, help="training steps per row (default 400)")
    args = parser.parse_args()
    rows = measure(args.steps)
    console = Console()
    console.print(table_of(rows))
    if args.json:
        with open(args.json, "w") as file:
            json.dump(rows, file, indent=1)
    failures = [(row, why) for row in rows if (why := broken(row))]
    for row, why in failures:
        console.print(f"[red]{row}: {why}")
    waits = [row for row in rows if row["policy"] == "wait" and row["sampling_policy"] == "segment"]
    worst = max(row["step_s"] / row["lower_bound_s"] for row in waits)
    console.print(f"{len(rows)} rows; `wait` under segment is at most {worst - 1:.2%} above its lower bound")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
