"""Latencies: how long rollouts run, drawn from a named distribution or from what an earlier run measured."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from async_rl.orchestrator.ledger_rows import LedgerError, reading

_Z99 = 2.3263478740408408  # 99th percentile of the normal distribution


@dataclass(frozen=True)
class Latencies:
    """Draws the durations of the trajectories of one group.

    Attributes:
        name: What it is, for people.
        draw: ``draw(rng, group_size)`` gives the seconds of each trajectory, ``[group_size]``.
    """

    name: str
    draw: Callable[[np.random.Generator, int], NDArray[np.float64]]

    @classmethod
    def from_text(cls, text: str) -> Latencies:
        """A distribution of independent trajectories, in seconds.

        Args:
            text: ``constant:SECONDS``, ``uniform:LOW,HIGH``, ``lognormal:MU,SIGMA`` (of the logarithm) or
                ``pareto:SHAPE,LEAST``.

        Raises:
            ValueError: If the name is unknown or the numbers don't fit it.

        Example:
            >>> Latencies.from_text("uniform:1,3").name
            'uniform:1,3'
        """
        kind, _, rest = text.partition(":")
        try:
            numbers = [float(number) for number in rest.split(",")]
        except ValueError:
            numbers = []
        match kind, numbers:
            case "constant", [seconds] if seconds >= 0:
                return cls(text, lambda rng, n: np.full(n, seconds))
            case "uniform", [low, high] if 0 <= low <= high:
                return cls(text, lambda rng, n: rng.uniform(low, high, n))
            case "lognormal", [mu, sigma] if sigma >= 0:
                return cls(text, lambda rng, n: rng.lognormal(mu, sigma, n))
            case "pareto", [shape, least] if shape > 0 and least >= 0:
                return cls(text, lambda rng, n: least * (1 + rng.pareto(shape, n)))
        raise ValueError(
            f"latency {text!r} is none of constant:SECONDS, uniform:LOW,HIGH, lognormal:MU,SIGMA, pareto:SHAPE,LEAST"
        )

    @classmethod
    def from_groups(cls, name: str, groups: Sequence[Sequence[float]]) -> Latencies:
        """Groups as they were measured: whole groups are drawn again, for samples of one prompt are alike.

        Args:
            name: Where they come from.
            groups: Seconds of each trajectory of each group. A draw of another group size takes single trajectories.

        Raises:
            ValueError: If nothing was measured.
        """
        measured = [np.asarray(group, dtype=np.float64) for group in groups if len(group)]
        if not measured:
            raise ValueError(f"{name} holds no finished rollout to take latencies from")
        single = np.concatenate(measured)
        whole: dict[int, list[NDArray[np.float64]]] = {}
        for group in measured:
            whole.setdefault(len(group), []).append(group)

        def draw(rng: np.random.Generator, group_size: int) -> NDArray[np.float64]:
            if group_size in whole:
                return whole[group_size][rng.integers(len(whole[group_size]))]
            return rng.choice(single, group_size)

        return cls(name, draw)


@dataclass(frozen=True)
class MeasuredRun:
    """What a simulation needs to know about an earlier run; ``None`` where its record doesn't say.

    Attributes:
        latencies: Of its rollouts.
        batch_size: Groups per step.
        group_size: Trajectories per group.
        train_s: Median seconds from a planned batch to its end.
        filtered: Share of the finished groups that did not reach a batch because they were filtered or failed.
    """

    latencies: Latencies
    batch_size: int | None = None
    group_size: int | None = None
    train_s: float | None = None
    filtered: float | None = None


def read_run(path: str | Path) -> MeasuredRun:
    """Read a run directory, its ``run.db`` (exact, preferred) or its ``metrics.jsonl`` (a lognormal fit).

    Raises:
        FileNotFoundError: If there is neither file.
        ValueError: If the file holds no finished rollout.
    """
    path = Path(path)
    if path.is_dir():
        found = [path / name for name in ("run.db", "metrics.jsonl") if (path / name).is_file()]
        if not found:
            raise FileNotFoundError(f"{path} holds neither run.db nor metrics.jsonl: give a run directory")
        path = found[0]
    elif not path.is_file():
        raise FileNotFoundError(f"{path} does not exist: give a run directory, a run.db or a metrics.jsonl")
    if path.suffix == ".jsonl":
        return _read_metrics(path)
    try:
        return _read_ledger(path)
    except LedgerError as error:
        raise ValueError(f"{path} is not the record of a run: {error}") from error


def _read_ledger(path: Path) -> MeasuredRun:
    groups: dict[int, list[float]] = {}
    with reading(path) as db:
        for group, seconds in db.execute(
            "SELECT group_id, ended_s - started_s FROM trajectories LEFT JOIN archived a USING (group_id) "
            "WHERE a.group_id IS NULL"
        ):
            groups.setdefault(group, []).append(seconds)
        for group, text in db.execute("SELECT group_id, seconds FROM archived"):
            groups[group] = json.loads(text)
        outcomes = dict(db.execute("SELECT outcome, count(*) FROM endings GROUP BY outcome"))
        steps = [(len(json.loads(ids)), end - start) for ids, start, end in db.execute(
            "SELECT group_ids, planned_s, ended_s FROM batches WHERE ended_s IS NOT NULL AND outcome = 'trained'"
        )]  # fmt: skip
    lost = outcomes.get("filtered", 0) + outcomes.get("failed", 0)
    ended = lost + outcomes.get("trained", 0)
    return MeasuredRun(
        latencies=Latencies.from_groups(str(path), list(groups.values())),
        batch_size=max((size for size, _ in steps), default=None),
        group_size=max((len(group) for group in groups.values()), default=None),
        train_s=float(np.median([seconds for _, seconds in steps])) if steps else None,
        filtered=lost / ended if ended else None,
    )


def _read_metrics(path: Path) -> MeasuredRun:
    rows = []
    for line in path.read_text().splitlines():
        row = json.loads(line)
        if row.get("rollout/finished") and "rollout/latency_p99_s" in row:
            rows.append([row["rollout/finished"], row["rollout/latency_mean_s"], row["rollout/latency_p99_s"]])
    if not rows:
        raise ValueError(f"{path} holds no finished rollout to take latencies from")
    count, mean, p99 = np.asarray(rows).T
    mean_s = float(np.average(mean, weights=count))
    p99_s = float(np.average(p99, weights=count))
    # A lognormal with this mean and 99th percentile: sigma^2 / 2 - z * sigma + log(p99 / mean) = 0.
    log_ratio = math.log(max(p99_s, mean_s) / mean_s)
    sigma = _Z99 - math.sqrt(max(0.0, _Z99**2 - 2 * log_ratio))
    return MeasuredRun(Latencies.from_text(f"lognormal:{math.log(mean_s) - sigma**2 / 2:.4f},{sigma:.4f}"))
