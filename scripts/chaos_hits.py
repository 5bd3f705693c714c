"""When and how a run is hit: random moments, a shuffled deck of faults, and what the run may exit with after each."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import signal
import time

from chaos_check import processes_of
from chaos_life import Life, Run, Tally

TRAINER, ENGINE, TERM, INT = "SIGKILL of the trainer", "SIGKILL of the engine", "SIGTERM", "SIGINT"
INT_TWICE, DISK, CHECKPOINT = "SIGINT twice", "disk full", "checkpoint cut in half"
KINDS = (TRAINER, ENGINE, TERM, INT, INT_TWICE, DISK, CHECKPOINT)
ENGINE_PROCESS = {"scripted": "sys.stdin.read", "vllm": "EngineCore"}
"""What the command line of the engine's process contains."""
STARTING_S = {"scripted": 1.5, "vllm": 20.0}
"""About how long a start takes: moments before the first step are drawn from this."""


class Disturber:
    """Hits runs.

    Args:
        rng: Decides when and how.
        tally: Takes what is seen.
    """

    def __init__(self, rng: random.Random, tally: Tally) -> None:
        self._rng = rng
        self._tally = tally
        self._deck: list[str] = []

    def finish(self, run: Run, faults: int) -> int:
        """Hit a run up to ``faults`` times, resuming it each time, until it is finished.

        Returns:
            How many faults were delivered; fewer where the run was finished before.
        """
        delivered = failures = 0
        while not run.finished and failures < 3:
            life = run.start()
            killed = deadly = 0
            while not deadly and delivered < faults and self._moment(run, life):
                delivered += 1
                kind = self._draw(run, life)
                if kind == ENGINE:
                    self._kill_engine(life)
                    killed += 1
                else:
                    self._hit(kind, run, life)
                    deadly = 1
            if not deadly:
                if not life.listen_until(lambda: False):
                    run.problem(life, "said nothing for a long time")
                run.end(life, time.monotonic())
                if life.exit_code != 0:
                    failures += 1
                    run.problem(life, f"ended without a reason (its engine was killed {killed} times)")
        return delivered

    def _moment(self, run: Run, life: Life) -> bool:
        """Wait for a random moment, while it starts or some steps later; whether it still lives then."""
        if not life.started and self._rng.random() < 0.2:
            life.listen(self._rng.uniform(0.0, STARTING_S[life.spec.engine]))
            return life.alive
        first = life.steps[0][0] - 1 if life.steps else max(run.losses, default=0)
        target = min(len(life.steps) + self._rng.randint(0, 3), run.max_steps - first)
        if not life.listen_until(lambda: life.started and len(life.steps) >= target):
            return False
        life.listen(self._rng.uniform(0.0, 0.4))
        return life.alive

    def _draw(self, run: Run, life: Life) -> str:
        """The next kind that is possible now."""
        for _ in range(2):
            self._deck = self._deck or self._rng.sample(KINDS, len(KINDS))
            for kind in self._deck:
                if kind == ENGINE and not processes_of(life.spec.name, ENGINE_PROCESS[life.spec.engine]):
                    continue
                if kind == CHECKPOINT and not run.checkpoints:
                    continue
                self._deck.remove(kind)
                return kind
            self._deck = []
        raise AssertionError("a trainer can always be killed")

    def _kill_engine(self, life: Life) -> None:
        for pid in processes_of(life.spec.name, ENGINE_PROCESS[life.spec.engine]):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._tally.exits_s[ENGINE].append(None)

    def _hit(self, kind: str, run: Run, life: Life) -> None:
        """A fault that ends the life; waits for its end and looks at the exit code."""
        started, began_s = life.started, time.monotonic()
        with contextlib.suppress(ProcessLookupError):
            self._deliver(kind, life)
        self._tally.exits_s[kind].append(run.end(life, began_s))
        self._tally.codes[kind][life.exit_code] += 1
        if life.exit_code not in _allowed(kind, started, (run.dir / "run.db").exists()):
            run.problem(life, f"exit code {life.exit_code} after {kind}")
        if kind == CHECKPOINT and not run.finished:
            newest = run.checkpoints[-1]
            os.truncate(newest, newest.stat().st_size // 2)

    def _deliver(self, kind: str, life: Life) -> None:
        if kind in (TRAINER, CHECKPOINT):
            life.kill()
        elif kind == DISK:
            # The kernel fails every write beyond this many bytes of a file: of all files, or of checkpoints only.
            most = self._rng.choice((0, 1 << 20))
            resource.prlimit(life.pid, resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))
        else:
            os.kill(life.pid, signal.SIGTERM if kind == TERM else signal.SIGINT)
            if kind == INT_TWICE:
                time.sleep(self._rng.uniform(0.0, 0.3))
                os.kill(life.pid, signal.SIGINT)


def _allowed(kind: str, started: bool, recorded: bool) -> tuple[int, ...]:
    """Exit codes that are right after a fault; 0 always is, for all work may have been done by then."""
    if kind in (TRAINER, CHECKPOINT):
        return (0, -signal.SIGKILL)
    if kind == DISK:
        return (0, 1)
    number = signal.SIGTERM if kind == TERM else signal.SIGINT
    asked = 75 if recorded else 1
    at_once = (128 + number,) if kind == INT_TWICE else ()
    before_we_listen = () if started else (1, -number)
    return (0, asked, *at_once, *before_we_listen)
