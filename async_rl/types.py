"""The nouns every part of async-rl shares: prompts, trajectories, groups, batches. Plain data, no torch."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from async_rl.eval_summary import summarise


class RunError(RuntimeError):
    """Ends a run, and its message says all there is to know.

    Only where somebody else's code is behind it (``__cause__``) is a traceback worth showing: that of this code.
    """


class SettingError(RunError, ValueError):
    """A setting that turned out impossible once the data was there; names the setting and the fix."""


class Outcome(StrEnum):
    """How an admitted group left the system; every admitted group ends with exactly one."""

    TRAINED = "trained"
    FILTERED = "filtered"
    FAILED = "failed"
    DROPPED = "dropped"
    SAVED = "saved"


@dataclass(frozen=True, slots=True)
class Prompt:
    """One task of an environment.

    Attributes:
        id: Stable name of the task within the run, for example ``"arithmetic/0/17"`` (environment/epoch/index).
        environment: Name of the environment that runs it.
        data: The row the environment handed out.
    """

    id: str
    environment: str
    data: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class RolloutTask:
    """One attempt at one sample of one prompt: what a rollout function is called with.

    Attributes:
        group_id: Admission number of the group, increasing over the run.
        prompt: The task.
        sample_index: Which of the group's samples this is, in ``[0, group_size)``.
        attempt: 0 for the first try, +1 for every retry.
        seed: Sampling seed, a function of (run seed, prompt id, sample index, attempt).
    """

    group_id: int
    prompt: Prompt
    sample_index: int
    attempt: int
    seed: int


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of generated tokens ``[start, end)`` sampled by one policy version (``None``: replayed or external)."""

    version: int | None
    start: int
    end: int


def head_version(segments: Iterable[Segment]) -> int | None:
    """Oldest version among the stamped segments, or ``None`` where there is none."""
    return min((s.version for s in segments if s.version is not None and s.end > s.start), default=None)


def tail_version(segments: Iterable[Segment]) -> int | None:
    """Newest version among the stamped segments, or ``None`` where there is none."""
    return max((s.version for s in segments if s.version is not None and s.end > s.start), default=None)


@dataclass(slots=True)
class Trajectory:
    """One complete attempt at a prompt: tokens as the engine saw and returned them, stamps, reward.

    Attributes:
        sample_index: Place in its group.
        attempt: How many attempts failed before this one.
        token_ids: Prompt, model turns and tool results in order, ``[seq]``.
        loss_mask: 1 for tokens the policy sampled and the loss takes, else 0, ``[seq]``.
        logprobs: Behaviour log-probabilities, ``[seq]``; 0.0 where ``loss_mask`` is 0, NaN where the engine gave none.
        segments: Who sampled what; ranges index ``token_ids``.
        prompt_length: Tokens before the first generated one.
        starts: Offsets in ``token_ids`` where a fresh context begins, ascending, the first of them 0. More than one
            where the chat template rewrote earlier turns: ``token_ids`` is then the concatenation of the contexts, each
            is trained as a sequence of its own, and what a later one repeats has ``loss_mask`` 0.
        reward: Finite score.
        reward_parts: Named parts of the reward, for logging.
        finish_reason: The engine's, of the last turn: ``"stop"``, ``"length"``, ...
        completion: Text of the last model turn, for people to read.
        turns: Number of model turns.
        started_s: Wall-clock start, seconds since the epoch.
        ended_s: Wall-clock end, seconds since the epoch.
    """

    sample_index: int
    attempt: int
    token_ids: list[int]
    loss_mask: list[int]
    logprobs: list[float]
    segments: tuple[Segment, ...]
    prompt_length: int
    reward: float
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    finish_reason: str = "stop"
    completion: str = ""
    turns: int = 1
    started_s: float = 0.0
    ended_s: float = 0.0
    starts: tuple[int, ...] = (0,)

    @property
    def head(self) -> int | None:
        """Oldest version that sampled a token of this trajectory."""
        return head_version(self.segments)

    @property
    def tail(self) -> int | None:
        """Newest version that sampled a token of this trajectory."""
        return tail_version(self.segments)

    @property
    def trainable_tokens(self) -> int:
        """Number of tokens the loss takes."""
        return sum(self.loss_mask)


@dataclass(slots=True)
class Group:
    """The finished trajectories of one prompt; admitted, filtered and trained as a whole.

    Attributes:
        id: Admission number, increasing over the run.
        prompt: The task.
        admitted_version: Lowest served version (``v``) when the group was admitted.
        trajectories: The finished samples, by sample index (fewer than ``group_size`` under ``quorum``).
        engine: Index of the engine that served the group.
    """

    id: int
    prompt: Prompt
    admitted_version: int
    trajectories: tuple[Trajectory, ...]
    engine: int = 0

    @property
    def head(self) -> int | None:
        """Oldest version that sampled a token of this group."""
        return head_version(s for t in self.trajectories for s in t.segments)

    @property
    def tail(self) -> int | None:
        """Newest version that sampled a token of this group."""
        return tail_version(s for t in self.trajectories for s in t.segments)

    @property
    def rewards(self) -> tuple[float, ...]:
        """Reward of each trajectory."""
        return tuple(t.reward for t in self.trajectories)


@dataclass(slots=True)
class Batch:
    """The groups of one training step, fixed and recorded before the step.

    Attributes:
        version: Trained version the batch updates (the step makes it ``version + 1``).
        groups: What is trained, in (head, admission) order.
        advantages: One number per trajectory, nested as ``groups[i].trajectories[j]``.
        max_staleness: The bound in force, checked again at the optimizer step; ``None`` where the user gave it up.
    """

    version: int
    groups: tuple[Group, ...]
    advantages: tuple[tuple[float, ...], ...]
    max_staleness: int | None

    def ages(self) -> Sequence[int]:
        """Age of every stamped group: version being trained minus head version."""
        return [self.version - g.head for g in self.groups if g.head is not None]

    def without(self, group_ids: Collection[int]) -> Batch:
        """The batch less some of its groups."""
        rest = [i for i, group in enumerate(self.groups) if group.id not in group_ids]
        return replace(
            self, groups=tuple(self.groups[i] for i in rest), advantages=tuple(self.advantages[i] for i in rest)
        )

    @property
    def trajectories(self) -> list[Trajectory]:
        """All trajectories of the batch, group by group."""
        return [t for g in self.groups for t in g.trajectories]


@dataclass(frozen=True, slots=True)
class EvalResult:
    """The samples of one evaluation prompt.

    Attributes:
        prompt: The task.
        trajectories: Samples that finished.
        failures: Samples that did not, one message each; they are reported beside the mean, never left out silently.
        first_error: What the first of these failed with.
    """

    prompt: Prompt
    trajectories: tuple[Trajectory, ...]
    failures: tuple[str, ...] = ()
    first_error: BaseException | None = None


@dataclass(frozen=True, slots=True)
class EvalBatch:
    """One finished evaluation: all prompts, sampled by one policy version.

    Attributes:
        version: Version that sampled it; the engines that evaluate load no other one while it runs.
        results: One entry per prompt.
        seconds: Wall time it took.
        pass_threshold: Least reward with which a sample passes.
    """

    version: int
    results: tuple[EvalResult, ...]
    seconds: float
    pass_threshold: float = 1.0

    @property
    def failures(self) -> list[str]:
        """Messages of the samples that failed."""
        return [failure for result in self.results for failure in result.failures]

    @property
    def first_error(self) -> BaseException | None:
        """What the first of these samples failed with."""
        return next((result.first_error for result in self.results if result.first_error is not None), None)

    def summary(self) -> dict[str, float]:
        """``version``, ``seconds``, and the numbers of :func:`async_rl.eval_summary.summarise`."""
        numbers = summarise(self.results, self.pass_threshold)
        return {"version": self.version, "seconds": self.seconds, **numbers}
