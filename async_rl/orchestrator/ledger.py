"""Ledger: the record of the run in SQLite - every admitted group, what it brought, how it ended, and every batch.

Nothing is updated in place: an admission, a finished trajectory, a kept group and an ending are a row each, so a group
can't end twice (its ending has its id as primary key) and a process that is killed leaves whole transactions only.
"""

from __future__ import annotations

import json
import sqlite3
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from async_rl.orchestrator.ledger_archiver import LedgerArchiver
from async_rl.orchestrator.ledger_null import NullLedger
from async_rl.orchestrator.ledger_reader import LedgerReader
from async_rl.orchestrator.ledger_rows import (
    COLUMNS,
    SCHEMA,
    LedgerError,
    check_schema,
    reading,
    to_json,
    trajectory_row,
)
from async_rl.orchestrator.records import Archive, Balance, Flight, Recovery
from async_rl.types import Batch, Group, Outcome, Trajectory

_MOST_VALUES = 30_000  # SQLite's limit on the values of one statement is 32,766


class Ledger:
    """Writes through one thread that commits whatever is waiting in one transaction; callers only queue.

    Commits are synced to the disk, for the record must never be older than a checkpoint. Readers may open the file at
    any time (``sqlite3 run.db "select * from groups"``).

    Once a batch has ended, the payload (prompt, trajectories) of its groups, and of those that were filtered, failed or
    dropped since, moves to the batch's file in the archive. That happens when the next batch has just been recorded, so
    while it is trained: nobody waits for it.

    Args:
        path: The file, usually ``<run_dir>/run.db``; created if missing.
        archive: Where payloads go; ``None``: they stay.

    Raises:
        LedgerError: The file can't be opened, or another version of async-rl wrote it.
    """

    def __init__(self, path: str | Path, archive: Archive | None = None) -> None:
        self.path = Path(path)
        self._changed = threading.Condition()
        self._pending: list[tuple[str, Any]] = []
        self._to_archive: deque[int] = deque()
        self._seconds = 0.0
        self._stopping = False
        self._running = False
        try:
            self._db = sqlite3.connect(self.path, check_same_thread=False, isolation_level=None, cached_statements=256)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=FULL")
            check_schema(self._db, self.path)
            self._db.executescript(SCHEMA)
            (self._holds_a_run,) = self._db.execute("SELECT EXISTS (SELECT 1 FROM admissions)").fetchone()
        except sqlite3.Error as error:
            raise LedgerError(f"can't open the run's record {self.path}: {error}") from error
        self._reader = LedgerReader(self._db, self.path, archive)
        self._archiver = LedgerArchiver(self._db, self._reader, archive)

    # before the run, on the caller's thread

    def meta(self) -> dict[str, Any]:
        """What :meth:`set_meta` wrote, also in an earlier process."""
        return {key: json.loads(value) for key, value in self._db.execute("SELECT key, value FROM meta")}

    def set_meta(self, values: Mapping[str, Any]) -> None:
        """Write facts about the run, JSON values by name; on the disk when it returns. Before :meth:`run`."""
        with self._transaction():
            self._write_meta(list(values.items()))

    def has_work(self, version: int) -> bool:
        """Whether :meth:`recover` at ``version`` will find something to train or to finish; before :meth:`run`."""
        return self._reader.has_work(version)

    def recover(self, version: int) -> Recovery:
        """Read what the run left, as of its checkpoint at ``version``, and re-open what goes on; before :meth:`run`.

        Batches recorded from ``version`` on are to be trained again; groups saved at a clean end are open again.

        Raises:
            LedgerError: A batch's group is not complete in the record, or the file can't be read.
        """
        with self._transaction():
            self._reopen(version)
            recovery = self._reader.recovery(version)
        self._holds_a_run = False
        return recovery

    def withdraw(self, version: int) -> None:
        """Recorded batches from ``version`` on are not trained again: their groups wait to be planned anew.

        Between :meth:`recover` and :meth:`run`.
        """
        with self._transaction():
            self._db.execute(
                "UPDATE batches SET outcome = ?, reason = 'withdrawn', ended_s = ? "
                "WHERE version >= ? AND outcome IS NULL",
                (str(Outcome.DROPPED), time.time(), version),
            )

    def forget(self, group_ids: Sequence[int]) -> None:
        """Delete what open groups brought; they stay admitted, to be run again from scratch.

        Between :meth:`recover` and :meth:`run`.
        """
        with self._transaction():
            for table in ("trajectories", "keeps"):
                self._db.executemany(f"DELETE FROM {table} WHERE group_id = ?", [(i,) for i in group_ids])

    # what happens: queued, from any thread

    def note(self, values: Mapping[str, Any]) -> None:
        """Write facts about the run as :meth:`set_meta` does, while :meth:`run` goes on."""
        self._queue("meta", list(values.items()))

    def admit(self, flights: Sequence[Flight]) -> None:
        """Groups were admitted, or re-issued under their old id."""
        self._queue("admissions", flights)

    def land(self, trajectories: Sequence[tuple[int, Trajectory]]) -> None:
        """Trajectories of running groups finished."""
        self._queue("trajectories", trajectories)

    def keep(self, groups: Sequence[Group]) -> None:
        """Groups are complete and wait to be trained."""
        self._queue("keeps", groups)

    def end(self, endings: Sequence[tuple[int, Outcome, str]]) -> None:
        """Groups are out, with outcome and reason."""
        self._queue("endings", endings)

    def record_batch(self, batch: Batch) -> threading.Event:
        """Write a batch down; the event is set once it is on the disk."""
        written = threading.Event()
        self._queue("batches", [(batch, written)])
        return written

    def end_batch(self, batch: Batch, outcome: Outcome, reason: str) -> None:
        """A recorded batch was trained or dropped, and its groups with it."""
        self._queue("batch endings", [(batch, outcome, reason)])

    def _queue(self, kind: str, items: Sequence[Any]) -> None:
        if items:
            with self._changed:
                if not self._stopping:
                    self._pending.append((kind, (time.time(), items)))
                    self._changed.notify()

    # the writer thread

    def run(self) -> None:
        """The writer thread's body: one transaction for whatever is waiting, until :meth:`stop` and nothing waits.

        Raises:
            RunError: A write failed, or the file holds another run that was not recovered; names the file.
        """
        if self._holds_a_run:
            raise LedgerError(f"{self.path} is the record of an earlier run: resume it, or use another run_dir")
        with self._changed:
            self._running = True
        try:
            self._to_archive.extend(self._archiver.unfinished())
            while self._wait():
                began_s = time.monotonic()
                recorded = self._commit()
                if recorded or self._stopping:
                    self._move_payloads()
                with self._changed:
                    self._seconds += time.monotonic() - began_s
        finally:
            with self._changed:
                self._running = False
                self._changed.notify_all()

    def _wait(self) -> bool:
        """Wait for something to do; whether there is something."""
        with self._changed:
            while not self._pending and not self._stopping:
                self._changed.wait()
            return bool(self._pending or self._to_archive)

    def _commit(self) -> bool:
        """Write what is waiting; whether a batch was recorded, which is what the training thread waits for."""
        with self._changed:
            pending, self._pending = self._pending, []
        if not pending:
            return False
        queued: defaultdict[str, list[tuple[float, Any]]] = defaultdict(list)
        for kind, (at_s, items) in pending:
            queued[kind].extend((at_s, item) for item in items)
        with self._transaction():
            self._write(queued)
        for _, (_, written) in queued["batches"]:
            written.set()
        return bool(queued["batches"])

    def _write(self, queued: Mapping[str, list[tuple[float, Any]]]) -> None:
        # Within one transaction the order of kinds is the order of a group's life.
        admitted = queued["admissions"]
        admissions = [
            (f.group_id, f.prompt.id, f.prompt.environment, f.version, f.slot.index, at_s) for at_s, f in admitted
        ]
        self._insert("admissions", admissions, "INSERT OR REPLACE")
        prompts = [(f.group_id, to_json(f.prompt.data)) for _, f in admitted]
        self._insert("prompts", prompts, "INSERT OR REPLACE")
        self._insert("trajectories", [trajectory_row(i, t) for _, (i, t) in queued["trajectories"]])
        self._insert("keeps", [(g.id, g.head, g.tail, at_s) for at_s, g in queued["keeps"]])
        endings = [(i, str(outcome), reason, at_s) for at_s, (i, outcome, reason) in queued["endings"]]
        self._insert("endings", endings)
        for at_s, (batch, _) in queued["batches"]:
            self._db.execute(
                "INSERT INTO batches (version, group_ids, advantages, planned_s) VALUES (?, ?, ?, ?)",
                (batch.version, _ids(batch), to_json(batch.advantages), at_s),
            )
        for at_s, (batch, outcome, reason) in queued["batch endings"]:
            self._end_batch(batch, outcome, reason, at_s)
        self._write_meta([item for _, item in queued["meta"]])

    def _write_meta(self, items: Sequence[tuple[str, Any]]) -> None:
        rows = [(key, to_json(value)) for key, value in items]
        self._db.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", rows)

    def _end_batch(self, batch: Batch, outcome: Outcome, reason: str, at_s: float) -> None:
        self._insert("endings", [(group.id, str(outcome), reason, at_s) for group in batch.groups])
        (batch_id,) = self._db.execute(
            "SELECT batch_id FROM batches WHERE group_ids = ? ORDER BY batch_id DESC LIMIT 1", (_ids(batch),)
        ).fetchone()
        # Trained again after a resume it may be at another version: one before it may make no update this time.
        self._db.execute(
            "UPDATE batches SET version = ?, outcome = ?, reason = ?, ended_s = ? WHERE batch_id = ?",
            (batch.version, str(outcome), reason, at_s, batch_id),
        )
        files = self._archiver.assign(batch_id, [group.id for group in batch.groups])
        self._to_archive.extend(file for file in files if file not in self._to_archive)

    def _insert(self, table: str, rows: Sequence[tuple[Any, ...]], verb: str = "INSERT") -> None:
        """Many rows per statement: every call into SQLite gives up the interpreter lock, and a busy loop keeps it long.

        Row counts are powers of two, so that few statements are prepared.
        """
        columns = COLUMNS[table]
        begin = 0
        while begin < len(rows):
            count = min(len(rows) - begin, _MOST_VALUES // len(columns))
            count = 1 << (count.bit_length() - 1)
            one = f"({','.join('?' * len(columns))})"
            self._db.execute(
                f"{verb} INTO {table} ({','.join(columns)}) VALUES {','.join([one] * count)}",
                [value for row in rows[begin : begin + count] for value in row],
            )
            begin += count

    def _move_payloads(self) -> None:
        while self._to_archive:
            with self._changed:
                if any(kind == "batches" for kind, _ in self._pending):
                    return  # the training thread waits for its batch to be recorded
            with self._transaction():
                self._archiver.move(self._to_archive[0])
            self._to_archive.popleft()

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        try:
            self._db.execute("BEGIN IMMEDIATE")
            yield
            self._db.execute("COMMIT")
        except sqlite3.Error as error:
            raise LedgerError(
                f"can't write the run's record {self.path}: {error}; what was committed before is kept"
            ) from error
        finally:
            if self._db.in_transaction:
                self._db.rollback()

    def _reopen(self, version: int) -> None:
        db, trained, dropped, now_s = self._db, str(Outcome.TRAINED), str(Outcome.DROPPED), time.time()
        db.execute("DELETE FROM endings WHERE outcome = ?", (str(Outcome.SAVED),))
        again = "WHERE version >= ? AND outcome IS NOT ?"
        db.execute(
            f"DELETE FROM endings WHERE group_id IN (SELECT value FROM batches, json_each(batches.group_ids) {again})",
            (version, dropped),
        )
        db.execute(f"UPDATE batches SET outcome = NULL, reason = NULL, ended_s = NULL {again}", (version, dropped))
        # The checkpoint has what was trained before it, even where the process died before it wrote the ending.
        for batch_id, text in db.execute(
            "SELECT batch_id, group_ids FROM batches WHERE version < ? AND outcome IS NULL", (version,)
        ).fetchall():
            ids = json.loads(text)
            db.executemany("INSERT OR IGNORE INTO endings VALUES (?, ?, '', ?)", [(i, trained, now_s) for i in ids])
            db.execute("UPDATE batches SET outcome = ?, ended_s = ? WHERE batch_id = ?", (trained, now_s, batch_id))
            self._archiver.assign(batch_id, ids)

    def stop(self) -> None:
        """Take nothing more in; :meth:`run` returns once everything queued is written."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    def close(self, timeout_s: float = 10.0) -> None:
        """Stop, wait for the writer, close the file. Idempotent."""
        self.stop()
        with self._changed:
            if self._changed.wait_for(lambda: not self._running, timeout_s):
                self._db.close()

    # reading, from any thread

    def balance(self) -> Balance:
        """Admitted groups and endings as committed so far, read through a connection of its own."""
        with reading(self.path) as db:
            return LedgerReader(db, self.path, None).balance()

    def take_seconds(self) -> float:
        """Seconds the writer spent since the last call, transactions and archive."""
        with self._changed:
            seconds, self._seconds = self._seconds, 0.0
            return seconds


def _ids(batch: Batch) -> str:
    return to_json([group.id for group in batch.groups])


AnyLedger = Ledger | NullLedger
