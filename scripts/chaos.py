"""Hit a real run again and again, resume it each time, and check that nothing was lost.

    python scripts/chaos.py --seed 0 --faults 50 --json chaos.json
    python scripts/chaos.py --seed 0 --faults 6 --engine vllm

Half of the faults hit runs with max_staleness=2, half runs with max_staleness=0; a run that is finished early is
followed by another one. Each kind of run is done once undisturbed: the others must train the same prompts, at
max_staleness=0 in the same batches, and with the scripted engine to the same losses and final weights, bit for bit. The
environment fails on some samples in all of them (raises, hangs, returns NaN). Exits with 1 if any check fails.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import random
import sys
import tempfile
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

from chaos_check import RunRecord, checkpoint, left_over, problems, same_weights, shared_memory
from chaos_hits import ENGINE, KINDS, Disturber
from chaos_life import Run, Tally
from rich.console import Console
from rich.table import Table

STEPS = {"scripted": 12, "vllm": 8}


def campaign(engine: str, seed: int, faults: int, directory: Path) -> Tally:
    """All runs of a campaign.

    Args:
        engine: ``"scripted"`` or ``"vllm"``.
        seed: Decides when and how the runs are hit, and what is sampled.
        faults: How many faults.
        directory: Where the runs go.
    """
    from async_rl.models import build_tiny_model

    tally, disturber_rng = Tally(), random.Random(seed)
    disturber = Disturber(disturber_rng, tally)
    model = build_tiny_model(directory / "model")
    shared_before = shared_memory()
    for staleness, share in ((2, faults - faults // 2), (0, faults // 2)):
        if not share:
            continue
        base = {
            "engine": engine,
            "model": str(model),
            "max_steps": STEPS[engine],
            "max_staleness": staleness,
            "seed": seed + staleness,
        }
        reference = Run(f"s{staleness}-undisturbed", base, directory, Tally())
        Disturber(disturber_rng, Tally()).finish(reference, faults=0)
        if not reference.finished:
            raise SystemExit(f"the undisturbed run with max_staleness={staleness} was not finished; see above")
        number = 0
        while share > 0 and len(tally.problems) < 20:
            number += 1
            run = Run(f"s{staleness}-{number}", base, directory, tally)
            share -= disturber.finish(run, share)
            if run.finished:
                compare(run, reference, staleness, engine, tally)
            tally.problems += [f"run {run.name} left {name} behind" for name in left_over(run.temp_dir, shared_before)]
            print(f"{run.name}: {tally.faults} of {faults} faults, {len(tally.problems)} problems", flush=True)
    return tally


def compare(run: Run, reference: Run, staleness: int, engine: str, tally: Tally) -> None:
    """Check a finished run by itself and against the undisturbed one."""
    record, undisturbed = RunRecord.read(run.dir), RunRecord.read(reference.dir)
    found, weights = checkpoint(run.dir, run.max_steps)
    found += problems(record, run.max_steps, staleness)
    different = []
    if sorted(record.trained_prompts) != sorted(undisturbed.trained_prompts):
        different.append("the trained prompts")
    if staleness == 0:
        if record.prompt_batches != undisturbed.prompt_batches:
            different.append("the batches")
        if engine == "scripted":
            if run.losses != reference.losses:
                different.append("the losses")
            if not same_weights(weights, checkpoint(reference.dir, run.max_steps)[1]):
                different.append("the final weights")
    found += [f"{what} differ from the undisturbed run's" for what in different]
    tally.problems += [f"run {run.name}: {problem}" for problem in found]
    tally.unequal += bool(different)
    tally.lost += record.lost(undisturbed)
    tally.duplicated += record.duplicated()
    tally.runs += 1
    tally.outcomes.update(record.ended)


def figures(tally: Tally) -> dict[str, Any]:
    """What the campaign found, as data."""
    return {
        "faults": tally.faults,
        "lost": len(tally.lost),
        "duplicated": len(tally.duplicated),
        "orphans": tally.orphans,
        "max_exit_s": round(tally.max_exit_s(), 2),
        "equal_to_undisturbed": tally.runs > 0 and not tally.unequal,
        "kinds": {
            kind: {
                "faults": len(tally.exits_s[kind]),
                "max_exit_s": round(tally.max_exit_s(kind), 2),
                "exit_codes": {str(code): count for code, count in sorted(tally.codes[kind].items(), key=str)},
            }
            for kind in KINDS
            if tally.exits_s[kind]
        },
        "environment_faults": dict(tally.environment),
        "runs": tally.runs,
        "lives": tally.lives,
        "groups": dict(tally.outcomes),
        "problems": tally.problems,
    }


def show(found: dict[str, Any], title: str) -> None:
    """Print the table."""
    table = Table(title=title, title_justify="left")
    for name in ("fault", "times", "exit codes", "most seconds to exit"):
        table.add_column(name, justify="left" if name in ("fault", "exit codes") else "right")
    for kind, row in found["kinds"].items():
        codes = ", ".join(f"{code} ({count}x)" for code, count in row["exit_codes"].items())
        if kind == ENGINE:
            table.add_row(kind, str(row["faults"]), "the run goes on", "-")
        else:
            table.add_row(kind, str(row["faults"]), codes, f"{row['max_exit_s']:.1f}")
    for kind, count in sorted(found["environment_faults"].items()):
        table.add_row(kind, str(count), "the sample is retried", "-")
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    console.print(table)
    groups = found["groups"]
    console.print(
        f"{found['faults']} faults in {found['runs']} runs ({found['lives']} processes): "
        f"{sum(groups.values())} groups admitted = "
        + " + ".join(f"{groups.get(o, 0)} {o}" for o in ("trained", "filtered", "failed", "dropped", "saved"))
        + f"; lost {found['lost']}, duplicated {found['duplicated']}, orphans {found['orphans']}, "
        f"at most {found['max_exit_s']:.1f} s to exit, equal to the undisturbed runs: {found['equal_to_undisturbed']}"
    )
    for problem in found["problems"]:
        console.print(f"[red]{problem}[/red]")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="decides when and how the runs are hit (default: 0)")
    parser.add_argument("--faults", type=int, default=50, help="how often (default: 50)")
    parser.add_argument("--engine", choices=sorted(STEPS), default="scripted", help="(default: scripted)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="leave the runs in this (new) directory")
    args = parser.parse_args()
    if args.faults < 1:
        parser.error(f"--faults {args.faults}: give at least 1")
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["HF_HUB_OFFLINE"] = "1"
    # Semaphores of killed lives (tqdm's locks) are removed when this process ends; that is no news.
    os.environ["PYTHONWARNINGS"] = "ignore::UserWarning:multiprocessing.resource_tracker"
    # For the fork server, which loads the libraries once for all lives.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *sys.path[1:]])
    mp.get_context("forkserver").set_forkserver_preload(["chaos_run"])
    if args.engine == "scripted":
        forkserver.ensure_running()  # it loads while we do
    with tempfile.TemporaryDirectory(prefix="chaos-") as temporary:
        directory = args.keep or Path(temporary)
        directory.mkdir(parents=True, exist_ok=args.keep is None)
        found = figures(campaign(args.engine, args.seed, args.faults, directory))
    show(found, f"scripts/chaos.py --seed {args.seed} --faults {args.faults} --engine {args.engine}")
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n")
    failed = found["problems"] or found["lost"] or found["duplicated"] or found["faults"] < args.faults
    return 1 if failed or not found["equal_to_undisturbed"] or found["max_exit_s"] > 30 else 0


if __name__ == "__main__":
    sys.exit(main())
