"""EvalSink: samples of evaluation prompts, run beside the training groups and counted against nothing of theirs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from async_rl.orchestrator.records import EngineSlot, Flight, Landing, RolloutFn, reason_of
from async_rl.orchestrator.room import Room
from async_rl.types import EvalResult, Prompt


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
            failures = tuple(f"{reason_of(e)}: {e}" for f in flights for e in f.given_up.values())
            results.append(EvalResult(prompt, trajectories, failures))
        return results


class EvalSink:
    """Where what evaluations sampled ends, whole and unfiltered.

    Args:
        slots: All engines; those that only evaluate are taken, without any all of them.
        max_concurrent: Most samples in the air.
        launch: Hands flights to the rollout threads.

    Attributes:
        slots: The engines that evaluate.
        apart: Whether they do nothing else.
    """

    def __init__(
        self, slots: Sequence[EngineSlot], *, max_concurrent: int, launch: Callable[[Sequence[Flight]], None]
    ) -> None:
        apart = [slot for slot in slots if slot.evaluates]
        self.slots = apart or list(slots)
        self.apart = bool(apart)
        self._max_concurrent = max_concurrent
        self._launch = launch
        self._going_on: list[Evaluation] = []
        self._next_id = -1

    @contextmanager
    def awake(self, room: Room) -> Iterator[None]:
        """A context in which engines that only evaluate load what is published."""
        try:
            self._set_idle(room, False)
            yield
        finally:
            self._set_idle(room, self.apart)

    def _set_idle(self, room: Room, idle: bool) -> None:
        with room.lock:
            for slot in self.slots:
                slot.idle = idle
            room.engines.notify_all()

    def run(
        self,
        version: int,
        prompts: Sequence[Prompt],
        samples: int,
        rollout: RolloutFn,
        wait: Callable[[Callable[[], bool]], None],
    ) -> list[EvalResult]:
        """One evaluation, from the main thread.

        Args:
            version: What is evaluated.
            prompts: What to evaluate.
            samples: Samples per prompt.
            rollout: What runs one attempt.
            wait: Blocks until the given function, called under the room's lock, returns ``True``.
        """
        evaluation = Evaluation(version, prompts, samples, rollout, self.slots, first_id=self._next_id)
        self._next_id -= evaluation.total
        self._going_on.append(evaluation)

        def over() -> bool:
            if flights := evaluation.launch(self._max_concurrent):
                self._launch(flights)
            return evaluation.over

        try:
            wait(over)
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
