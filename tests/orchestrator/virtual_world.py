"""The settings of the virtual loop, what fate has in store for each group and batch, and what is in flight."""

import random
from dataclasses import dataclass, field
from functools import lru_cache

LAWS = {
    "constant": lambda rng: 1.0,
    "uniform": lambda rng: rng.uniform(0.0, 3.0),
    "lognormal": lambda rng: rng.lognormvariate(0.0, 1.5),
    "pareto": lambda rng: rng.paretovariate(1.2),
    "straggler": lambda rng: 40.0 if rng.random() < 0.05 else 0.2,
}


@dataclass(frozen=True)
class World:
    """One setting. Times are in seconds of the virtual clock, probabilities in [0, 1]."""

    S: int | None = 2
    B: int = 2
    G: int = 1
    W: int = 2
    f: float = 1.0
    C: int = 10**9
    policy: str = "wait"
    law: str = "lognormal"
    steps: int | None = 10
    prompts: int | None = None
    short_ok: bool = False
    filtered: float = 0.0
    fails: float = 0.0  # per attempt
    max_retries: int = 1
    quorum: int | None = None
    straggler_timeout_s: float = 1.0
    lags_s: tuple[float, ...] = (0.0,)  # one per engine: how long a load may take
    drain: bool = False  # sampling_policy=trajectory: an engine loads only when it is empty
    deaths: float = 0.0  # per step and engine: at a random moment its process dies, and returns after a while
    skips: float = 0.0  # per batch: no update
    pauses: float = 0.0  # per step
    late_tokens: bool = False
    train_s: float = 1.0
    kill_at: int | None = None  # killed while this version trains, then resumed from the checkpoint before
    checkpoint_every: int = 1
    resume_s: int | None = None  # S of the resumed run, if it is another
    seed: int = 0


@lru_cache(maxsize=4096)
def fate(world: World, group_id: int) -> tuple[bool, tuple[int, ...]]:
    """Whether the group survives, and how many attempts of each sample fail: a function of the group alone."""
    rng = random.Random(world.seed * 1_000_003 + group_id)
    failing = []
    for _ in range(world.G):
        failed = 0
        while failed <= world.max_retries and rng.random() < world.fails:
            failed += 1
        failing.append(failed)
    done = sum(failed <= world.max_retries for failed in failing)
    enough = done == world.G or (world.quorum is not None and done >= world.quorum)
    return enough and rng.random() >= world.filtered, tuple(failing)


def skipped(world: World, batch_number: int) -> bool:
    """Whether the batch ends without an update: a function of its number alone."""
    return random.Random(world.seed * 7919 + batch_number).random() < world.skips


@dataclass
class Running:
    version: int
    admitted_s: float
    heads: dict[int, int] = field(default_factory=dict)  # finished sample -> head
    given_up: set[int] = field(default_factory=set)  # samples that failed for good
    attempts: set[int] = field(default_factory=set)


@dataclass
class Attempt:
    group: int
    sample: int
    failed_before: int
    engine: int
    head: int | None = None
