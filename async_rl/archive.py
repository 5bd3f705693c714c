"""BatchArchive: old rollouts in Parquet, one file per batch and one row per trajectory.

    pandas.read_parquet("runs/latest/batches")
    duckdb.sql("SELECT version, avg(reward) FROM 'runs/latest/batches/*.parquet' GROUP BY version ORDER BY version")

Neither is needed by async-rl. A file also holds what was filtered, failed or dropped since the batch before; there
``version`` (the one it was trained at) and ``advantage`` are null. :data:`SCHEMA` lists the columns.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from async_rl.durable import PARTIAL, durable_file
from async_rl.orchestrator.records import ArchivedGroup
from async_rl.types import Group, Prompt, RunError, Segment, Trajectory

SCHEMA = pa.schema(
    {
        "group_id": pa.int64(),
        "version": pa.int32(),  # trained at
        "outcome": pa.string(),  # null: open again after a resume
        "reason": pa.string(),
        "prompt_id": pa.string(),
        "environment": pa.string(),
        "prompt": pa.string(),  # JSON
        "sample_index": pa.int32(),
        "attempt": pa.int32(),
        "completion": pa.string(),
        "reward": pa.float64(),
        "reward_parts": pa.string(),  # JSON
        "advantage": pa.float64(),
        "finish_reason": pa.string(),
        "turns": pa.int32(),
        "prompt_length": pa.int32(),
        "token_ids": pa.list_(pa.int32()),
        "loss_mask": pa.list_(pa.int8()),
        "logprobs": pa.list_(pa.float32()),
        "segments": pa.list_(pa.struct({"version": pa.int32(), "start": pa.int32(), "end": pa.int32()})),
        "starts": pa.list_(pa.int32()),
        "head": pa.int32(),
        "tail": pa.int32(),
        "admitted_version": pa.int32(),
        "engine": pa.int32(),
        "admitted_s": pa.float64(),  # the group, as out_s
        "started_s": pa.float64(),  # the trajectory, as ended_s
        "ended_s": pa.float64(),
        "out_s": pa.float64(),
    }
)

_TOKENS: dict[str, type[np.generic]] = {"token_ids": np.int32, "loss_mask": np.int8, "logprobs": np.float32}
# Fields of a trajectory that are columns as they are.
_PLAIN = (
    "sample_index", "attempt", "completion", "reward", "finish_reason", "turns", "prompt_length", "started_s",
    "ended_s",
)  # fmt: skip


class ArchiveError(RunError):
    """A file of the archive can't be written or read; names it."""


class BatchArchive:
    """The files ``batch-000012.parquet`` of a run.

    Args:
        directory: Where they are, usually ``<run_dir>/batches``; made with the first one.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)

    def path(self, batch_id: int) -> Path:
        """The file of a batch, written or not.

        Args:
            batch_id: Its number in ``run.db``; not its version, for a batch may make no update.
        """
        return self.directory / f"batch-{batch_id:06d}.parquet"

    def remove_partial(self) -> None:
        """Remove what a killed process did not finish; for the one process that writes here, before it does."""
        for partial in self.directory.glob(f"batch-*.parquet{PARTIAL}"):
            partial.unlink(missing_ok=True)

    def write(self, batch_id: int, groups: Sequence[ArchivedGroup]) -> None:
        """Write the file of a batch anew; on the disk, whole, when it returns.

        Raises:
            ArchiveError: It can't be written; no part of it is left.
        """
        path = self.path(batch_id)
        try:
            with durable_file(path) as file:
                pq.write_table(_table(groups), file, compression="zstd")
        except OSError as error:
            raise ArchiveError(f"can't write {path}: {error}; what it was to hold is kept in run.db") from error

    def read(self, batch_id: int) -> dict[int, Group]:
        """The groups in the file of a batch, by id, exactly as the ledger had them; none where there is no file.

        Raises:
            ArchiveError: The file can't be read.
        """
        path = self.path(batch_id)
        if not path.is_file():
            return {}
        try:
            table = pq.ParquetFile(path).read()
        except (OSError, pa.ArrowException) as error:
            raise ArchiveError(f"can't read {path}: {error}; restore the file, or start a new run") from error
        found: dict[int, Group] = {}
        for row in _rows(table):
            group_id, trajectory = row["group_id"], _trajectory(row)
            if group_id in found:
                found[group_id].trajectories += (trajectory,)
            else:
                prompt = Prompt(row["prompt_id"], row["environment"], json.loads(row["prompt"]))
                found[group_id] = Group(group_id, prompt, row["admitted_version"], (trajectory,), row["engine"])
        return found


def _table(groups: Sequence[ArchivedGroup]) -> pa.Table:
    rows = []
    for entry in groups:
        group, advantages = entry.group, entry.advantages
        of_group = {
            "group_id": group.id,
            "version": entry.version,
            "outcome": entry.outcome,
            "reason": entry.reason,
            "prompt_id": group.prompt.id,
            "environment": group.prompt.environment,
            "prompt": json.dumps(group.prompt.data),
            "admitted_version": group.admitted_version,
            "engine": group.engine,
            "admitted_s": entry.admitted_s,
            "out_s": entry.out_s,
        }
        for i, t in enumerate(group.trajectories):
            rows.append(
                of_group
                | {name: getattr(t, name) for name in (*_PLAIN, *_TOKENS, "starts", "head", "tail")}
                | {
                    "advantage": None if advantages is None else advantages[i],
                    "reward_parts": json.dumps(dict(t.reward_parts)),
                    "segments": [{"version": s.version, "start": s.start, "end": s.end} for s in t.segments],
                }
            )
    columns = [([row[field.name] for row in rows], field) for field in SCHEMA]
    return pa.table(
        [
            _lists(values, _TOKENS[field.name]) if field.name in _TOKENS else pa.array(values, field.type)
            for values, field in columns
        ],
        schema=SCHEMA,
    )


def _lists(values: Sequence[Sequence[Any]], dtype: type[np.generic]) -> pa.ListArray:
    """Lists of numbers, without a Python object per number on Arrow's side."""
    offsets = np.cumsum([0, *map(len, values)], dtype=np.int32)
    return pa.ListArray.from_arrays(offsets, np.concatenate([np.asarray(v, dtype) for v in values]))


def _rows(table: pa.Table) -> Iterator[dict[str, Any]]:
    columns = {}
    for name in table.column_names:
        column = table.column(name)
        if name in _TOKENS:
            lists = column.combine_chunks()
            offsets, values = lists.offsets.to_pylist(), lists.values.to_numpy().tolist()
            columns[name] = [values[begin:end] for begin, end in pairwise(offsets)]
        else:
            columns[name] = column.to_pylist()
    for i in range(table.num_rows):
        yield {name: column[i] for name, column in columns.items()}


def _trajectory(row: Mapping[str, Any]) -> Trajectory:
    return Trajectory(
        **{name: row[name] for name in (*_PLAIN, *_TOKENS)},
        reward_parts=json.loads(row["reward_parts"]),
        segments=tuple(Segment(**segment) for segment in row["segments"]),
        starts=tuple(row["starts"]),
    )
