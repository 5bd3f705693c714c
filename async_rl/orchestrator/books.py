"""Books: gate, planner and engine slots under one lock, so that admission and selection can't drift apart."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from async_rl.orchestrator.records import Admission, EngineSlot, Flight, Recovery, RolloutFn
from async_rl.types import Group, Outcome

if TYPE_CHECKING:
    from async_rl.orchestrator.gate import CapacityGate
    from async_rl.orchestrator.planner import BatchPlanner, Plan
    from async_rl.orchestrator.room import Room
    from async_rl.orchestrator.settings import OrchestratorSettings
    from async_rl.orchestrator.version import PolicyVersion


class Books:
    """Where every group is. Each method is one step of a group's life and takes the room's lock itself.

    Args:
        room: The lock and its conditions.
        gate: Counts the groups in the system.
        planner: Knows their deadlines.
        trained: The trained version.
        slots: The engines.
        settings: Group size and quorum.
        rollout: What runs one attempt of a training sample.
        recovery: What an earlier process left.
        reissue: Its unfinished groups of which samples are finished: they are in the system from the start, for these
            samples have deadlines.
    """

    def __init__(
        self,
        room: Room,
        gate: CapacityGate,
        planner: BatchPlanner,
        trained: PolicyVersion,
        slots: Sequence[EngineSlot],
        *,
        settings: OrchestratorSettings,
        rollout: RolloutFn,
        recovery: Recovery,
        reissue: Sequence[Admission],
    ) -> None:
        self._room = room
        self._gate = gate
        self._planner = planner
        self._trained = trained
        self._slots = slots
        self._batch_size = settings.batch_size
        self._samples = tuple(range(settings.group_size))
        self._needed = settings.trajectories_needed
        self._rollout = rollout
        self._admission_open = False
        self._admission_over = False
        self._prompts_over = False
        self._resume_version = recovery.version + len(recovery.batches)
        self.ended = Counter({Outcome(name): count for name, count in recovery.ended.items()})
        self._running: dict[int, EngineSlot | None] = {}
        self._kept: dict[int, tuple[Group, int | None]] = {}
        self._in_batch: tuple[int, ...] = ()
        # Those without a finished sample enter when they are launched, and were admitted all the same.
        self._to_reissue = {group_id for group_id, landed in recovery.unfinished if not landed}
        self.admitted = (
            len(recovery.kept) + sum(map(len, recovery.batches)) + self.ended.total() + len(self._to_reissue)
        )
        for group in recovery.kept:
            self._gate.restore_kept(group.id)
            head = group.head
            self._planner.admitted(
                group.id, group.admitted_version if head is None else min(head, group.admitted_version)
            )
            self._planner.keep(group.id, head)
            self._kept[group.id] = group, head
        self._to_relaunch = list(reissue)
        self._lost: list[Flight] = []
        for admission in reissue:
            self._enter(admission, self._version_of(admission, self._resume_version))
            self._running[admission.group_id] = None

    # admission

    def open_admission(self) -> None:
        """Open admission."""
        with self._room.lock:
            self._admission_open = True
            self._room.capacity.notify_all()

    def end_admission(self) -> None:
        """Close admission for good."""
        with self._room.lock:
            self._admission_over = True
            self._room.capacity.notify_all()

    def end_prompts(self) -> None:
        """There is no prompt left to admit."""
        with self._room.lock:
            self._prompts_over = True
            self._room.batch.notify_all()

    def capacity(self) -> tuple[int, str]:
        """How many groups may be launched now, and what limits it.

        After a resume nothing is launched before the recorded batches are trained and the engines serve that version:
        an older one would give groups deadlines that the record knows nothing of. Groups whose engine died are in the
        system and fly on, whether admission is open or not.
        """
        with self._room.lock:
            served = min((slot.served.value for slot in self._slots if slot.open), default=None)
            if self._lost and served is not None:
                return len(self._lost), "reissue"
            if self._admission_over or not self._admission_open:
                return 0, "stopped" if self._admission_over else "paused"
            if served is None:
                return 0, "engines"
            if served < self._resume_version:
                return 0, "replay"
            if self._to_relaunch:
                return len(self._to_relaunch), "reissue"
            if self._prompts_over:
                return 0, "prompts"
            return self._gate.capacity(self._trained.value, served)

    def admit(self, waiting: deque[Admission]) -> list[Flight]:
        """Launch from the front of ``waiting`` what may come in now, each group on the least busy open engine."""
        with self._room.lock:
            count = self.capacity()[0]
            if count <= 0:
                return []
            if self._lost:
                lost, self._lost = self._lost, []
                return [self._fly_again(flight) for flight in lost]
            if self._to_relaunch:
                again, self._to_relaunch = self._to_relaunch, []
                return [self._fly(admission, self._version_of(admission, self._resume_version)) for admission in again]
            served = min(slot.served.value for slot in self._slots if slot.open)
            flights = []
            for _ in range(min(count, len(waiting))):
                admission = waiting.popleft()
                self._enter(admission, served)
                flights.append(self._fly(admission, served))
            return flights

    @staticmethod
    def _version_of(admission: Admission, served: int) -> int:
        """What the group counts as until it is finished: samples finished earlier carry older stamps."""
        heads = (t.head for t in admission.landed.values())
        return min((head for head in heads if head is not None), default=served)

    def _enter(self, admission: Admission, version: int) -> None:
        self._gate.admit(admission.group_id)
        self._planner.admitted(admission.group_id, version)
        for _ in admission.landed:
            self._gate.trajectory_ended(admission.group_id)
        if admission.group_id in self._to_reissue:
            self._to_reissue.remove(admission.group_id)
        else:
            self.admitted += 1

    def _fly(self, admission: Admission, version: int) -> Flight:
        group_id, prompt, landed = admission.group_id, admission.prompt, dict(admission.landed)
        slot = self._board(group_id)
        missing = tuple(i for i in self._samples if i not in landed) if landed else self._samples
        return Flight(group_id, prompt, version, slot, slot.incarnation, self._rollout, missing, landed, self._needed)

    def _fly_again(self, lost: Flight) -> Flight:
        """The rest of a flight whose engine died, on another one; its deadline stays."""
        slot = self._board(lost.group_id)
        missing = tuple(i for i in lost.missing if i not in lost.landed and i not in lost.given_up)
        return replace(
            lost, slot=slot, incarnation=slot.incarnation, missing=missing, running={}, over=False, timer=None
        )

    def _board(self, group_id: int) -> EngineSlot:
        slots = [slot for slot in self._slots if slot.open]
        slot = slots[0] if len(slots) == 1 else min(slots, key=lambda s: s.flights)
        slot.flights += 1
        self._running[group_id] = slot
        return slot

    # rollouts

    def settle(
        self,
        ended_samples: Sequence[int],
        kept: Sequence[tuple[Group, int | None]],
        out: Sequence[tuple[int, Outcome]],
        lost: Sequence[Flight],
    ) -> None:
        """Enter what landed.

        Args:
            ended_samples: Groups still running, once for each of their samples that ended.
            kept: Groups to keep, with their head.
            out: Groups that are out.
            lost: Flights whose engine died, to be launched again.
        """
        room, gate, planner = self._room, self._gate, self._planner
        with room.lock:
            for group_id in ended_samples:
                if group_id in self._running:  # else its group ended in the same landing and gave all places back
                    gate.trajectory_ended(group_id)
            for group, head in kept:
                gate.keep(group.id)
                planner.keep(group.id, head)
                self._kept[group.id] = group, head
                self._left_engine(group.id)
            for group_id, outcome in out:
                gate.end(group_id)
                planner.end(group_id)
                self.ended[outcome] += 1
                self._left_engine(group_id)
            for flight in lost:
                self._left_engine(flight.group_id)
                self._running[flight.group_id] = None
            self._lost.extend(lost)
            room.capacity.notify_all()
            if kept or out:
                room.batch.notify_all()

    def _left_engine(self, group_id: int) -> None:
        slot = self._running.pop(group_id)
        if slot is None:
            raise LookupError(f"group {group_id} landed before it was launched")
        slot.flights -= 1
        if slot.flights == 0 and slot.drains:
            self._room.engines.notify_all()

    # batches

    def data_is_over(self) -> bool:
        """Whether no group will ever be admitted again."""
        return self._prompts_over or self._admission_over

    def plan(self, *, short_ok: bool) -> tuple[Plan, tuple[Group, ...]]:
        """Ask the planner for the batch of this step; its groups stay in the system until :meth:`end_batch`."""
        with self._room.lock:
            plan = self._planner.plan(self._trained.value, exhausted=self.data_is_over(), short_ok=short_ok)
            if plan.groups:
                self._in_batch = plan.groups
            return plan, tuple(self._kept[group_id][0] for group_id in plan.groups)

    def certain(self) -> list[Group]:
        """Kept groups that are certain to be in the next batch, at S = 0; none where that can't be said.

        At S = 0 the gate's bound term, (v + 1) * B - v' * B - (kept + running) with served version v <= trained version
        v', lets a group in only while fewer than B are in the system. So once kept + running <= B that stays true until
        a batch ends, a batch needs B kept groups, and it is formed of all there are: a group that is kept is in it. One
        that is filtered or fails was never kept; what is admitted in its place takes its place in the batch.
        """
        with self._room.lock:
            if len(self._kept) + len(self._running) > self._batch_size:  # a resume with a smaller bound
                return []
            return [group for group, _ in self._kept.values()]

    def end_batch(self, outcome: Outcome) -> None:
        """End the groups of the batch; where it was trained, the trained version moves in the same instant."""
        with self._room.lock:
            self._end(self._in_batch, outcome)
            self._in_batch = ()
            if outcome is Outcome.TRAINED:
                self._trained.advance_to(self._trained.value + 1)
            self._room.capacity.notify_all()

    def end_replayed_batch(self, size: int, outcome: Outcome) -> None:
        """End a batch that was trained again from the record; its groups are not in the system."""
        with self._room.lock:
            self.ended[outcome] += size
            if outcome is Outcome.TRAINED:
                self._trained.advance_to(self._trained.value + 1)
            else:
                self._resume_version -= 1  # the record had an update there that this time was none
            self._room.capacity.notify_all()

    def end_kept(self, outcome: Outcome) -> list[int]:
        """End every kept group that is in no batch: too few at the end of the data, or saved for a later run."""
        with self._room.lock:
            ids = [group_id for group_id in self._kept if group_id not in self._in_batch]
            self._end(ids, outcome)
            return ids

    def end_everything(self, outcome: Outcome, *, recorded: int) -> tuple[list[int], list[int]]:
        """End what is left when the run closes: ids that were finished, ids that were running or to be run again.

        Args:
            outcome: How they end.
            recorded: Groups of recorded batches that were not trained again; they end too.
        """
        with self._room.lock:
            reissued = sorted(self._to_reissue)
            self.ended[outcome] += recorded + len(reissued)
            kept, running = list(self._kept), list(self._running)
            self._end([*kept, *running], outcome)
            self._running.clear()
            self._to_reissue.clear()
            self._in_batch = ()
            return kept, [*running, *reissued]

    def _end(self, group_ids: Sequence[int], outcome: Outcome) -> None:
        for group_id in group_ids:
            self._gate.end(group_id)
            self._planner.end(group_id)
            self._kept.pop(group_id, None)
            self.ended[outcome] += 1

    # reading

    @property
    def trained_version(self) -> int:
        """The trained version."""
        return self._trained.value

    @property
    def groups_in_flight(self) -> int:
        """Groups in the air, those whose engine died included; not those that a resumed run has yet to launch."""
        with self._room.lock:
            return len(self._running) - len(self._to_relaunch)

    def gauges(self) -> dict[str, float]:
        """Numbers to look at: groups and trajectories by state, versions, ages."""
        with self._room.lock:
            open_slots = [slot for slot in self._slots if slot.open]
            heads = [head for _, head in self._kept.values() if head is not None]
            trained = self._trained.value
            served = min((slot.served.value for slot in open_slots or self._slots), default=trained)
            return {
                "running": float(len(self._running)),
                "kept": float(len(self._kept)),
                "running_trajectories": float(self._gate.running_trajectories),
                "trained_version": float(trained),
                "served_version": float(served),
                "engines_open": float(len(open_slots)),
                "oldest_kept_age": float(trained - min(heads)) if heads else 0.0,
                "admitted": float(self.admitted),
            }

    def outcomes(self) -> dict[str, int]:
        """Groups admitted, running, kept, to be launched again after a resume (``reissued``), and ended by outcome."""
        with self._room.lock:
            counts = {"admitted": self.admitted, "running": len(self._running), "kept": len(self._kept)}
            counts["reissued"] = len(self._to_reissue)
            return counts | {str(outcome): self.ended[outcome] for outcome in Outcome}
