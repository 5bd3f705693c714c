"""A life (one process of a run) as its parent sees it, the run it belongs to, and what was seen of both."""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import os
import signal
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal

from chaos_check import processes_of

EngineKind = Literal["scripted", "vllm"]
SILENCE_S = {"scripted": 60.0, "vllm": 240.0}
"""Longest a living run may say nothing."""
EXIT_S = 60.0
"""Longest wait for the end of a life that was hit (the promise is 30)."""
GONE_S = 30.0
"""How long the processes that a life started may outlive it."""


@dataclass(frozen=True, slots=True)
class LifeSpec:
    """What a life runs; the same for every life of a run but for ``name`` and ``resume``.

    Attributes:
        name: Value of the marker in the environment of every process it starts.
        engine: Which engine.
        model: Directory of the model.
        run_dir: The run's.
        log: File for what it prints.
        temp_dir: Its temporary directory.
        max_steps: Steps of the run.
        max_staleness: S.
        seed: The run's seed.
        resume: Whether there is something to go on from.
    """

    name: str
    engine: EngineKind
    model: str
    run_dir: str
    log: str
    temp_dir: str
    max_steps: int
    max_staleness: int
    seed: int
    resume: bool


def _live(spec: LifeSpec, to_parent: Connection) -> None:
    import chaos_run  # here, so that the parent needs none of the heavy libraries

    chaos_run.live(spec, to_parent)


class Life:
    """One process, from its start to its end.

    Args:
        spec: What it runs.
    """

    def __init__(self, spec: LifeSpec) -> None:
        self.spec = spec
        # A fork server with all libraries loaded starts a life in a tenth of a second; vLLM wants a new process.
        context = mp.get_context("forkserver" if spec.engine == "scripted" else "spawn")
        self._receiver, sender = context.Pipe(duplex=False)
        self._process = context.Process(target=_live, args=(spec, sender))
        self._process.start()
        sender.close()
        self.pid: int = self._process.pid or 0
        self.started = False
        self.steps: list[tuple[int, str]] = []
        self.environment_faults: list[str] = []
        self.reason = ""
        self._spoke_s = time.monotonic()

    @property
    def alive(self) -> bool:
        """Whether it still runs."""
        return self._process.is_alive()

    @property
    def exit_code(self) -> int | None:
        """Its exit code, negative for a signal; ``None`` while it runs."""
        return self._process.exitcode

    def listen(self, timeout_s: float) -> None:
        """Take in what it tells for ``timeout_s``, or until it is dead."""
        deadline_s = time.monotonic() + timeout_s
        self._take()
        while self.alive and (left_s := deadline_s - time.monotonic()) > 0:
            wait([self._receiver, self._process.sentinel], left_s)
            self._take()

    def listen_until(self, done: Callable[[], bool]) -> bool:
        """Listen until ``done()``, or until it is dead; false if it says nothing for ``SILENCE_S`` before that."""
        self._spoke_s = time.monotonic()
        self._take()
        while not done() and self.alive:
            if (left_s := self._spoke_s + SILENCE_S[self.spec.engine] - time.monotonic()) <= 0:
                return False
            wait([self._receiver, self._process.sentinel], left_s)
            self._take()
        return True

    def kill(self) -> None:
        """SIGKILL."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def log_tail(self, lines: int = 40) -> str:
        """The end of what it printed."""
        with contextlib.suppress(OSError):
            return "\n".join(Path(self.spec.log).read_text(errors="replace").splitlines()[-lines:])
        return ""

    def _take(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while self._receiver.poll():
                self._spoke_s = time.monotonic()
                kind, *values = self._receiver.recv()
                if kind == "step":
                    self.steps.append((values[0], values[1]))
                elif kind == "environment":
                    self.environment_faults.append(values[0])
                elif kind == "started":
                    self.started = True
                else:
                    self.reason = values[0]


@dataclass(slots=True)
class Tally:
    """What a campaign has seen.

    Attributes:
        exits_s: Seconds from a fault to the exit, children included, by kind of fault; ``None`` where the run went on.
        codes: Exit codes by kind.
        environment: Faults of the environment, by kind.
        problems: What was wrong, each one a sentence.
        lost: Prompts that were not trained, and groups without an outcome.
        duplicated: Prompts that were trained or admitted twice.
        orphans: Processes that outlived the trainer.
        unequal: Runs that differ from the undisturbed one.
        runs: Disturbed runs that were finished.
        lives: Processes they took.
        outcomes: Groups admitted in them, by outcome.
    """

    exits_s: dict[str, list[float | None]] = field(default_factory=lambda: defaultdict(list))
    codes: dict[str, Counter[int | None]] = field(default_factory=lambda: defaultdict(Counter))
    environment: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    duplicated: list[str] = field(default_factory=list)
    orphans: int = 0
    unequal: int = 0
    runs: int = 0
    lives: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)

    @property
    def faults(self) -> int:
        """Faults delivered to processes and files."""
        return sum(map(len, self.exits_s.values()))

    def max_exit_s(self, *kinds: str) -> float:
        """Longest time from a fault of these kinds (default: all) to the exit."""
        return max((s for k in kinds or self.exits_s for s in self.exits_s[k] if s is not None), default=0.0)


class Run:
    """A run: one life after the other in one directory.

    Args:
        name: Unique in the campaign.
        base: What every life of it runs, but for what is the run's own.
        directory: Where its directories go.
        tally: Takes what is seen.
    """

    def __init__(self, name: str, base: Mapping[str, Any], directory: Path, tally: Tally) -> None:
        self.name = name
        self.dir, self.temp_dir = directory / name, directory / f"{name}-tmp"
        self.temp_dir.mkdir()
        self.losses: dict[int, str] = {}
        self.finished = False
        self.max_steps: int = base["max_steps"]
        self._base = base
        self._log = directory / f"{name}.log"
        self._tally = tally
        self._lives = 0

    def start(self) -> Life:
        """The next life; it resumes if there is something to go on from."""
        self._lives += 1
        self._tally.lives += 1
        return Life(
            LifeSpec(
                **self._base,
                name=f"{os.getpid()}-{self.name}-{self._lives}",
                run_dir=str(self.dir),
                temp_dir=str(self.temp_dir),
                log=str(self._log),
                resume=(self.dir / "run.db").exists(),
            )
        )

    @property
    def checkpoints(self) -> list[Path]:
        """Its checkpoints, oldest first."""
        return sorted((self.dir / "checkpoints").glob("version-*.ckpt"))

    def end(self, life: Life, began_s: float) -> float:
        """Wait until a life and all it started are gone; returns the seconds since ``began_s``."""
        life.listen(EXIT_S)
        if life.alive:
            self.problem(life, f"did not end within {EXIT_S:g} s")
            life.kill()
            life.listen(EXIT_S)
        deadline_s = time.monotonic() + GONE_S
        while (orphans := processes_of(life.spec.name)) and time.monotonic() < deadline_s:
            time.sleep(0.02)
        took_s = time.monotonic() - began_s
        for pid in orphans:
            self.problem(life, f"left process {pid} behind")
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._tally.orphans += len(orphans)
        self._tally.environment.update(life.environment_faults)
        for version, loss in life.steps:
            if (before := self.losses.setdefault(version, loss)) != loss:
                self.problem(life, f"step {version}, trained again, has another loss: {before}, then {loss}")
        self.finished = life.exit_code == 0
        return took_s

    def problem(self, life: Life, what: str) -> None:
        """Write down what was wrong, and show the end of the life's output."""
        self._tally.problems.append(f"run {self.name}, life {self._lives} (exit code {life.exit_code}): {what}")
        print(f"--- {self._tally.problems[-1]}; its output ends with\n{life.log_tail()}\n---", file=sys.stderr)
