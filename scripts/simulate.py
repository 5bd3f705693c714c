"""Answers before a run: what will ages, waits and step time be, and which S, W and C would one pick?

    python scripts/simulate.py --latency lognormal:1,1 --batch-size 8 --group-size 8 --train-s 12
    python scripts/simulate.py --run runs/my-run --png ages.png

Runs the gate and the planner of real runs on a virtual clock, one simulation per setting. With --run the latencies, and
whatever is not given, come from an earlier run's directory (its run.db, else a fit to its metrics.jsonl).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from typing import Any

from rich.console import Console
from rich.table import Table

from async_rl.orchestrator.latencies import Latencies, MeasuredRun, read_run
from async_rl.orchestrator.simulator import Scenario, Setting, Simulation, pick, simulate


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--latency",
        help="seconds of one rollout: constant:SECONDS, uniform:LOW,HIGH, lognormal:MU,SIGMA or pareto:SHAPE,LEAST",
    )
    source.add_argument("--run", metavar="DIR", help="an earlier run: its directory, run.db or metrics.jsonl")
    parser.add_argument("--batch-size", type=int, help="groups per step (default 8, or the run's)")
    parser.add_argument("--group-size", type=int, help="rollouts per group (default 8, or the run's)")
    parser.add_argument("--train-s", type=float, help="seconds of one training step (default 1, or the run's)")
    parser.add_argument("--filtered", type=float, help="share of groups filtered or failed (default 0, or the run's)")
    parser.add_argument("--load-s", type=float, default=0.0, help="seconds of one weight load (default 0)")
    parser.add_argument("--engines", type=int, default=1, help="number of engines (default 1)")
    parser.add_argument("--sampling-policy", choices=("segment", "trajectory"), default="segment")
    parser.add_argument("--stale-policy", choices=("wait", "mask", "allow"), default="wait")
    parser.add_argument("--oversample-factor", type=float, default=1.0, help="tried where W < S (default 1)")
    parser.add_argument("--max-staleness", type=int, nargs="+", default=[0, 1, 2, 4, 8], help="S (default 0 1 2 4 8)")
    parser.add_argument("--admit-ahead", type=int, nargs="+", help="W, each up to S (default 1 2 4 and the largest S)")
    parser.add_argument("--max-concurrent", type=int, nargs="+", help="C (default (W+1)*B*G, its half and quarter)")
    parser.add_argument("--tolerance", type=float, default=0.05, help="step time that younger data is worth (0.05)")
    parser.add_argument("--steps", type=int, default=200, help="training steps per simulation (default 200)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", metavar="FILE", help="write scenario, rows and pick there")
    parser.add_argument("--png", metavar="FILE", help="write a histogram of the pick's ages there")
    return parser.parse_args()


def scenario_of(args: argparse.Namespace) -> Scenario:
    run = read_run(args.run) if args.run else MeasuredRun(Latencies.from_text(args.latency))

    def known(given: Any, measured: Any, default: Any) -> Any:
        return next(value for value in (given, measured, default) if value is not None)

    return Scenario(
        latencies=run.latencies,
        batch_size=known(args.batch_size, run.batch_size, 8),
        group_size=known(args.group_size, run.group_size, 8),
        train_s=known(args.train_s, run.train_s, 1.0),
        load_s=args.load_s,
        filtered=known(args.filtered, run.filtered, 0.0),
        sampling_policy=args.sampling_policy,
        engines=args.engines,
        steps=args.steps,
        seed=args.seed,
    )


def settings_of(args: argparse.Namespace, scenario: Scenario) -> list[Setting]:
    settings = []
    bounds: list[int | None] = [None] if args.stale_policy == "allow" else sorted(set(args.max_staleness))
    for bound in bounds:
        wanted = args.admit_ahead or [1, 2, 4, max(args.max_staleness)]
        for ahead in sorted(set(wanted) if bound is None else {min(ahead, bound) for ahead in wanted}):
            places = (ahead + 1) * scenario.batch_size * scenario.group_size
            least = scenario.batch_size * scenario.group_size
            concurrent = args.max_concurrent or [max(places // part, least) for part in (4, 2, 1)]
            factor = args.oversample_factor if bound is None or ahead < bound else 1.0
            for count in sorted(set(concurrent)):
                settings.append(Setting(bound, ahead, count, factor, args.stale_policy))
    return settings


def row_of(result: Simulation) -> dict[str, Any]:
    return {
        "S": result.setting.max_staleness,
        "W": result.setting.admit_ahead,
        "C": result.setting.max_concurrent,
        "mean_age": round(result.mean_age, 3),
        "p99_age": round(result.p99_age, 2),
        "max_age": result.max_age,
        "step_s": round(result.step_s, 4),
        "lower_bound_s": round(result.lower_bound_s, 4),
        "wait_fraction": round(result.wait_fraction, 4),
        "limited_by": result.limited_by,
    }


def table_of(rows: list[dict[str, Any]], picked: int) -> Table:
    table = Table()
    heads = ("S", "W", "C", "age mean", "age p99", "age max", "step (s)", "at best (s)", "trainer waits", "limited by")
    for head in heads:
        table.add_column(head, justify="left" if head == "limited by" else "right")
    for index, row in enumerate(rows):
        cells = dict(row, mean_age=f"{row['mean_age']:.2f}", p99_age=f"{row['p99_age']:.1f}")
        cells |= {"step_s": f"{row['step_s']:.2f}", "lower_bound_s": f"{row['lower_bound_s']:.2f}"}
        cells |= {"wait_fraction": f"{row['wait_fraction']:.0%}"}
        table.add_row(
            *(str(value) for value in cells.values()),
            style="bold green" if index == picked else None,
            end_section=index + 1 < len(rows) and rows[index + 1]["S"] != row["S"],
        )
    return table


def draw(path: str, result: Simulation) -> None:
    try:
        import matplotlib
    except ImportError:
        raise SystemExit("--png needs matplotlib: pip install matplotlib, or leave --png out") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.5), layout="constrained")
    bins = [age - 0.5 for age in range(result.max_age + 2)]
    axes.hist(result.ages, bins=bins, weights=[1 / len(result.ages)] * len(result.ages), rwidth=0.9)
    if result.setting.max_staleness is not None:
        axes.axvline(result.setting.max_staleness + 0.5, color="tab:red", linestyle="--", label="max_staleness")
        axes.legend()
    setting = result.setting
    axes.set_title(f"S={setting.max_staleness}, W={setting.admit_ahead}, C={setting.max_concurrent}")
    axes.set_xlabel("age when trained (versions)")
    axes.set_ylabel("share of groups")
    figure.savefig(path, dpi=150)


def main() -> int:
    args = parse()
    console = Console(width=None if sys.stdout.isatty() else 100)
    try:
        scenario = scenario_of(args)
        simulations = [simulate(scenario, setting) for setting in settings_of(args, scenario)]
    except (ValueError, FileNotFoundError) as error:
        console.print(f"[red]{error}", soft_wrap=True)
        return 2
    best, why = pick(simulations, args.tolerance)
    facts = {field.name: getattr(scenario, field.name) for field in dataclasses.fields(scenario)}
    facts["latencies"] = scenario.latencies.name
    rows = [row_of(simulation) for simulation in simulations]
    choice = best.setting
    console.print(", ".join(f"{name}={value}" for name, value in facts.items()), soft_wrap=True)
    console.print(table_of(rows, simulations.index(best)))
    console.print(
        f"[bold]max_staleness={choice.max_staleness} admit_ahead={choice.admit_ahead} "
        f"max_concurrent={choice.max_concurrent}[/bold]: {why}.",
        soft_wrap=True,
    )
    if args.json:
        with open(args.json, "w") as file:
            picked = rows[simulations.index(best)]
            json.dump({"scenario": facts, "rows": rows, "pick": picked, "reason": why}, file, indent=1)
    if args.png:
        draw(args.png, best)
    return 0


if __name__ == "__main__":
    sys.exit(main())
