"""The whole loop on a virtual clock, around the shipped gate and planner: everything that may delay or lose a group.

It keeps its own books (attempts, outcomes, versions) and asserts the promises of the control plane after every event.
"""

import heapq
import math
import random

from virtual_world import LAWS, Attempt, Running, World, fate, skipped

from async_rl.orchestrator.gate import CapacityGate
from async_rl.orchestrator.planner import BatchPlanner
from async_rl.orchestrator.records import Recovery
from async_rl.orchestrator.recovery import within_bound
from async_rl.types import Group, Prompt, Segment, Trajectory


class VirtualLoop:
    """Runs one world to its end; `batches` holds (version, groups, updated) of every batch, `ages` all ages."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.rng = random.Random(world.seed)
        self.now = 0.0
        self.events: list[tuple[float, int, str, tuple[int, ...]]] = []
        self.scheduled = 0
        self.next_group = 0
        self.reissue: list[int] = []
        self.outcome: dict[int, str] = {}
        self.batches: list[tuple[int, tuple[int, ...], bool]] = []
        self.ages: list[int] = []
        self.paused_until = 0.0
        self.killed = False
        self.S, self.W, self.f = world.S, world.W, world.f
        self.heads: dict[int, tuple[int, int]] = {}  # every group ever kept, as `kept` has it
        self.start(version=0)

    def start(self, version: int) -> None:
        """A fresh process at ``version``: new gate, planner and engines."""
        world = self.world
        self.gate = CapacityGate(
            batch_size=world.B,
            group_size=world.G,
            max_concurrent=world.C,
            max_staleness=None if world.policy == "allow" else self.S,
            admit_ahead=self.W,
            oversample_factor=self.f,
            max_steps=world.steps,
        )
        self.planner = BatchPlanner(batch_size=world.B, max_staleness=self.S, stale_policy=world.policy)
        self.trained = version
        self.served = [version] * len(world.lags_s)
        self.alive = [True] * len(world.lags_s)
        self.draining = [False] * len(world.lags_s)
        self.running: dict[int, Running] = {}
        self.kept: dict[int, tuple[int, int]] = {}  # id -> (version at admission, head)
        self.attempts: dict[int, Attempt] = {}
        self.replay: list[tuple[int, ...]] = []
        self.relaunch: list[int] = []  # running groups whose engine died, or that an earlier process had begun
        self.training: tuple[tuple[int, ...], bool] | None = None
        self.finished = False

    def run(self) -> "VirtualLoop":
        for _ in range(100_000):
            self.plan()
            if self.finished:
                break
            self.admit()
            self.check()
            assert self.events, ("deadlock", self.world, self.trained, self.served, self.kept, self.running)
            self.now, _, kind, args = heapq.heappop(self.events)
            if self.now < self.paused_until and kind in ("first", "done", "load"):
                self.at(self.paused_until - self.now, kind, *args)
            else:
                getattr(self, f"on_{kind}")(*args)
            self.check()
        assert self.finished, ("no end", self.world)
        self.check_end()
        return self

    # --- the parts of the loop

    def at(self, delay_s: float, kind: str, *args: int) -> None:
        self.scheduled += 1
        heapq.heappush(self.events, (self.now + delay_s, self.scheduled, kind, args))

    def open_engines(self) -> list[int]:
        return [e for e in range(len(self.served)) if self.alive[e] and not self.draining[e]]

    @property
    def prompts_left(self) -> bool:
        return bool(self.reissue) or self.world.prompts is None or self.next_group < self.world.prompts

    def admit(self) -> None:
        engines = self.open_engines()
        if self.now < self.paused_until or not engines:
            return
        served = min(self.served[e] for e in engines)
        relaunch, self.relaunch = self.relaunch, []
        for group in relaunch:
            self.launch(group, engines)
        for _ in range(self.gate.capacity(self.trained, served).groups):
            if not self.prompts_left:
                return
            if self.reissue:
                group = self.reissue.pop(0)
            else:
                group = self.next_group
                self.next_group += 1
            self.gate.admit(group)
            self.planner.admitted(group, served)
            self.running[group] = Running(served, self.now)
            self.launch(group, engines)

    def launch(self, group: int, engines: list[int]) -> None:
        if self.world.quorum is not None:
            self.at(self.world.straggler_timeout_s, "straggler", group)
        engine = self.rng.choice(engines)
        for sample in range(self.world.G):
            if sample not in self.running[group].heads and sample not in self.running[group].given_up:
                self.attempt(Attempt(group, sample, 0, engine))

    def attempt(self, attempt: Attempt) -> None:
        self.scheduled += 1
        uid = self.scheduled
        self.attempts[uid] = attempt
        self.running[attempt.group].attempts.add(uid)
        self.begin(uid)

    def begin(self, uid: int) -> None:
        attempt = self.attempts[uid]
        duration_s = self.duration_s(attempt)
        first_s = duration_s * self.rng.random() if self.world.late_tokens else 0.0
        if first_s:
            self.at(first_s, "first", uid, attempt.engine)
        else:
            attempt.head = self.served[attempt.engine]
        self.at(duration_s, "done", uid, attempt.engine)

    def duration_s(self, attempt: Attempt) -> float:
        return LAWS[self.world.law](self.rng)

    def on_first(self, uid: int, engine: int) -> None:
        attempt = self.attempts.get(uid)
        if attempt is not None and attempt.head is None:
            attempt.head = self.served[engine]

    def on_done(self, uid: int, engine: int) -> None:
        attempt = self.attempts.get(uid)
        if attempt is None:
            return  # cancelled, or lost with its engine
        if attempt.head is None:
            attempt.head = self.served[engine]
        group = self.running[attempt.group]
        del self.attempts[uid]
        group.attempts.remove(uid)
        failing = fate(self.world, attempt.group)[1][attempt.sample]
        if attempt.failed_before < failing and attempt.failed_before < self.world.max_retries:
            # Retried alone, from its pristine prompt; it keeps its place.
            self.attempt(Attempt(attempt.group, attempt.sample, attempt.failed_before + 1, attempt.engine))
        else:
            self.gate.trajectory_ended(attempt.group)
            if attempt.failed_before < failing:
                group.given_up.add(attempt.sample)
            else:
                group.heads[attempt.sample] = attempt.head
            self.settle(attempt.group)
        self.load_if_empty(engine)

    def on_straggler(self, group: int) -> None:
        if group in self.running and group not in self.relaunch:
            self.settle(group)

    def settle(self, group_id: int) -> None:
        """Finish the group if all its samples are in, or a quorum is and the time is up; fail it if it can't."""
        world, group = self.world, self.running[group_id]
        needed = world.G if world.quorum is None else world.quorum
        if world.G - len(group.given_up) < needed:
            self.leave_running(group_id)
            self.end(group_id, "failed")
            return
        timed_out = world.quorum is not None and self.now >= group.admitted_s + world.straggler_timeout_s
        if len(group.heads) + len(group.given_up) == world.G or (timed_out and len(group.heads) >= needed):
            self.leave_running(group_id)
            if fate(world, group_id)[0]:
                self.gate.keep(group_id)
                self.planner.keep(group_id, min(group.heads.values()))
                self.kept[group_id] = self.heads[group_id] = (group.version, min(group.heads.values()))
            else:
                self.end(group_id, "filtered")

    def leave_running(self, group_id: int) -> None:
        engines = set()
        for uid in self.running.pop(group_id).attempts:
            engines.add(self.attempts.pop(uid).engine)
        for engine in engines:
            self.load_if_empty(engine)

    def end(self, group_id: int, outcome: str) -> None:
        self.gate.end(group_id)
        self.planner.end(group_id)
        self.record(group_id, outcome)

    def record(self, group_id: int, outcome: str) -> None:
        assert group_id not in self.outcome, (group_id, self.outcome[group_id], outcome)
        self.outcome[group_id] = outcome

    # --- the engines

    def on_load(self, engine: int, version: int) -> None:
        if not self.alive[engine] or version <= self.served[engine]:
            return
        if self.world.drain:
            self.draining[engine] = True
            self.load_if_empty(engine)
        else:
            self.served[engine] = version

    def load_if_empty(self, engine: int) -> None:
        if self.draining[engine] and not any(a.engine == engine for a in self.attempts.values()):
            self.reopen(engine)

    def reopen(self, engine: int) -> None:
        """An engine that drained takes new groups again, at the current version."""
        self.served[engine] = self.trained
        self.draining[engine] = False

    def on_death(self, engine: int) -> None:
        """All groups of the engine are lost whole; the samples they finished are not."""
        if not self.alive[engine]:
            return
        self.alive[engine] = False
        self.draining[engine] = False
        self.at(self.rng.uniform(0.0, 3.0), "restart", engine)
        for group in sorted({a.group for a in self.attempts.values() if a.engine == engine}):
            for uid in self.running[group].attempts:
                del self.attempts[uid]
            self.running[group].attempts.clear()
            self.relaunch.append(group)

    def on_restart(self, engine: int) -> None:
        """It is up again and begins to load what is the newest version now; it opens when that is done."""
        self.at(self.world.lags_s[engine] * self.rng.random(), "return", engine, self.trained)

    def on_return(self, engine: int, version: int) -> None:
        if version < max(self.served):
            self.on_restart(engine)  # another one moved on: engines load in turn, so that none opens behind another
            return
        self.served[engine] = version
        self.alive[engine] = True
        if version < self.trained:  # what was published meanwhile passed it by
            self.at(self.world.lags_s[engine] * self.rng.random(), "load", engine, self.trained)

    # --- the trainer

    def plan(self) -> None:
        world = self.world
        if self.training is not None or self.finished:
            return
        if self.trained == world.steps:
            self.finished = True
            return
        if self.replay:
            groups = self.replay[0]
            self.training = groups, True
            assert world.policy != "wait" or all(self.trained - self.heads[g][1] <= self.S for g in groups), world
        else:
            plan = self.planner.plan(self.trained, exhausted=not self.prompts_left, short_ok=world.short_ok)
            if not plan.groups:
                self.finished = not plan.waiting_for
                return
            groups = plan.groups
            heads = [self.kept[g][1] for g in groups]
            assert list(zip(heads, groups, strict=True)) == sorted(zip(heads, groups, strict=True))
            assert len(groups) == world.B or not self.prompts_left
            for head in heads:
                age = self.trained - head
                assert age >= 0, (age, world)
                assert world.policy != "wait" or age <= self.S, (age, world)
                self.ages.append(age)
            updated = not skipped(world, len(self.batches))
            self.batches.append((self.trained, groups, updated))
            self.training = groups, updated
        if self.trained == world.kill_at and not self.killed:
            self.kill()
        else:
            self.at(world.train_s * self.rng.uniform(0.5, 1.5), "step")

    def on_step(self) -> None:
        groups, updated = self.training
        self.training = None
        for group in groups:
            if self.replay:
                self.record(group, "trained")
            else:
                del self.kept[group]
                self.end(group, "trained" if updated else "dropped")
        if not updated:
            return
        self.trained += 1
        if self.replay:
            self.replay.pop(0)
            if not self.replay:
                self.restart_engines()
            return
        for engine, lag_s in enumerate(self.world.lags_s):
            if lag_s:
                self.at(lag_s * self.rng.random(), "load", engine, self.trained)
            else:
                self.on_load(engine, self.trained)
            if self.rng.random() < self.world.deaths:
                self.at(self.rng.uniform(0.0, 3.0), "death", engine)
        if self.rng.random() < self.world.pauses:
            self.paused_until = self.now + self.rng.uniform(0.0, 5.0)
            self.at(self.paused_until - self.now, "resumed")

    def on_resumed(self) -> None:
        """The pause is over: nothing to do but admit again."""

    def kill(self) -> None:
        """Kill -9 while a batch trains, then resume: recorded batches again, kept carried, running under their ids.

        The engines stay closed until the recorded batches are trained, and open at the version these lead to: admitted
        earlier, new groups would need steps that the record has taken.
        """
        self.killed = True
        kept, running, (groups, _) = self.kept, self.running, self.training
        checkpoint = self.trained - self.trained % self.world.checkpoint_every
        again = [ids for version, ids, updated in self.batches if version >= checkpoint and updated]
        if not self.batches[-1][2]:  # whether it would have updated is not known before it did
            again.append(groups)
            self.batches[-1] = (*self.batches[-1][:2], True)
        for ids in again:
            for group in ids:
                self.outcome.pop(group, None)
        self.events = []
        self.paused_until = 0.0
        if self.world.resume_s is not None:
            self.S = self.world.resume_s
            self.W = min(self.W, self.S)
            self.f = self.f if self.W < self.S else 1.0
        self.start(version=checkpoint)
        recovery, self.reissued, withdrawn = within_bound(
            Recovery(
                version=checkpoint,
                next_group_id=self.next_group,
                batches=tuple(tuple(self.finished_group(group) for group in ids) for ids in again),
                kept=tuple(self.finished_group(group) for group in sorted(kept) if group not in groups),
                unfinished=tuple(
                    (group, {sample: trajectory(head) for sample, head in running[group].heads.items()})
                    for group in sorted(running)
                ),
            ),
            batch_size=self.world.B,
            group_size=self.world.G,
            max_staleness=self.S,
        )
        if withdrawn is not None:
            self.batches = [b for b in self.batches if b[0] < withdrawn or not b[2]]
        self.replay = [tuple(group.id for group in groups) for groups in recovery.batches]
        self.alive = [False] * len(self.served)
        # Samples that finished are not generated again, so their groups are as old as before. Gate and planner must
        # know them before anything new comes in, or a batch may go that leaves them no step in time.
        self.reissue = []
        for group, landed in recovery.unfinished:
            if not landed:
                self.reissue.append(group)
                continue
            heads = {sample: t.head for sample, t in landed.items()}
            self.gate.admit(group)
            for _ in landed:
                self.gate.trajectory_ended(group)
            self.planner.admitted(group, min(heads.values()))
            self.running[group] = Running(min(heads.values()), self.now, heads)
            self.relaunch.append(group)
        for group in (g.id for g in recovery.kept):
            version, head = self.heads[group]
            self.gate.restore_kept(group)
            self.planner.admitted(group, version)
            self.planner.keep(group, head)
            self.kept[group] = (version, head)
        if not self.replay:  # every recorded batch was withdrawn: the engines open at the checkpoint's version
            self.restart_engines()
        self.plan()

    def finished_group(self, group: int) -> Group:
        version, head = self.heads[group]
        return Group(group, Prompt("", "", {}), version, (trajectory(head),))

    def restart_engines(self) -> None:
        for engine, lag_s in enumerate(self.world.lags_s):
            self.at(lag_s * self.rng.random(), "restart", engine)

    # --- the promises

    def check(self) -> None:
        world = self.world
        in_system = len(self.running) + len(self.kept)
        assert world.policy == "allow" or in_system <= (self.S + 1) * world.B, (in_system, world)
        assert self.gate.running_groups == len(self.running)
        assert self.gate.kept_groups == len(self.kept)
        relaunch = [self.running[group] for group in self.relaunch]
        to_relaunch = sum(world.G - len(group.heads) - len(group.given_up) for group in relaunch)
        assert self.gate.running_trajectories == len(self.attempts) + to_relaunch <= world.C, world

    def check_end(self) -> None:
        world = self.world
        if world.prompts is None:
            assert self.trained == world.steps
            assert not self.running, ("left over at the horizon", world)
            assert not self.kept, ("left over at the horizon", world)
        elif self.trained != world.steps:
            assert not self.running
            assert len(self.kept) < world.B, world
            assert not (world.short_ok and self.kept)
        for group in list(self.kept):
            del self.kept[group]
            self.end(group, "dropped")
        for group in list(self.running):
            self.leave_running(group)
            self.end(group, "dropped")
        # `record` saw each group at most once; every group was seen, and every place is free again.
        assert sorted(self.outcome) == list(range(self.next_group))
        assert (self.gate.running_groups, self.gate.running_trajectories, self.gate.kept_groups) == (0, 0, 0)
        assert self.gate.capacity(self.trained, self.trained).groups == self.free_capacity()
        assert self.planner.plan(self.trained, exhausted=True, short_ok=True) == ((), "")

    def free_capacity(self) -> int:
        world = self.world
        terms = [world.C // world.G, math.ceil((self.W + 1) * world.B * self.f)]
        if world.policy != "allow":
            terms.append((self.S + 1) * world.B)
        if world.steps is not None:
            terms.append((world.steps - self.trained) * world.B)
        return min(terms)


def trajectory(head: int) -> Trajectory:
    return Trajectory(0, 0, [1, 2], [0, 1], [0.0, 0.0], (Segment(head, 1, 2),), 1, 0.0)
