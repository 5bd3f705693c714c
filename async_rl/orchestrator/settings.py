"""Every number the control plane runs by, validated together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class ForwardBackwardBatch:
    """How much of a batch must be complete to be trained ahead of its rest; whichever is reached first submits.

    Attributes:
        min_sequences: Trajectories, ``>= 1``.
        min_tokens: Their tokens, prompts included, ``>= 1``.
    """

    min_sequences: int = 64
    min_tokens: int = 131072

    def __post_init__(self) -> None:
        for key in ("min_sequences", "min_tokens"):
            value = getattr(self, key)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{key}={value!r} is not possible; give a whole number >= 1")


@dataclass(frozen=True, slots=True)
class OrchestratorSettings:
    """Settings of one run's control plane (DESIGN sections 2 and 5).

    Attributes:
        max_steps: Steps of the run (the horizon), ``>= 1``; ``None``: no end.
        max_staleness: S, oldest age in versions, ``>= 0``; ``None`` only with ``stale_policy="allow"``.
        admit_ahead: W, versions to run ahead, in ``[0, S]``.
        oversample_factor: f, ``>= 1``.
        batch_size: B, groups per step, ``>= 1``.
        group_size: G, trajectories per group, ``>= 1``.
        max_concurrent: C, trajectories running at once, ``>= group_size``.
        stale_policy: ``"wait"``, ``"mask"`` or ``"allow"``.
        sampling_policy: ``"segment"``, ``"trajectory"``, or ``"auto"``: ``trajectory`` where every engine can keep
            several versions alive.
        seed: Run seed.
        group_completion: ``"all"``, or ``"quorum"``: go on without stragglers.
        min_group_size: Trajectories that make a quorum, in ``[1, group_size]``.
        straggler_timeout_s: Seconds a complete quorum waits for the rest.
        max_retries: Attempts after the first, for one trajectory, ``>= 0``.
        max_failures: Failed attempts in a row (over all rollouts) that are put up with; one more ends the run.
        rollout_timeout_s: Deadline of one attempt.
        rollout_threads: Event loops that run rollouts, ``>= 1``.
        last_batch: What becomes of fewer than ``batch_size`` groups at the end of the data.
        filter_zero_variance: End groups whose rewards are all equal as filtered.
        load_timeout_s: Deadline of one weight load into one engine.
        max_engine_restarts: How often a dead engine is started again, over the run and all engines, ``>= 0``.
        stall_timeout_s: Seconds in which no batch was trained or dropped, no rollout attempt ended and no weights were
            loaded that end the run with a report; ``None``: any number.
        metrics_interval_s: How often gauges are read.
        forward_backward_batch: Hand out complete groups while others of the batch still run (needs S = 0 and ``wait``).
    """

    max_steps: int | None
    max_staleness: int | None
    admit_ahead: int
    batch_size: int
    group_size: int
    max_concurrent: int
    oversample_factor: float = 1.0
    stale_policy: Literal["wait", "mask", "allow"] = "wait"
    sampling_policy: Literal["auto", "segment", "trajectory"] = "auto"
    seed: int = 0
    group_completion: Literal["all", "quorum"] = "all"
    min_group_size: int | None = None
    straggler_timeout_s: float | None = None
    max_retries: int = 2
    max_failures: int = 8
    rollout_timeout_s: float = 600.0
    rollout_threads: int = 2
    last_batch: Literal["drop", "train"] = "drop"
    filter_zero_variance: bool = False
    load_timeout_s: float = 120.0
    max_engine_restarts: int = 3
    stall_timeout_s: float | None = None
    metrics_interval_s: float = 1.0
    forward_backward_batch: ForwardBackwardBatch | None = None

    def __post_init__(self) -> None:
        if self.forward_backward_batch is not None and (self.max_staleness != 0 or self.stale_policy != "wait"):
            raise ValueError(
                f"forward_backward_batch with max_staleness={self.max_staleness}, stale_policy={self.stale_policy}: "
                "which groups make the next batch is certain only with max_staleness=0 and stale_policy=wait"
            )
        for key, least in (("max_retries", 0), ("max_failures", 0), ("rollout_threads", 1), ("max_engine_restarts", 0)):
            if getattr(self, key) < least:
                raise ValueError(f"{key}={getattr(self, key)} must be >= {least}")
        for key in ("rollout_timeout_s", "load_timeout_s", "metrics_interval_s"):
            if not getattr(self, key) > 0:
                raise ValueError(f"{key}={getattr(self, key)} must be > 0 seconds")
        if self.stall_timeout_s is not None and not self.stall_timeout_s > 0:
            raise ValueError(f"stall_timeout_s={self.stall_timeout_s} must be > 0 seconds, or None for no watchdog")
        for key, values in (
            ("stale_policy", ("wait", "mask", "allow")),
            ("sampling_policy", ("auto", "segment", "trajectory")),
            ("group_completion", ("all", "quorum")),
            ("last_batch", ("drop", "train")),
        ):
            if getattr(self, key) not in values:
                raise ValueError(f"{key}={getattr(self, key)!r} must be one of {', '.join(values)}")
        quorum = self.group_completion == "quorum"
        for key in ("min_group_size", "straggler_timeout_s"):
            if (getattr(self, key) is not None) is not quorum:
                raise ValueError(
                    f"{key}={getattr(self, key)} with group_completion={self.group_completion}: "
                    + (f"quorum needs {key}" if quorum else f"remove {key} or set group_completion=quorum")
                )
        if self.min_group_size is not None and not 1 <= self.min_group_size <= self.group_size:
            raise ValueError(f"min_group_size={self.min_group_size} must be in [1, group_size={self.group_size}]")
        if self.straggler_timeout_s is not None and self.straggler_timeout_s < 0:
            raise ValueError(f"straggler_timeout_s={self.straggler_timeout_s} must be >= 0 seconds")
        if self.filter_zero_variance and self.group_size == 1:
            raise ValueError(
                "filter_zero_variance=true with group_size=1 would filter every group: raise group_size or turn it off"
            )

    @property
    def trajectories_needed(self) -> int:
        """Trajectories without which a group fails."""
        return self.group_size if self.min_group_size is None else self.min_group_size
