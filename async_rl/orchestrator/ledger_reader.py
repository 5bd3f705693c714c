"""Reads ``run.db``: groups wherever their payload is, what a resume goes on with, the batches a replay trains again."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from async_rl.orchestrator.ledger_rows import COLUMNS, LedgerError, reading, trajectory_of
from async_rl.orchestrator.records import Archive, Balance, RecordedBatch, Recovery
from async_rl.types import Group, Outcome, Prompt, Trajectory


class LedgerReader:
    """Reads over one connection; a payload that has left the file comes from the archive.

    Args:
        db: An open connection.
        path: Its file, for messages.
        archive: Where old payloads went; ``None`` where they never leave the file.
    """

    def __init__(self, db: sqlite3.Connection, path: Path, archive: Archive | None) -> None:
        self._db = db
        self._path = path
        self._archive = archive

    def balance(self) -> Balance:
        """Admitted groups, and endings by outcome."""
        (admitted,) = self._db.execute("SELECT count(*) FROM admissions").fetchone()
        return Balance(admitted, dict(self._db.execute("SELECT outcome, count(*) FROM endings GROUP BY outcome")))

    def has_work(self, version: int) -> bool:
        """Whether a run that goes on at ``version`` has something to train or to finish before it needs a prompt."""
        batches = "SELECT 1 FROM batches WHERE version >= ? AND outcome IS NOT ?"
        groups = "SELECT 1 FROM admissions LEFT JOIN endings USING (group_id) WHERE outcome IS NULL OR outcome = ?"
        query = f"SELECT EXISTS ({batches}) OR EXISTS ({groups})"
        return bool(self._db.execute(query, (version, str(Outcome.DROPPED), str(Outcome.SAVED))).fetchone()[0])

    def recovery(self, version: int) -> Recovery:
        """What is left to do as of the checkpoint at ``version``, in a record re-opened there.

        Raises:
            LedgerError: A recorded batch is not complete in the record.
        """
        batches = self._batches("version >= ? AND outcome IS NOT ?", version, str(Outcome.DROPPED))
        recorded = {group_id for _, batch in batches for group_id in batch.group_ids}
        (next_group_id,) = self._db.execute("SELECT coalesce(max(group_id), -1) + 1 FROM admissions").fetchone()
        open_groups = [
            (group_id, kept)
            for group_id, kept in self._db.execute(
                "SELECT group_id, k.group_id IS NOT NULL FROM admissions LEFT JOIN keeps k USING (group_id) "
                "LEFT JOIN endings e USING (group_id) WHERE e.group_id IS NULL ORDER BY group_id"
            )
            if group_id not in recorded
        ]
        return Recovery(
            version=version,
            next_group_id=next_group_id,
            batches=tuple(batch for _, batch in batches),
            kept=self.groups(group_id for group_id, kept in open_groups if kept),
            unfinished=tuple((group_id, self._trajectories(group_id)) for group_id, kept in open_groups if not kept),
            ended=self.balance().ended,
        )

    def trained(self) -> Recovery:
        """Every trained batch from the first on, and nothing else.

        Raises:
            LedgerError: There is none, one is missing between two others, or one is not complete in the record.
        """
        batches = self._batches("outcome = ?", str(Outcome.TRAINED))
        if not batches:
            raise LedgerError(f"{self._path} records no trained batch: there is nothing to train again")
        first = batches[0][0]
        for expected, (version, _) in enumerate(batches, first):
            if version != expected:
                raise LedgerError(f"{self._path} records no trained batch of version {expected}, but later ones")
        (next_group_id,) = self._db.execute("SELECT max(group_id) + 1 FROM admissions").fetchone()
        return Recovery(first, next_group_id, batches=tuple(batch for _, batch in batches))

    def _batches(self, where: str, *values: object) -> list[tuple[int, RecordedBatch]]:
        """Recorded batches with their versions, oldest first; their groups are looked for now and read when loaded."""
        found = []
        for version, text in self._db.execute(
            f"SELECT version, group_ids FROM batches WHERE {where} ORDER BY batch_id", values
        ).fetchall():
            ids = tuple(json.loads(text))
            for group_id in ids:
                if not self._is_here(group_id) and not self._file_of(group_id).is_file():
                    raise LedgerError(f"{self._file_of(group_id)} is missing: it holds group {group_id} of a batch")
            found.append((version, RecordedBatch(ids, partial(_load, self._path, self._archive, ids))))
        return found

    def groups(self, group_ids: Iterable[int]) -> tuple[Group, ...]:
        """Complete groups, in the order asked for.

        Raises:
            LedgerError: One is not complete in the record.
        """
        files: dict[int, dict[int, Group]] = {}
        found = []
        for group_id in group_ids:
            group = self.group(group_id)
            if not group.trajectories:
                batch_id = self._batch_of(group_id)
                if self._archive is not None and batch_id not in files:
                    files[batch_id] = self._archive.read(batch_id)
                group = files.get(batch_id, {}).get(group_id, group)
            if not group.trajectories:
                raise self._incomplete(group_id)
            found.append(group)
        return tuple(found)

    def group(self, group_id: int) -> Group:
        """A group with what of its payload is still in the file, maybe nothing."""
        row = self._db.execute(
            "SELECT prompt_id, environment, data, version, engine FROM admissions LEFT JOIN prompts USING (group_id) "
            "WHERE group_id = ?",
            (group_id,),
        ).fetchone()
        if row is None:
            raise self._incomplete(group_id)
        prompt_id, environment, data, version, engine = row
        landed = self._trajectories(group_id)
        prompt = Prompt(prompt_id, environment, json.loads(data or "{}"))
        return Group(group_id, prompt, version, tuple(landed[i] for i in sorted(landed)), engine)

    def _trajectories(self, group_id: int) -> dict[int, Trajectory]:
        rows = self._db.execute(
            f"SELECT {','.join(COLUMNS['trajectories'])} FROM trajectories WHERE group_id = ?", (group_id,)
        )
        return {t.sample_index: t for t in map(trajectory_of, rows)}

    def _is_here(self, group_id: int) -> bool:
        query = "SELECT EXISTS (SELECT 1 FROM prompts JOIN trajectories USING (group_id) WHERE group_id = ?)"
        return bool(self._db.execute(query, (group_id,)).fetchone()[0])

    def _batch_of(self, group_id: int) -> int:
        row = self._db.execute("SELECT batch_id FROM archived WHERE group_id = ?", (group_id,)).fetchone()
        if row is None:
            raise self._incomplete(group_id)
        return int(row[0])

    def _file_of(self, group_id: int) -> Path:
        batch_id = self._batch_of(group_id)
        if self._archive is None:
            raise LedgerError(f"{self._path}: group {group_id} is in the archive, and none was given")
        return self._archive.path(batch_id)

    def _incomplete(self, group_id: int) -> LedgerError:
        return LedgerError(f"{self._path}: group {group_id} of a recorded batch is not complete in the record")


def read_run(path: Path, archive: Archive) -> Recovery:
    """All trained batches of a run, to train them again; read-only, and each batch is loaded when it is asked for.

    Args:
        path: The run's ``run.db``.
        archive: The run's archive of old payloads.

    Returns:
        ``version`` is that of the first batch; nothing is kept or unfinished.

    Raises:
        LedgerError: The file can't be read, records no trained batch, or a batch is not complete.
    """
    with reading(path) as db:
        return LedgerReader(db, path, archive).trained()


def read_meta(path: Path) -> dict[str, Any]:
    """What a run wrote with ``Ledger.set_meta``; read-only.

    Raises:
        LedgerError: The file can't be read.
    """
    with reading(path) as db:
        return {key: json.loads(value) for key, value in db.execute("SELECT key, value FROM meta")}


def holds_groups(path: Path) -> bool:
    """Whether this is the record of a run that has admitted something; read-only.

    Raises:
        LedgerError: The file can't be read.
    """
    if not path.exists():
        return False
    with reading(path) as db:
        return LedgerReader(db, path, None).balance().admitted > 0


def _load(path: Path, archive: Archive | None, group_ids: Sequence[int]) -> tuple[Group, ...]:
    with reading(path) as db:
        return LedgerReader(db, path, archive).groups(group_ids)
