"""EvalSink: samples of evaluation prompts, run beside the training groups and counted against nothing of theirs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

from async_rl.orchestrator.records import EngineSlot, Flight, Landing, RolloutFn, reason_of
from async_rl.types import EvalResult, Prompt

if TYPE_CHECKING:
    from async_rl.orchestrator.fleet import Fleet
    from async_rl.orchestrator.room import Room
    from async_rl.orchestrator.waiting import MainThread, Poll


class Evaluation:
    """One evaluation; its rollouts count against no gate, age or ledger.

    Each sample is a flight of its own, so that a failure costs no other sample, in turn on the engines that serve the
    version; one whose engine died is launched again. Its group id is negative.

    Args:
        version: What is evaluated.
        prompts: What to evaluate.
        samples: Samples per prompt, ``>= 1``.
        rollout: What runs one attempt.
        slots: The engines that evaluate.
        first_id: Group id of the first sample, ``< 0``; ids go down from it.
    """

    def __init__(
        self,
        version: int,
        prompts: Sequence[Prompt],
        samples: int,
        rollout: RolloutFn,
        slots: Sequence[EngineSlot],
        first_id: int,
    ) -> None:
        self._version = version
        self._slots = slots
        self._prompts = prompts
        self._samples = samples
        self._rollout = rollout
        self._first_id = first_id
        self._waiting = deque(range(self.total))
        self._flying = 0
        self._landed: dict[int, Flight] = {}

    @property
    def total(self) -> int:
        """Samples in all."""
        return len(self._prompts) * self._samples

    @property
    def over(self) -> bool:
        """Whether every sample is over."""
        return len(self._landed) == self.total

    def launch(self, max_concurrent: int) -> list[Flight]:
        """The next flights, so that at most ``max_concurrent`` samples are in the air; none while no engine serves."""
        slots = [slot for slot in self._slots if slot.loaded and slot.served.value >= self._version]
        flights: list[Flight] = []
        while slots and self._waiting and self._flying < max_concurrent:
            n = self._waiting.popleft()
            self._flying += 1
            slot = slots[n % len(slots)]
            flights.append(
                Flight(
                    group_id=self._first_id - n,
                    prompt=self._prompts[n // self._samples],
                    version=slot.served.value,
                    slot=slot,
                    incarnation=slot.incarnation,
                    rollout=self._rollout,
                    missing=(n % self._samples,),
                    landed={},
                    needed=0,
                )
            )
        return flights

    def land(self, flight: Flight) -> None:
        """Take a flight that is over; one of another evaluation is ignored."""
        n = self._first_id - flight.group_id
        if 0 <= n < self.total:
            self._flying -= 1
            self._landed[n] = flight

    def lose(self, flight: Flight) -> None:
        """Take a flight whose engine died; one of another evaluation is ignored."""
        n = self._first_id - flight.group_id
        if 0 <= n < self.total:
            self._flying -= 1
            self._waiting.append(n)

    def results(self) -> list[EvalResult]:
        """One result per prompt, in order."""
        results = []
        for i, prompt in enumerate(self._prompts):
            flights = [self._landed[i * self._samples + sample] for sample in range(self._samples)]
            trajectories = tuple(t for f in flights for t in f.landed.values())
            errors = [e for f in flights for e in f.given_up.values()]
            failures = tuple(f"{reason_of(e)}: {e}" for e in errors)
            results.append(EvalResult(prompt, trajectories, failures, next(iter(errors), None)))
        return results


class EvalSink:
    """Runs evaluations, and is where what they sampled ends, whole and unfiltered.

    Args:
        room: The lock and its conditions.
        main: How the main thread waits.
        fleet: The engines; those that only evaluate are taken, without any all of them.
        max_concurrent: Most samples in the air.
        launch: Hands flights to the rollout threads.
    """

    def __init__(
        self,
        room: Room,
        main: MainThread,
        fleet: Fleet,
        *,
        max_concurrent: int,
        launch: Callable[[Sequence[Flight]], None],
    ) -> None:
        apart = [slot for slot in fleet.slots if slot.evaluates]
        self._room = room
        self._main = main
        self._fleet = fleet
        self._slots = apart or list(fleet.slots)
        self._apart = bool(apart)
        self._max_concurrent = max_concurrent
        self._launch = launch
        self._going_on: list[Evaluation] = []
        self._next_id = -1

    def evaluate(
        self,
        version: int,
        prompts: Sequence[Prompt],
        samples: int,
        rollout: RolloutFn,
        poll: Poll,
        ready: Callable[[], None],
    ) -> list[EvalResult]:
        """Sample every prompt ``samples`` times, at most ``max_concurrent`` at once; from the main thread.

        Engines for evaluations alone are loaded, and the others do as they do. Without any, all engines sample, and no
        load is applied meanwhile.

        Args:
            version: With which weights: those published last.
            prompts: What to sample.
            samples: How often, ``>= 1``.
            rollout: What runs one attempt.
            poll: Called at least ten times a second; what it raises ends the evaluation.
            ready: Called once every living engine that evaluates serves ``version``.

        Returns:
            One result per prompt, in order; failures are listed beside the finished samples.
        """
        with self._awake():
            self._fleet.wait_served(version, poll, self._slots)
            with nullcontext() if self._apart else self._fleet.hold_loads():
                ready()
                return self._sample(version, prompts, samples, rollout, poll)

    @contextmanager
    def _awake(self) -> Iterator[None]:
        """A context in which engines that only evaluate load what is published."""
        try:
            self._set_idle(False)
            yield
        finally:
            self._set_idle(self._apart)

    def _set_idle(self, idle: bool) -> None:
        with self._room.lock:
            for slot in self._slots:
                slot.idle = idle
            self._room.engines.notify_all()

    def _sample(
        self, version: int, prompts: Sequence[Prompt], samples: int, rollout: RolloutFn, poll: Poll
    ) -> list[EvalResult]:
        evaluation = Evaluation(version, prompts, samples, rollout, self._slots, first_id=self._next_id)
        self._next_id -= evaluation.total
        self._going_on.append(evaluation)

        def over() -> bool:
            if flights := evaluation.launch(self._max_concurrent):
                self._launch(flights)
            return evaluation.over

        try:
            self._main.wait("the evaluation", over, poll)
        finally:  # what still lands of one that was broken off is ignored
            self._going_on.remove(evaluation)
        return evaluation.results()

    def take_out(self, landing: Landing) -> bool:
        """Take the flights of evaluations out of a landing, under the room's lock; whether there were any."""
        finished = [flight for flight in landing.finished if flight.evaluates]
        lost = [flight for flight, _ in landing.lost if flight.evaluates]
        if not finished and not lost:
            return False
        for evaluation in self._going_on:
            for flight in finished:
                evaluation.land(flight)
            for flight in lost:
                evaluation.lose(flight)
        landing.finished = [flight for flight in landing.finished if not flight.evaluates]
        landing.lost = [(flight, error) for flight, error in landing.lost if not flight.evaluates]
        return True
