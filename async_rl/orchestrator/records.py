"""Plain data the parts of the control plane hand each other: flights, landings, engine slots, events, recovery."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, overload

from async_rl.types import Group, Prompt, RolloutTask, Trajectory

if TYPE_CHECKING:
    import asyncio
    from pathlib import Path

    from async_rl.orchestrator.version import PolicyVersion


class EngineLike(Protocol):
    """What the control plane needs of an engine; a rollout function knows the rest."""

    name: str
    versions_alive: int

    async def load_weights(self, version: int, source: Any) -> None:
        """Replace the weights; returns once every token sampled from now on uses ``version``."""
        ...

    async def start(self) -> None:
        """Bring it up; again after its process died and :meth:`close`."""
        ...

    async def close(self) -> None:
        """Free everything; works on a dead engine."""
        ...


RolloutFn = Callable[[RolloutTask, Any], Awaitable[Trajectory]]


def reason_of(error: BaseException) -> str:
    """Short name of a failure: its ``reason`` attribute, ``"timeout"``, or the exception's type."""
    reason = getattr(error, "reason", None)
    if isinstance(reason, str) and reason:
        return reason
    return "timeout" if isinstance(error, TimeoutError) else type(error).__name__


def is_engine_death(error: BaseException | None) -> bool:
    """Whether the engine's process died, be it that user code wrapped the error that said so."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if getattr(error, "engine_died", False):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False


@dataclass(slots=True, eq=False)
class EngineSlot:
    """The books of one engine.

    Attributes:
        index: Position among the engines.
        engine: The engine.
        served: The version it is confirmed to serve.
        drains: Whether it must be empty before a load (``trajectory`` sampling on an engine that holds one version).
        evaluates: Whether it serves evaluations only. It is then never open, and counts for no version but its own.
        idle: Whether it is not needed now (nothing is evaluated): it loads nothing.
        loaded: Whether it serves a version at all.
        open: Whether new groups may go there.
        flights: Groups it has in flight.
        incarnation: How often it died. What was launched on an earlier incarnation is lost.
        lost: Whether it is dead and not started again yet.
        died_s: When it died (monotonic seconds), until it serves again; else 0.
    """

    index: int
    engine: EngineLike
    served: PolicyVersion
    drains: bool
    evaluates: bool = False
    idle: bool = False
    loaded: bool = False
    open: bool = False
    flights: int = 0
    incarnation: int = 0
    lost: bool = False
    died_s: float = 0.0


@dataclass(slots=True, eq=False)
class Flight:
    """Samples of one prompt in the air.

    Attributes:
        group_id: The group; negative for evaluation.
        prompt: The task.
        version: Lowest served version at the admission, or oldest stamp of what an earlier process finished.
        slot: The engine that serves all its samples.
        incarnation: That of the engine when it was launched.
        rollout: What runs one attempt.
        missing: Sample indices to run.
        landed: Finished samples, those of an earlier process or of a flight that was lost included.
        needed: Trajectories without which it fails: ``group_size``, the quorum, or 0 where each sample stands alone.
        running: Attempts in the air, by sample index.
        given_up: Samples that failed for good.
        error: What made it fail.
        over: Whether it has landed.
        timer: Ends the wait for stragglers.
        began_s: When it was launched, seconds since the epoch.
    """

    group_id: int
    prompt: Prompt
    version: int
    slot: EngineSlot
    incarnation: int
    rollout: RolloutFn
    missing: tuple[int, ...]
    landed: dict[int, Trajectory]
    needed: int
    running: dict[int, Any] = field(default_factory=dict)
    given_up: dict[int, BaseException] = field(default_factory=dict)
    error: BaseException | None = None
    over: bool = False
    timer: asyncio.TimerHandle | None = None
    began_s: float = field(default_factory=time.time)

    @property
    def evaluates(self) -> bool:
        """Whether it belongs to an evaluation."""
        return self.group_id < 0

    @property
    def lost_engine(self) -> bool:
        """Whether its engine is known to have died since it was launched."""
        return self.incarnation != self.slot.incarnation

    def group(self) -> Group:
        """The finished group, trajectories by sample index."""
        landed = self.landed
        trajectories = tuple(landed.values()) if len(landed) == 1 else tuple(landed[i] for i in sorted(landed))
        return Group(self.group_id, self.prompt, self.version, trajectories, self.slot.index)


@dataclass(slots=True, eq=False)
class Landing:
    """What ended on a rollout thread since it last reported.

    Attributes:
        landed: Trajectories of training groups, each with its group id.
        ended: Groups still in the air, once for each of their samples that is out for good.
        finished: Flights that are over.
        lost: Flights whose engine died, each with what told so; nothing of them is in the air any more. They are to be
            launched again, without the samples that landed.
        outcomes: Attempts of training groups in order; runs of successes are one ``None``, every failure its exception.
        retries: Those that failed and were started again.
        evaluated: Attempts of evaluations that ended.
        cancelled: Stragglers cancelled because their group went on without them.
    """

    landed: list[tuple[int, Trajectory]] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)
    finished: list[Flight] = field(default_factory=list)
    lost: list[tuple[Flight, BaseException]] = field(default_factory=list)
    outcomes: list[BaseException | None] = field(default_factory=list)
    retries: int = 0
    evaluated: int = 0
    cancelled: int = 0


class Admission(NamedTuple):
    """A group about to be admitted, or re-issued with the trajectories an earlier process finished."""

    group_id: int
    prompt: Prompt
    landed: Mapping[int, Trajectory]


class Event(NamedTuple):
    """Something the main thread tells callbacks about.

    ``rollout_end`` carries the finished :class:`~async_rl.types.Group`, ``policy_loaded`` the version every open engine
    now serves, ``empty_batch`` an :class:`EmptyBatchReport`.
    """

    name: str
    value: Any


@dataclass(frozen=True, slots=True)
class EmptyBatchReport:
    """A batch's worth of groups ended in a row and none was kept, or a batch had nothing to train.

    Attributes:
        groups: How many groups.
        rewards: How often each reward was seen (at most 20 different ones).
        failures: How often each reason made a group fail.
        first_error: The first failure, traceback included.
        untrainable: Whether it was a planned batch without a trainable token.
        in_a_row: Which empty batch in a row it is, from 1 on; a kept group starts over, for planned batches one that
            was trained.
    """

    groups: int
    rewards: Mapping[float, int] = field(default_factory=dict)
    failures: Mapping[str, int] = field(default_factory=dict)
    first_error: BaseException | None = None
    untrainable: bool = False
    in_a_row: int = 1

    @property
    def outage(self) -> bool:
        """Whether rollouts fail, rather than bring no signal."""
        return 2 * sum(self.failures.values()) >= self.groups and not self.untrainable

    def __str__(self) -> str:
        if self.untrainable:
            return f"no signal: a batch of {self.groups} groups has no trainable token (all truncated or masked?)"
        if self.outage:
            reasons = ", ".join(f"{reason} {n}x" for reason, n in self.failures.items())
            return f"outage: {self.groups} groups in a row and none kept ({reasons}); first error: {self.first_error!r}"
        seen = ", ".join(f"{reward:g} {n}x" for reward, n in self.rewards.items())
        return (
            f"no signal: {self.groups} groups in a row were filtered because all rewards of a group were equal "
            f"(rewards seen: {seen})"
        )


class RecordedBatch(Sequence[Group]):
    """The groups of a batch as they were recorded; read from the disk whenever they are asked for, and not held.

    Args:
        group_ids: Their ids, in the batch's order.
        load: Reads them.
    """

    def __init__(self, group_ids: Sequence[int], load: Callable[[], tuple[Group, ...]]) -> None:
        self.group_ids = tuple(group_ids)
        self._load = load

    def __len__(self) -> int:
        return len(self.group_ids)

    def __iter__(self) -> Iterator[Group]:
        return iter(self._load())

    @overload
    def __getitem__(self, index: int) -> Group: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[Group, ...]: ...

    def __getitem__(self, index: int | slice) -> Group | tuple[Group, ...]:
        return self._load()[index]


@dataclass(frozen=True, slots=True)
class ArchivedGroup:
    """What the archive keeps of a group that has ended.

    Attributes:
        group: The group, at least one trajectory.
        outcome: How it ended; ``None`` where a resume opened it again.
        reason: Why.
        version: The version it was trained at; ``None`` where it was not.
        advantages: One per trajectory; ``None`` where it was not trained.
        admitted_s: When it was admitted, seconds since the epoch.
        out_s: When it ended, seconds since the epoch; ``None`` where it is open again.
    """

    group: Group
    outcome: str | None
    reason: str
    version: int | None
    advantages: tuple[float, ...] | None
    admitted_s: float
    out_s: float | None


class Archive(Protocol):
    """Where the ledger puts the payload of groups that have ended: one file per batch."""

    def path(self, batch_id: int) -> Path:
        """The file of a batch, written or not."""
        ...

    def write(self, batch_id: int, groups: Sequence[ArchivedGroup]) -> None:
        """Write the file of a batch anew; on the disk, whole, when it returns. Raises a RunError that names it."""
        ...

    def read(self, batch_id: int) -> dict[int, Group]:
        """The groups in the file of a batch by id; none where there is no file. Raises a RunError that names it."""
        ...


@dataclass(frozen=True, slots=True)
class Recovery:
    """What an earlier process left, as of a checkpoint.

    Attributes:
        version: Policy version of the checkpoint.
        next_group_id: First admission number never used; also the position in the prompt stream.
        batches: Groups of every batch recorded after the checkpoint, in order: trained again, first, at their versions.
        kept: Finished groups that wait to be trained.
        unfinished: Groups that were running: their id, and the samples they had finished. Re-issued under the same id.
        ended: Groups that ended before, by outcome, so that the counts go on.
    """

    version: int
    next_group_id: int
    batches: tuple[RecordedBatch, ...] = ()
    kept: tuple[Group, ...] = ()
    unfinished: tuple[tuple[int, Mapping[int, Trajectory]], ...] = ()
    ended: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Balance:
    """Every admitted group, by how it ended.

    Attributes:
        admitted: Groups ever admitted.
        ended: By outcome.
    """

    admitted: int
    ended: Mapping[str, int]

    @property
    def open(self) -> int:
        """Groups admitted and not ended."""
        return self.admitted - sum(self.ended.values())
