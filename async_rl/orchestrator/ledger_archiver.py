"""LedgerArchiver: moves the payload of groups that have ended from ``run.db`` to the archive; no crash loses any.

A group is assigned to the file of a batch, for good, in the transaction that ends the batch. A later transaction writes
the file, whole, from what the record says, and deletes what it holds; undone by a crash, it is done again.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence

from async_rl.orchestrator.ledger_reader import LedgerReader
from async_rl.orchestrator.ledger_rows import to_json
from async_rl.orchestrator.records import Archive, ArchivedGroup
from async_rl.types import Group, Outcome

_TO_MOVE = "prompts JOIN endings USING (group_id) JOIN archived USING (group_id) WHERE outcome != 'saved'"


class LedgerArchiver:
    """Works within the transactions of the ledger's writer.

    Args:
        db: The writer's connection.
        reader: Reads over it.
        archive: Where payloads go; ``None``: they stay.
    """

    def __init__(self, db: sqlite3.Connection, reader: LedgerReader, archive: Archive | None) -> None:
        self._db = db
        self._reader = reader
        self._archive = archive

    def assign(self, batch_id: int, group_ids: Sequence[int]) -> list[int]:
        """A batch of these groups has ended: they, and what else has ended since the last one, are to be archived.

        A group that was archived before, and trained again after a resume, stays in its file.

        Returns:
            Batches whose files are to be written.
        """
        if self._archive is None:
            return []
        self._db.execute(
            "INSERT OR IGNORE INTO archived SELECT group_id, ?, (SELECT json_group_array(t.ended_s - t.started_s) "
            "FROM trajectories t WHERE t.group_id = p.group_id) "
            "FROM prompts p JOIN endings e USING (group_id) WHERE e.outcome != 'saved'",
            (batch_id,),
        )
        files = self._db.execute(
            "SELECT DISTINCT batch_id FROM archived WHERE group_id IN (SELECT value FROM json_each(?))",
            (to_json(group_ids),),
        )
        return sorted({*self.unfinished(), *(file for (file,) in files)})

    def unfinished(self) -> list[int]:
        """Batches with payloads that are to be in their files and are still here, an earlier process's included."""
        if self._archive is None:
            return []
        return [batch_id for (batch_id,) in self._db.execute(f"SELECT DISTINCT batch_id FROM {_TO_MOVE} ORDER BY 1")]

    def move(self, batch_id: int) -> None:
        """Write the file of a batch and delete what it holds now; what it held before stays in it.

        Raises:
            RunError: The file can't be written; nothing was deleted.
        """
        if self._archive is None:
            return
        ids = [i for (i,) in self._db.execute(f"SELECT group_id FROM {_TO_MOVE} AND batch_id = ?", (batch_id,))]
        groups = self._archive.read(batch_id) | {group_id: self._reader.group(group_id) for group_id in ids}
        groups = {group_id: groups[group_id] for group_id in sorted(groups) if groups[group_id].trajectories}
        if groups:
            self._archive.write(batch_id, self._described(batch_id, list(groups.values())))
        for table in ("trajectories", "prompts"):
            self._db.execute(f"DELETE FROM {table} WHERE group_id IN (SELECT value FROM json_each(?))", (to_json(ids),))

    def _described(self, batch_id: int, groups: Sequence[Group]) -> list[ArchivedGroup]:
        trained = {}
        for version, ids, advantages in self._db.execute(
            "SELECT version, group_ids, advantages FROM batches WHERE batch_id >= ? AND outcome = ?",
            (batch_id, str(Outcome.TRAINED)),
        ):
            for group_id, values in zip(json.loads(ids), json.loads(advantages), strict=True):
                trained[group_id] = version, tuple(values)
        found = []
        for group in groups:
            outcome, reason, admitted_s, out_s = self._db.execute(
                "SELECT outcome, reason, admitted_s, ended_s FROM admissions LEFT JOIN endings USING (group_id) "
                "WHERE group_id = ?",
                (group.id,),
            ).fetchone()
            version, advantages = trained.get(group.id, (None, None))
            found.append(ArchivedGroup(group, outcome, reason or "", version, advantages, admitted_s, out_s))
        return found
