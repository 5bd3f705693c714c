"""What must be true of a run that was hit, read from its run.db and checkpoints, and of the machine it ran on."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SHM = Path("/dev/shm")
MARKER = "ASYNC_RL_CHAOS_LIFE"
"""Environment variable that every process a life starts inherits; its value names the life."""


@dataclass(frozen=True, slots=True)
class RunRecord:
    """A finished run, from ``run.db`` alone.

    Attributes:
        admitted: Groups ever admitted.
        ended: Groups by outcome.
        prompts: Prompt id of every admitted group.
        batches: Trained batches in order: version and group ids.
        ages: Age of every trained group.
    """

    admitted: int
    ended: dict[str, int]
    prompts: dict[int, str]
    batches: list[tuple[int, list[int]]]
    ages: list[int]

    @classmethod
    def read(cls, run_dir: Path) -> RunRecord:
        """Read the record through a connection that can't write."""
        with contextlib.closing(sqlite3.connect(f"file:{run_dir / 'run.db'}?mode=ro", uri=True)) as db:
            (state,) = db.execute("PRAGMA integrity_check").fetchone()
            if state != "ok":
                raise sqlite3.DatabaseError(f"{run_dir / 'run.db'}: {state}")
            groups = db.execute("SELECT group_id, prompt_id, head, outcome FROM groups").fetchall()
            batches = [
                (version, json.loads(ids))
                for version, ids in db.execute(
                    "SELECT version, group_ids FROM batches WHERE outcome = 'trained' ORDER BY batch_id"
                )
            ]
        heads = {group: head for group, _, head, _ in groups}
        return cls(
            admitted=len(groups),
            ended=dict(Counter(outcome for *_, outcome in groups if outcome is not None)),
            prompts={group: prompt for group, prompt, *_ in groups},
            batches=batches,
            ages=[version - heads[g] for version, ids in batches for g in ids if heads.get(g) is not None],
        )

    @property
    def trained(self) -> list[int]:
        """Groups of the trained batches, in order."""
        return [group for _, ids in self.batches for group in ids]

    @property
    def open(self) -> int:
        """Groups admitted and not ended."""
        return self.admitted - sum(self.ended.values())

    @property
    def prompt_batches(self) -> list[list[str]]:
        """Prompts of the trained batches, in order."""
        return [[self.prompts[group] for group in ids] for _, ids in self.batches]

    @property
    def trained_prompts(self) -> list[str]:
        """Their prompts."""
        return [self.prompts[group] for group in self.trained]

    def lost(self, undisturbed: RunRecord) -> list[str]:
        """Prompts that the undisturbed run trained and this one did not, and groups that never ended."""
        missing = Counter(undisturbed.trained_prompts) - Counter(self.trained_prompts)
        return [*missing.elements(), *["a group that is still open"] * self.open]

    def duplicated(self) -> list[str]:
        """Prompts that were trained or admitted more than once."""
        trained, admitted = Counter(self.trained_prompts), Counter(self.prompts.values())
        return sorted((trained - Counter(set(trained)) | (admitted - Counter(set(admitted)))).elements())


def problems(record: RunRecord, max_steps: int, max_staleness: int) -> list[str]:
    """What contradicts the promises in the record of a finished run."""
    found = []
    if record.open:
        found.append(f"{record.open} of {record.admitted} admitted groups have no outcome ({record.ended})")
    if record.ended.get("trained", 0) != len(record.trained):
        found.append(
            f"{record.ended.get('trained', 0)} groups ended as trained, but {len(record.trained)} are in batches"
        )
    if [version for version, _ in record.batches] != list(range(max_steps)):
        found.append(f"versions trained: {[version for version, _ in record.batches]}, not 0 to {max_steps - 1}")
    if max(record.ages, default=0) > max_staleness or min(record.ages, default=0) < 0:
        found.append(f"ages {sorted(set(record.ages))} with max_staleness={max_staleness}")
    return found


def checkpoint(run_dir: Path, max_steps: int) -> tuple[list[str], dict[str, Any]]:
    """What is wrong with the final checkpoint, and its weights; and what else lies in the directory."""
    import torch

    directory = run_dir / "checkpoints"
    path = directory / f"version-{max_steps:06d}.ckpt"
    if not path.exists():
        return [f"no {path.name} in {sorted(p.name for p in directory.iterdir())}"], {}
    state = torch.load(path, weights_only=True, map_location="cpu")
    steps = {int(s["step"]) for o in state["optimizer_states"] for s in o["state"].values()}
    schedule = {int(s["last_epoch"]) for s in state["lr_schedulers"]}
    found = [
        f"checkpoint of version {max_steps}: {name} {value}, not {wanted}"
        for name, value, wanted in (
            ("global_step", state["global_step"], max_steps),
            ("trained_version", state["async_rl"]["trained_version"], max_steps),
            ("optimizer steps", steps, {max_steps}),
            ("LR schedule steps", schedule, {max_steps}),
        )
        if value != wanted
    ]
    # Beside the checkpoints there may be those that a resume could not use and put aside.
    strangers = [p for p in directory.iterdir() if p.suffix not in (".ckpt", ".skipped")]
    strangers += [p for p in run_dir.rglob("*.partial") if p.parent != directory]
    return found + [f"left behind: {p.relative_to(run_dir)}" for p in strangers], state["state_dict"]


def same_weights(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two state dicts are equal, bit for bit."""
    import torch

    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def processes_of(life: str, including: str = "") -> list[int]:
    """Processes that a life started and that live (zombies are dead), by the marker they inherited."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):  # it ended while we looked, or is somebody else's
            if f"{MARKER}={life}".encode() not in (entry / "environ").read_bytes().split(b"\0"):
                continue
            if including and including.encode() not in (entry / "cmdline").read_bytes():
                continue
            if (entry / "stat").read_text().rpartition(")")[2].split()[0] != "Z":
                found.append(int(entry.name))
    return found


def shared_memory() -> set[str]:
    """Named shared memory that no living process has mapped.

    Without the semaphores of Python's multiprocessing: its tracker process removes them, which is our own here and
    lives as long as we do.
    """
    names = {e.path for e in os.scandir(SHM) if not e.name.startswith("sem.mp-")} if SHM.is_dir() else set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        if not names:
            break
        with contextlib.suppress(OSError):
            text = maps.read_text()
            names -= {name for name in names if name in text}
    return names


def left_over(temp_dir: Path, shared_before: set[str]) -> list[str]:
    """Temporary files and shared memory that ended processes left behind."""
    return [*(str(p) for p in temp_dir.iterdir()), *sorted(shared_memory() - shared_before)]
