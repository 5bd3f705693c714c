"""The rows of ``run.db``: its tables, how a trajectory becomes a row and comes back, how to open it to read."""

from __future__ import annotations

import json
import shutil
import sqlite3
from array import array
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from async_rl.types import RunError, Segment, Trajectory

SCHEMA_VERSION = 2
SCHEMA = f"""
BEGIN;
CREATE TABLE IF NOT EXISTS admissions (group_id INTEGER PRIMARY KEY, prompt_id TEXT NOT NULL, environment TEXT NOT NULL,
    version INTEGER NOT NULL, engine INTEGER NOT NULL, admitted_s REAL NOT NULL);
CREATE TABLE IF NOT EXISTS prompts (group_id INTEGER PRIMARY KEY, data TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS trajectories (group_id INTEGER NOT NULL, sample_index INTEGER NOT NULL,
    attempt INTEGER NOT NULL, token_ids BLOB NOT NULL, loss_mask BLOB NOT NULL, logprobs BLOB NOT NULL,
    segments TEXT NOT NULL, starts TEXT NOT NULL, prompt_length INTEGER NOT NULL, reward REAL NOT NULL,
    reward_parts TEXT NOT NULL, finish_reason TEXT NOT NULL, completion TEXT NOT NULL, turns INTEGER NOT NULL,
    started_s REAL NOT NULL, ended_s REAL NOT NULL, PRIMARY KEY (group_id, sample_index));
CREATE TABLE IF NOT EXISTS keeps (group_id INTEGER PRIMARY KEY, head INTEGER, tail INTEGER, kept_s REAL NOT NULL);
CREATE TABLE IF NOT EXISTS endings (group_id INTEGER PRIMARY KEY, outcome TEXT NOT NULL, reason TEXT NOT NULL,
    ended_s REAL NOT NULL);
CREATE TABLE IF NOT EXISTS batches (batch_id INTEGER PRIMARY KEY, version INTEGER NOT NULL, group_ids TEXT NOT NULL,
    advantages TEXT NOT NULL, planned_s REAL NOT NULL, outcome TEXT, reason TEXT, ended_s REAL);
CREATE TABLE IF NOT EXISTS archived (group_id INTEGER PRIMARY KEY, batch_id INTEGER NOT NULL, seconds TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE VIEW IF NOT EXISTS groups AS SELECT a.group_id, a.prompt_id, a.environment, a.version AS admitted_version,
    a.engine, k.head, k.tail, e.outcome, e.reason, a.admitted_s, k.kept_s, e.ended_s
    FROM admissions a LEFT JOIN keeps k USING (group_id) LEFT JOIN endings e USING (group_id);
PRAGMA user_version = {SCHEMA_VERSION};
COMMIT;
"""
COLUMNS = {
    "admissions": ("group_id", "prompt_id", "environment", "version", "engine", "admitted_s"),
    "prompts": ("group_id", "data"),
    "trajectories": (
        "group_id", "sample_index", "attempt", "token_ids", "loss_mask", "logprobs", "segments", "starts",
        "prompt_length", "reward", "reward_parts", "finish_reason", "completion", "turns", "started_s", "ended_s",
    ),
    "keeps": ("group_id", "head", "tail", "kept_s"),
    "endings": ("group_id", "outcome", "reason", "ended_s"),
}  # fmt: skip
to_json = json.JSONEncoder(default=str).encode  # one encoder for all rows: json.dumps makes one per call


class LedgerError(RunError):
    """The run's record can't be written or read; names the file."""


def check_schema(db: sqlite3.Connection, path: Path) -> None:
    """Refuse a file whose tables are not the ones above.

    Raises:
        LedgerError: Another version of async-rl wrote it.
    """
    (version,) = db.execute("PRAGMA user_version").fetchone()
    (tables,) = db.execute("SELECT count(*) FROM sqlite_master").fetchone()
    if tables and version != SCHEMA_VERSION:
        raise LedgerError(
            f"{path} was written by another version of async-rl (its tables are version {version}, this one reads "
            f"{SCHEMA_VERSION}): go on with the version that wrote it, or use another run_dir"
        )


@contextmanager
def reading(path: Path) -> Iterator[sqlite3.Connection]:
    """A connection that sees the record as of one moment, also while the run goes on, and leaves no trace of it.

    So the directory may be one that can only be read, and a run that was killed is as it was afterwards.

    Raises:
        LedgerError: There is no such file, or it can't be read.
    """
    if not path.is_file():
        raise LedgerError(f"{path} does not exist: give the directory of a run")
    try:
        with _traceless(path) as uri, closing(sqlite3.connect(uri, uri=True, isolation_level=None)) as db:
            db.execute("BEGIN")
            check_schema(db, path)
            yield db
    except sqlite3.Error as error:
        raise LedgerError(f"can't read the run's record {path}: {error}") from error


@contextmanager
def _traceless(path: Path) -> Iterator[str]:
    """How SQLite opens a record with all that was committed, and makes or changes no file beside it.

    With ``mode=ro`` alone it makes the index of the WAL (``-shm``), and a WAL, where they are missing.
    """
    file = path.resolve()
    wal, index = (file.with_name(f"{file.name}{suffix}") for suffix in ("-wal", "-shm"))
    if not wal.exists():  # nobody has it open: it was closed, which moves the WAL into the file
        yield f"{file.as_uri()}?immutable=1"
    elif index.exists():  # a run that goes on, whose locks hold, or one that was killed
        yield f"{file.as_uri()}?mode=ro&readonly_shm=1"
    else:  # a run that was killed, copied from its place without the index, without which no WAL is read
        with TemporaryDirectory() as directory:
            for original in (file, wal):
                shutil.copyfile(original, Path(directory) / original.name)
            yield f"{(Path(directory) / file.name).as_uri()}?mode=ro"


def trajectory_row(group_id: int, t: Trajectory) -> tuple[Any, ...]:
    """The row of a trajectory, in the order of the columns."""
    return (
        group_id, t.sample_index, t.attempt, array("i", t.token_ids).tobytes(), bytes(t.loss_mask),
        array("f", t.logprobs).tobytes(), to_json([(s.version, s.start, s.end) for s in t.segments]),
        to_json(t.starts), t.prompt_length, t.reward, to_json(dict(t.reward_parts)), t.finish_reason, t.completion,
        t.turns, t.started_s, t.ended_s,
    )  # fmt: skip


def trajectory_of(row: Sequence[Any]) -> Trajectory:
    """The trajectory of a row."""
    _, sample, attempt, ids, mask, logprobs, segments, starts, prompt_length, reward, parts, finish, text, *rest = row
    turns, started_s, ended_s = rest
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
        completion=text,
        turns=turns,
        started_s=started_s,
        ended_s=ended_s,
        starts=tuple(json.loads(starts)),
    )
