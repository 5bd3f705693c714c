"""Orchestrator: owns and wires the parts of the control plane; the only one who knows them all."""

from __future__ import annotations

import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from async_rl.orchestrator.batches import AdvantageFn, BatchSource
from async_rl.orchestrator.books import Books
from async_rl.orchestrator.dispatcher import Dispatcher
from async_rl.orchestrator.evaluation import EvalSink
from async_rl.orchestrator.fleet import Fleet
from async_rl.orchestrator.gate import CapacityGate
from async_rl.orchestrator.ledger import AnyLedger
from async_rl.orchestrator.metrics import Meters, MetricsLoop
from async_rl.orchestrator.planner import BatchPlanner
from async_rl.orchestrator.prompts import PromptStream
from async_rl.orchestrator.records import (
    Admission,
    EmptyBatchReport,
    EngineLike,
    EngineSlot,
    Event,
    Flight,
    Landing,
    Recovery,
    RolloutFn,
)
from async_rl.orchestrator.rollouts import RolloutThread, spread
from async_rl.orchestrator.room import Room
from async_rl.orchestrator.seeds import sampling_seed
from async_rl.orchestrator.settings import OrchestratorSettings
from async_rl.orchestrator.sinks import TrainSink
from async_rl.orchestrator.stacks import describe_threads
from async_rl.orchestrator.stall import StallWatchdog
from async_rl.orchestrator.supervisor import Supervisor
from async_rl.orchestrator.version import PolicyVersion
from async_rl.orchestrator.waiting import MainThread, Poll
from async_rl.types import Batch, EvalResult, Outcome, Prompt

log = logging.getLogger(__name__)


class Orchestrator:
    """The control plane of one run: prompts in, one planned batch per step out, weights on to the engines.

    All methods but :meth:`snapshot` and :meth:`check` belong to the main thread. Those that block take a ``poll``,
    called at least ten times a second and outside every lock; what it raises ends the wait. The first failure of any
    thread is raised by whatever the main thread waits in, else by the next :meth:`check`.

    Args:
        settings: The numbers.
        engines: Started engines; none serves before its first load. There may be none where recorded batches are all
            there is to train.
        eval_engines: Started engines for evaluations alone; they load only what is evaluated. Without any, evaluations
            share the others.
        prompts: Prompt by position.
        rollout: Runs one attempt: ``(task, engine) -> trajectory``.
        advantages: Rewards nested by group to advantages nested the same way; called when a batch is formed.
        ledger: The run's record, open; closed by the caller, after :meth:`close`.
        start_version: The policy version of the weights the run starts with.
        recovered: What an earlier process left (``Ledger.recover(start_version)``).
        on_stall: Takes the report of a stall (``stall_timeout_s``), on a thread of its own; the run fails besides.

    Attributes:
        fleet: The engines: publish weights to them, wait until they serve, ask one something.

    Raises:
        ValueError: A setting is out of range, or two contradict each other.
    """

    def __init__(
        self,
        settings: OrchestratorSettings,
        *,
        engines: Sequence[EngineLike],
        eval_engines: Sequence[EngineLike] = (),
        prompts: PromptStream,
        rollout: RolloutFn,
        advantages: AdvantageFn,
        ledger: AnyLedger,
        start_version: int = 0,
        recovered: Recovery | None = None,
        on_stall: Callable[[str], None] = lambda report: None,
    ) -> None:
        if not engines and not (recovered and recovered.batches):
            raise ValueError("engine: no engine given, nothing could be sampled")
        recovery = recovered or Recovery(start_version, next_group_id=0)
        if recovery.version != start_version:
            raise ValueError(f"recovered at version {recovery.version}, but the weights are those of {start_version}")
        self.settings = s = settings
        self._ledger = ledger
        self._events: deque[Event] = deque()
        self._closed = False
        self._untrainable_in_a_row = 0

        self._room = room = Room()
        self._supervisor = Supervisor(room.wake_all)
        self._main = MainThread(room, self._supervisor)
        self._trained = PolicyVersion(start_version, name="trained version")
        emit, fail = self._events.append, self._supervisor.fail
        self.fleet = Fleet(
            room,
            self._main,
            self._supervisor,
            settings=s,
            engines=engines,
            eval_engines=eval_engines,
            start_version=start_version,
            emit=emit,
            loaded=self._loaded,
            abandon=self._abandon,
        )
        unfinished = [Admission(group_id, prompts.again(group_id), landed) for group_id, landed in recovery.unfinished]
        planner = BatchPlanner(batch_size=s.batch_size, max_staleness=s.max_staleness, stale_policy=s.stale_policy)
        self._books = Books(
            room,
            CapacityGate.of(s),
            planner,
            self._trained,
            self.fleet.train_slots,
            settings=s,
            rollout=rollout,
            recovery=recovery,
            reissue=[admission for admission in unfinished if admission.landed],
        )
        self._meters = Meters()
        self._metrics = MetricsLoop(
            self._meters, self.snapshot, interval_s=s.metrics_interval_s, supervisor=self._supervisor
        )
        self._batches = BatchSource(
            room, self._books, ledger, self._meters, settings=s, advantages=advantages, replay=recovery.batches
        )
        self._train_sink = TrainSink(self._books, ledger, self._meters, emit=emit, fail=fail, settings=s)
        self._rollout_threads = [
            RolloutThread(settings=s, make_seed=partial(sampling_seed, s.seed), land=self._land, crashed=fail)
            for _ in range(s.rollout_threads)
        ]
        launch = partial(spread, threads=self._rollout_threads, turn=itertools.count())
        self._eval_sink = EvalSink(room, self._main, self.fleet, max_concurrent=s.max_concurrent, launch=launch)
        self._stall = StallWatchdog(
            room,
            timeout_s=s.stall_timeout_s,
            numbers=lambda: self.snapshot() | {"planner": self._batches.waiting_for},
            stacks=describe_threads,
            on_stall=on_stall,
            supervisor=self._supervisor,
        )
        self._dispatcher = Dispatcher(
            room,
            self._books,
            prompts,
            reissue=[admission for admission in unfinished if not admission.landed],
            next_group_id=recovery.next_group_id,
            record=self._admitted,
            launch=launch,
            supervisor=self._supervisor,
        )

    # life

    def start(self) -> None:
        """Start the threads. Nothing is admitted before :meth:`resume`, and nothing before an engine has loaded."""
        self._supervisor.spawn("ledger", self._ledger.run)
        for i, thread in enumerate(self._rollout_threads):
            self._supervisor.spawn(f"rollout-{i}", thread.run)
        self.fleet.start()
        self._supervisor.spawn("stall", self._stall.run, may_end=True)
        self._supervisor.spawn("dispatcher", self._dispatcher.run)
        self._supervisor.spawn("metrics", self._metrics.run)

    def resume(self) -> None:
        """Open admission."""
        self._books.open_admission()

    def stop_admission(self) -> None:
        """Close admission for good."""
        self._books.end_admission()

    def drain(self, timeout_s: float, poll: Poll) -> int:
        """Stop admission, give groups in flight ``timeout_s`` to finish, and save what is finished in the ledger.

        Returns:
            How many finished groups were saved for a later run. Groups that did not finish are saved by
            :meth:`close`, to be run again.
        """
        self.stop_admission()
        self._main.wait("groups in flight", lambda: self._books.groups_in_flight == 0, poll, timeout_s=timeout_s)
        with self._room.lock:
            saved = self._books.end_kept(Outcome.SAVED)
            self._ledger.end([(group_id, Outcome.SAVED, "finished") for group_id in saved])
        return len(saved)

    def close(self, timeout_s: float) -> list[str]:
        """Stop every thread and end every group; idempotent, bounded, never raises.

        Groups that were finished end as saved(finished), those in flight as saved(unfinished), those of recorded
        batches not yet trained again as saved(recorded): a resumed run goes on with each.

        Returns:
            Names of the threads that were still running after ``timeout_s``.
        """
        if self._closed:
            return self._supervisor.join(0.0)
        deadline_s = time.monotonic() + timeout_s
        try:
            with self._room.lock:
                self._closed = True
                self._books.end_admission()
                recorded = self._batches.not_replayed()
                kept, running = self._books.end_everything(Outcome.SAVED, recorded=len(recorded))
                for reason, ids in (("recorded", recorded), ("finished", kept), ("unfinished", running)):
                    self._ledger.end([(group_id, Outcome.SAVED, reason) for group_id in ids])
            for thread in self._rollout_threads:
                thread.stop()
            self._ledger.stop()
        except Exception:
            log.exception("closing the control plane")
        self._supervisor.stop()
        return self._supervisor.join(max(deadline_s - time.monotonic(), 0.0))

    def check(self) -> None:
        """Raise the first failure of any thread, with its own traceback."""
        self._supervisor.check()

    # batches

    def next_part(self, poll: Poll) -> Batch | None:
        """Block until complete groups of the next batch can be trained ahead, or the batch itself is ready.

        Returns:
            Whole groups that will be in the batch :meth:`next_batch` returns, unless the run ends before; ``None`` when
            that has nothing to wait for any more, and at once without ``forward_backward_batch``.
        """
        if self.settings.forward_backward_batch is None:
            return None
        began_s = time.monotonic()
        self._main.wait("a batch", lambda: self._batches.ready() or bool(self._batches.part()), poll)
        self._meters.took("wait_for_batch", time.monotonic() - began_s)
        return self._batches.take_part()

    def next_batch(self, poll: Poll) -> Batch | None:
        """Block until the batch of the next step is planned and recorded.

        Returns:
            The batch at the trained version, or ``None`` when the data or the steps are over.

        Raises:
            RuntimeError: The batch before was neither trained nor dropped, or a group breaks the age bound.
        """
        began_s = time.monotonic()
        self._main.wait("a batch", self._batches.ready, poll)
        self._meters.took("wait_for_batch", time.monotonic() - began_s)
        return self._batches.take(self._main.wait_written)

    def batch_trained(self, batch: Batch) -> None:
        """The batch updated the policy: the trained version moves by one, its groups end as trained."""
        self._batches.end(batch, Outcome.TRAINED, "")
        self._stall.note(f"the batch of version {batch.version} was trained")
        self._untrainable_in_a_row = 0

    def batch_dropped(self, batch: Batch, reason: str) -> None:
        """The batch made no update: its groups end as dropped, their places come back, the version stays."""
        self._batches.end(batch, Outcome.DROPPED, reason)
        self._stall.note(f"the batch of version {batch.version} was dropped")
        if not any(t.trainable_tokens for t in batch.trajectories):
            self._untrainable_in_a_row += 1
            report = EmptyBatchReport(len(batch.groups), untrainable=True, in_a_row=self._untrainable_in_a_row)
            self._events.append(Event("empty_batch", report))

    # evaluation

    def evaluate(
        self,
        version: int,
        prompts: Sequence[Prompt],
        samples: int,
        rollout: RolloutFn,
        poll: Poll,
        ready: Callable[[], None] = lambda: None,
    ) -> list[EvalResult]:
        """Sample every prompt ``samples`` times with weights that were published (see :meth:`EvalSink.evaluate`)."""
        return self._eval_sink.evaluate(version, prompts, samples, rollout, poll, ready)

    # what happened

    def events(self) -> list[Event]:
        """What happened since the last call, in order."""
        events = []
        while self._events:
            events.append(self._events.popleft())
        return events

    def snapshot(self) -> dict[str, float | str]:
        """The gauges now; from any thread.

        Returns:
            ``running``, ``kept`` (groups), ``running_trajectories``, ``in_the_air`` (attempts), ``events`` (not yet
            told), ``trained_version``, ``served_version`` (lowest of the open engines, else of all), ``engines_open``,
            ``engine_restarts``, ``oldest_kept_age``, ``admitted``, ``limited_by``, ``waiting_for`` (``""`` while the
            trainer does not wait).
        """
        with self._room.lock:
            return {
                **self._books.gauges(),
                "in_the_air": float(sum(thread.in_the_air for thread in self._rollout_threads)),
                "events": float(len(self._events)),
                "engine_restarts": float(self.fleet.restarts),
                "limited_by": self._books.capacity()[1],
                "waiting_for": self._main.waits_for and (self._batches.waiting_for or self._main.waits_for),
            }

    def drain_metrics(self) -> dict[str, float]:
        """What happened since the last call, condensed (see :meth:`MetricsLoop.drain`).

        ``time/ledger_s`` is what the ledger's thread spent, which nobody waits for but ``time/record_batch_s`` of it.
        """
        return self._metrics.drain() | {"time/ledger_s": self._ledger.take_seconds()}

    def limits(self) -> str:
        """What bound admission over the whole run, most of the time first."""
        return self._metrics.limits()

    def outcomes(self) -> dict[str, int]:
        """Groups of the whole run: admitted, ended by outcome, and what :meth:`close` saves of them.

        That is ``running``, ``kept``, and after a resume ``reissued`` (not launched yet) and ``recorded`` (in batches
        that were not trained again yet).
        """
        with self._room.lock:
            return self._books.outcomes() | {"recorded": len(self._batches.not_replayed())}

    def state_dict(self) -> dict[str, int]:
        """What a checkpoint needs of the control plane; the ledger has the rest."""
        return {"trained_version": self._trained.value, "next_group_id": self._dispatcher.next_group_id}

    # private

    def _admitted(self, flights: Sequence[Flight]) -> None:
        self._ledger.admit(flights)
        self._meters.admitted(flights)

    def _abandon(self, slot: EngineSlot) -> None:
        for thread in self._rollout_threads:
            thread.abandon(slot)

    def _loaded(self, seconds: float, newer: bool) -> None:
        self._meters.took("load", seconds)
        if newer:  # what an engine loads that died and came back brings the run no further
            self._stall.note("an engine loaded newer weights")

    def _land(self, landing: Landing) -> None:
        if landing.outcomes or landing.evaluated:
            self._stall.note("a rollout ended")
        with self._room.lock:
            if self._closed:
                return
            for flight, error in landing.lost:
                self.fleet.died(flight.slot, flight.incarnation, error)
            if self._eval_sink.take_out(landing):
                self._room.batch.notify_all()
            self._train_sink.land(landing)
