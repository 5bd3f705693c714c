"""Dispatcher: takes prompts into the system as the gate allows, and hands their samples to the rollout threads."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from async_rl.orchestrator.records import Admission, Flight

if TYPE_CHECKING:
    from async_rl.orchestrator.books import Books
    from async_rl.orchestrator.prompts import PromptStream
    from async_rl.orchestrator.room import Room
    from async_rl.orchestrator.supervisor import Supervisor

_MOST_AT_ONCE = 256  # groups per hold of the lock, so that nobody waits long for it


class Dispatcher:
    """Admits groups whenever there is capacity; wakes by itself when a place or a version comes.

    Prompts are read outside the lock, for a data set may be slow. Groups of an earlier process come first, under their
    old ids.

    Args:
        room: The lock and its conditions.
        books: Who may come in.
        prompts: Prompt by position; a group's id is its position.
        reissue: Groups of an earlier process to run again.
        next_group_id: The first new id.
        record: Writes admissions down (before the first rollout can end).
        launch: Hands flights to the rollout threads.
        supervisor: Says when to stop, and keeps the names of waits.
    """

    def __init__(
        self,
        room: Room,
        books: Books,
        prompts: PromptStream,
        *,
        reissue: Sequence[Admission],
        next_group_id: int,
        record: Callable[[Sequence[Flight]], None],
        launch: Callable[[Sequence[Flight]], None],
        supervisor: Supervisor,
    ) -> None:
        self._room = room
        self._books = books
        self._prompts = prompts
        self._waiting = deque(reissue)
        self._next_position = next_group_id
        self._record = record
        self._launch = launch
        self._supervisor = supervisor
        self.next_group_id = next_group_id

    def run(self) -> None:
        """The thread's body; returns when the supervisor says stop."""
        while self._wait_for_capacity():
            self._read_ahead()
            flights = self._books.admit(self._waiting)
            if flights:
                self.next_group_id = max(self.next_group_id, flights[-1].group_id + 1)
                self._record(flights)
                self._launch(flights)

    def _wait_for_capacity(self) -> int:
        with self._room.lock:
            while not self._supervisor.stopping.is_set():
                groups, limited_by = self._books.capacity()
                if groups > 0:
                    return groups
                with self._supervisor.waiting(f"capacity (limited by {limited_by})"):
                    self._room.capacity.wait(timeout=5.0)
        return 0

    def _read_ahead(self) -> None:
        groups = min(self._books.capacity()[0], _MOST_AT_ONCE)
        while len(self._waiting) < groups:
            prompt = self._prompts.at(self._next_position)
            if prompt is None:
                if not self._waiting:
                    self._books.end_prompts()
                return
            self._waiting.append(Admission(self._next_position, prompt, {}))
            self._next_position += 1
