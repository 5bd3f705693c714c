"""Ledger: the record of the run in SQLite - every admitted group, what it brought, how it ended, and every batch.

Nothing is updated in place: an admission, a finished trajectory, a kept group and an ending are a row each, so a group
can't end twice (its ending has its id as primary key) and a process that is killed leaves whole transactions only.
"""

from __future__ import annotations

import json
import sqlite3
import threading
import time
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from async_rl.orchestrator.records import Balance, Flight, Recovery
from async_rl.types import Batch, Group, Outcome, Prompt, RunError, Segment, Trajectory

_SCHEMA = """
CREATE TABLE IF NOT EXISTS admissions (group_id INTEGER PRIMARY KEY, prompt_id TEXT NOT NULL, environment TEXT NOT NULL,
    version INTEGER NOT NULL, engine INTEGER NOT NULL, admitted_s REAL NOT NULL);
CREATE TABLE IF NOT EXISTS trajectories (group_id INTEGER NOT NULL, sample_index INTEGER NOT NULL,
    attempt INTEGER NOT NULL, token_ids BLOB NOT NULL, loss_mask BLOB NOT NULL, logprobs BLOB NOT NULL,
    segments TEXT NOT NULL, prompt_length INTEGER NOT NULL, reward REAL NOT NULL, reward_parts TEXT NOT NULL,
    finish_reason TEXT NOT NULL, completion TEXT NOT NULL, turns INTEGER NOT NULL, started_s REAL NOT NULL,
    ended_s REAL NOT NULL, PRIMARY KEY (group_id, sample_index));
CREATE TABLE IF NOT EXISTS keeps (group_id INTEGER PRIMARY KEY, prompt TEXT NOT NULL, head INTEGER, tail INTEGER,
    kept_s REAL NOT NULL);
CREATE TABLE IF NOT EXISTS endings (group_id INTEGER PRIMARY KEY, outcome TEXT NOT NULL, reason TEXT NOT NULL,
    ended_s REAL NOT NULL);
CREATE TABLE IF NOT EXISTS batches (batch_id INTEGER PRIMARY KEY, version INTEGER NOT NULL, group_ids TEXT NOT NULL,
    advantages TEXT NOT NULL, planned_s REAL NOT NULL, outcome TEXT, reason TEXT, ended_s REAL);
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE VIEW IF NOT EXISTS groups AS SELECT a.group_id, a.prompt_id, a.environment, a.version AS admitted_version,
    a.engine, k.head, k.tail, e.outcome, e.reason, a.admitted_s, k.kept_s, e.ended_s
    FROM admissions a LEFT JOIN keeps k USING (group_id) LEFT JOIN endings e USING (group_id);
"""
_COLUMNS = {
    "admissions": ("group_id", "prompt_id", "environment", "version", "engine", "admitted_s"),
    "trajectories": (
        "group_id", "sample_index", "attempt", "token_ids", "loss_mask", "logprobs", "segments", "prompt_length",
        "reward", "reward_parts", "finish_reason", "completion", "turns", "started_s", "ended_s",
    ),
    "keeps": ("group_id", "prompt", "head", "tail", "kept_s"),
    "endings": ("group_id", "outcome", "reason", "ended_s"),
}  # fmt: skip
_to_json = json.JSONEncoder(default=str).encode  # one encoder for all rows: json.dumps makes one per call
_SCHEMA_VERSION = 2
_MOST_VALUES = 30_000  # SQLite's limit on the values of one statement is 32,766


class LedgerError(RunError):
    """The run's record can't be written or read; names the file."""


class Ledger:
    """Writes through one thread that commits whatever is waiting in one transaction; callers only queue.

    Commits are synced to the disk, for the record must never be older than a checkpoint. Readers may open the file at
    any time (``sqlite3 run.db "select * from groups"``).

    Args:
        path: The file, usually ``<run_dir>/run.db``; created if missing.

    Raises:
        LedgerError: The file can't be opened.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.commit_s = 0.0
        self._changed = threading.Condition()
        self._pending: list[tuple[str, Any]] = []
        self._stopping = False
        self._running = False
        try:
            self._db = sqlite3.connect(self.path, check_same_thread=False, isolation_level=None, cached_statements=256)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=FULL")
            _check_schema(self._db, self.path)
            self._db.executescript(_SCHEMA)
            self._db.execute(f"PRAGMA user_version = {_SCHEMA_VERSION}")
            (self._holds_a_run,) = self._db.execute("SELECT EXISTS (SELECT 1 FROM admissions)").fetchone()
        except sqlite3.Error as error:
            raise LedgerError(f"can't open the run's record {self.path}: {error}") from error

    # before the run, on the caller's thread

    def meta(self) -> dict[str, Any]:
        """What :meth:`set_meta` wrote, also in an earlier process."""
        return {key: json.loads(value) for key, value in self._db.execute("SELECT key, value FROM meta")}

    def set_meta(self, values: Mapping[str, Any]) -> None:
        """Write facts about the run, JSON values by name; on the disk when it returns. Before :meth:`run`."""
        self._now("INSERT OR REPLACE INTO meta VALUES (?, ?)", [(key, _to_json(v)) for key, v in values.items()])

    def forget(self, group_ids: Sequence[int]) -> None:
        """Delete what open groups brought; they stay admitted, to be run again from scratch. Before :meth:`run`."""
        for table in ("trajectories", "keeps"):
            self._now(f"DELETE FROM {table} WHERE group_id = ?", [(group_id,) for group_id in group_ids])

    def _now(self, statement: str, rows: Sequence[tuple[Any, ...]]) -> None:
        try:
            self._db.execute("BEGIN IMMEDIATE")
            self._db.executemany(statement, rows)
            self._db.execute("COMMIT")
        except sqlite3.Error as error:
            raise LedgerError(f"can't write the run's record {self.path}: {error}") from error

    # what happens to groups: queued, from any thread

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
        self._queue("batches", [batch])
        self._queue("tickets", [written])
        return written

    def end_batch(self, version: int, outcome: Outcome, reason: str) -> None:
        """The last recorded batch of ``version`` was trained or dropped."""
        self._queue("batches", [(version, outcome, reason)])

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
            LedgerError: A write failed, or the file holds another run that was not recovered.
        """
        if self._holds_a_run:
            raise LedgerError(f"{self.path} is the record of an earlier run: resume it, or use another run_dir")
        with self._changed:
            self._running = True
        try:
            while True:
                with self._changed:
                    while not self._pending and not self._stopping:
                        self._changed.wait()
                    pending, self._pending = self._pending, []
                    if not pending:
                        return
                self._commit(pending)
        finally:
            with self._changed:
                self._running = False
                self._changed.notify_all()

    def _commit(self, pending: Sequence[tuple[str, Any]]) -> None:
        began_s = time.monotonic()
        queued: dict[str, list[tuple[float, Any]]] = {}
        for kind, (at_s, items) in pending:
            queued.setdefault(kind, []).extend((at_s, item) for item in items)
        try:
            self._db.execute("BEGIN IMMEDIATE")
            self._write(queued)
            self._db.execute("COMMIT")
        except sqlite3.Error as error:
            raise LedgerError(
                f"can't write the run's record {self.path}: {error}; what was committed before is kept"
            ) from error
        self.commit_s += time.monotonic() - began_s
        for _, written in queued.get("tickets", ()):
            written.set()

    def _write(self, queued: Mapping[str, list[tuple[float, Any]]]) -> None:
        # Within one transaction the order of kinds is the order of a group's life.
        admissions = [
            (f.group_id, f.prompt.id, f.prompt.environment, f.version, f.slot.index, at_s)
            for at_s, f in queued.get("admissions", ())
        ]
        self._insert("admissions", admissions, "INSERT OR REPLACE")
        self._insert("trajectories", [_trajectory_row(i, t) for _, (i, t) in queued.get("trajectories", ())])
        self._insert(
            "keeps",
            [(g.id, _to_json(g.prompt.data), g.head, g.tail, at_s) for at_s, g in queued.get("keeps", ())],
        )
        endings = [(i, str(outcome), reason, at_s) for at_s, (i, outcome, reason) in queued.get("endings", ())]
        self._insert("endings", endings)
        for at_s, batch in queued.get("batches", ()):
            if isinstance(batch, Batch):
                self._db.execute(
                    "INSERT INTO batches (version, group_ids, advantages, planned_s) VALUES (?, ?, ?, ?)",
                    (batch.version, _to_json([g.id for g in batch.groups]), _to_json(batch.advantages), at_s),
                )
            else:
                version, outcome, reason = batch
                self._db.execute(
                    "UPDATE batches SET outcome = ?, reason = ?, ended_s = ? "
                    "WHERE batch_id = (SELECT max(batch_id) FROM batches WHERE version = ?)",
                    (str(outcome), reason, at_s, version),
                )

    def _insert(self, table: str, rows: Sequence[tuple[Any, ...]], verb: str = "INSERT") -> None:
        """Many rows per statement: every call into SQLite gives up the interpreter lock, and a busy loop keeps it long.

        Row counts are powers of two, so that few statements are prepared.
        """
        columns = _COLUMNS[table]
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

    # reading

    def balance(self) -> Balance:
        """Admitted groups and endings as committed so far, read through a connection of its own."""
        with _reader(self.path) as db:
            (admitted,) = db.execute("SELECT count(*) FROM admissions").fetchone()
            return Balance(admitted, dict(db.execute("SELECT outcome, count(*) FROM endings GROUP BY outcome")))

    def recover(self, version: int) -> Recovery:
        """Read what the run left, as of its checkpoint at ``version``, and re-open what goes on; before :meth:`run`.

        Batches recorded from ``version`` on are to be trained again; groups saved at a clean end are open again.

        Raises:
            LedgerError: A batch's group is not complete in the record, or the file can't be read.
        """
        try:
            self._db.execute("BEGIN IMMEDIATE")
            recovery = self._recover(version)
            self._db.execute("COMMIT")
            self._holds_a_run = False
        except sqlite3.Error as error:
            raise LedgerError(f"can't read the run's record {self.path}: {error}") from error
        return recovery

    def _recover(self, version: int) -> Recovery:
        db, dropped = self._db, str(Outcome.DROPPED)
        recorded = [
            (at, json.loads(ids))
            for at, ids in db.execute(
                "SELECT version, group_ids FROM batches WHERE outcome IS NOT ? ORDER BY batch_id", (dropped,)
            )
        ]
        # The checkpoint has what was trained before it, even where the process died before it wrote the endings.
        trained = [i for at, ids in recorded if at < version for i in ids]
        replayed = {i for at, ids in recorded if at >= version for i in ids}
        db.execute("DELETE FROM endings WHERE outcome = ?", (str(Outcome.SAVED),))
        db.executemany("DELETE FROM endings WHERE group_id = ?", [(i,) for i in replayed])
        db.executemany(
            "INSERT OR IGNORE INTO endings VALUES (?, ?, '', ?)",
            [(i, str(Outcome.TRAINED), time.time()) for i in trained],
        )
        db.execute(
            "UPDATE batches SET outcome = NULL, reason = NULL, ended_s = NULL WHERE version >= ? AND outcome IS NOT ?",
            (version, dropped),
        )
        (next_group_id,) = db.execute("SELECT coalesce(max(group_id), -1) + 1 FROM admissions").fetchone()
        open_groups = [
            (group_id, kept)
            for group_id, kept in db.execute(
                "SELECT group_id, k.group_id IS NOT NULL FROM admissions LEFT JOIN keeps k USING (group_id) "
                "LEFT JOIN endings e USING (group_id) WHERE e.group_id IS NULL ORDER BY group_id"
            )
            if group_id not in replayed
        ]
        return Recovery(
            version=version,
            next_group_id=next_group_id,
            batches=tuple(tuple(self._group(i) for i in ids) for at, ids in recorded if at >= version),
            kept=tuple(self._group(i) for i, kept in open_groups if kept),
            unfinished=tuple((i, self._trajectories(i)) for i, kept in open_groups if not kept),
            ended=dict(db.execute("SELECT outcome, count(*) FROM endings GROUP BY outcome")),
        )

    def _group(self, group_id: int) -> Group:
        row = self._db.execute(
            "SELECT prompt_id, environment, prompt, version, engine FROM admissions JOIN keeps USING (group_id) "
            "WHERE group_id = ?",
            (group_id,),
        ).fetchone()
        trajectories = self._trajectories(group_id)
        if row is None or not trajectories:
            raise LedgerError(f"{self.path}: group {group_id} of a recorded batch is not complete in the record")
        prompt_id, environment, data, version, engine = row
        ordered = tuple(trajectories[i] for i in sorted(trajectories))
        return Group(group_id, Prompt(prompt_id, environment, json.loads(data)), version, ordered, engine)

    def _trajectories(self, group_id: int) -> dict[int, Trajectory]:
        columns = _COLUMNS["trajectories"][1:]
        rows = self._db.execute(
            f"SELECT {','.join(columns)} FROM trajectories WHERE group_id = ?",
            (group_id,),
        )
        return {row[0]: _trajectory(row) for row in rows}


class NullLedger:
    """A ledger that keeps nothing, for measuring what keeping costs; a run with it can't be resumed."""

    commit_s = 0.0

    def __init__(self) -> None:
        self._stopped = threading.Event()

    def admit(self, flights: Sequence[Flight]) -> None:
        """Nothing to do."""

    def land(self, trajectories: Sequence[tuple[int, Trajectory]]) -> None:
        """Nothing to do."""

    def keep(self, groups: Sequence[Group]) -> None:
        """Nothing to do."""

    def end(self, endings: Sequence[tuple[int, Outcome, str]]) -> None:
        """Nothing to do."""

    def record_batch(self, batch: Batch) -> threading.Event:
        """Nothing to wait for."""
        written = threading.Event()
        written.set()
        return written

    def end_batch(self, version: int, outcome: Outcome, reason: str) -> None:
        """Nothing to do."""

    def run(self) -> None:
        """Nothing to write; returns after :meth:`stop`."""
        self._stopped.wait()

    def stop(self) -> None:
        """End :meth:`run`."""
        self._stopped.set()

    def close(self, timeout_s: float = 10.0) -> None:
        """Nothing to close."""


AnyLedger = Ledger | NullLedger


class _reader:  # noqa: N801 - used as a function
    """A read-only connection for the length of a ``with`` block."""

    def __init__(self, path: Path) -> None:
        self._db = sqlite3.connect(f"file:{path}?mode=ro", uri=True)

    def __enter__(self) -> sqlite3.Connection:
        return self._db

    def __exit__(self, *_: object) -> None:
        self._db.close()


def _check_schema(db: sqlite3.Connection, path: Path) -> None:
    """Refuse a file whose tables are not ours."""
    (version,) = db.execute("PRAGMA user_version").fetchone()
    (tables,) = db.execute("SELECT count(*) FROM sqlite_master").fetchone()
    if tables and version != _SCHEMA_VERSION:
        raise LedgerError(
            f"{path} was written by another version of async-rl (its tables are version {version}, this one reads "
            f"{_SCHEMA_VERSION}): go on with the version that wrote it, or use another run_dir"
        )


def _trajectory_row(group_id: int, t: Trajectory) -> tuple[Any, ...]:
    return (
        group_id, t.sample_index, t.attempt, array("i", t.token_ids).tobytes(), bytes(t.loss_mask),
        array("f", t.logprobs).tobytes(), _to_json([(s.version, s.start, s.end) for s in t.segments]),
        t.prompt_length, t.reward, _to_json(dict(t.reward_parts)), t.finish_reason, t.completion, t.turns,
        t.started_s, t.ended_s,
    )  # fmt: skip


def _trajectory(row: Sequence[Any]) -> Trajectory:
    (
        sample,
        attempt,
        ids,
        mask,
        logprobs,
        segments,
        prompt_length,
        reward,
        parts,
        finish,
        completion,
        turns,
        *times,
    ) = row
    return Trajectory(
        sample_index=sample,
        attempt=attempt,
        token_ids=list(array("i", ids)),
        loss_mask=list(mask),
        logprobs=list(array("f", logprobs)),
        segments=tuple(Segment(*s) for s in json.loads(segments)),
        prompt_length=prompt_length,
        reward=reward,
        reward_parts=json.loads(parts),
        finish_reason=finish,
        completion=completion,
        turns=turns,
        started_s=times[0],
        ended_s=times[1],
    )
