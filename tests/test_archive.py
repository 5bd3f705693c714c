"""BatchArchive: groups come back from Parquet exactly as they went in, and a file is whole or absent."""

import math
import os
import struct

import pyarrow.dataset
import pyarrow.parquet
import pytest

from async_rl.archive import ArchiveError, BatchArchive
from async_rl.orchestrator.records import ArchivedGroup
from async_rl.types import Group, Prompt, Segment, Trajectory


def f32(x):
    return struct.unpack("f", struct.pack("f", x))[0]


def trajectory(sample, tokens=4):
    return Trajectory(
        sample_index=sample,
        attempt=2,
        token_ids=[49151 + i for i in range(tokens)],
        loss_mask=[0] + [1] * (tokens - 1),
        logprobs=[0.0, math.nan] + [f32(-0.1 * i) for i in range(2, tokens)],
        segments=(Segment(3, 1, 2), Segment(None, 2, tokens)),
        prompt_length=1,
        reward=0.1,
        reward_parts={"exact": math.nan, "length": 0.1},
        finish_reason="length",
        completion="ä\n\0'8",
        turns=2,
        started_s=1.25,
        ended_s=1764433000.123456,
        starts=(0, 2),
    )


def archived(group_id, outcome="trained", version=7, advantages=(0.5, -0.5), samples=2):
    prompt = Prompt(f"toy/0/{group_id}", "toy", {"text": "ü", "n": [1, None], "deep": {"x": 0.1}})
    trajectories = tuple(trajectory(i, tokens=2 + i + group_id) for i in range(samples))
    group = Group(group_id, prompt, 3, trajectories, engine=1)
    return ArchivedGroup(group, outcome, "", version, advantages, admitted_s=1.0, out_s=9.0)


FILTERED = {"outcome": "filtered", "version": None, "advantages": None}


def test_groups_come_back_exactly(tmp_path):
    archive = BatchArchive(tmp_path / "batches")
    entries = [archived(4), archived(2, **FILTERED), archived(11, samples=1, advantages=(1.0,))]
    archive.write(12, entries)
    assert [p.name for p in (tmp_path / "batches").iterdir()] == ["batch-000012.parquet"]
    assert archive.path(12).is_file()
    found = archive.read(12)
    assert list(found) == [4, 2, 11]
    assert repr(list(found.values())) == repr([e.group for e in entries])  # equal, NaN included


def test_a_batch_without_a_file_holds_nothing(tmp_path):
    assert BatchArchive(tmp_path / "nowhere").read(1) == {}


def test_all_files_are_one_table_with_the_facts_a_person_looks_for(tmp_path):
    archive = BatchArchive(tmp_path)
    archive.write(0, [archived(0)])
    archive.write(1, [archived(1, version=8), archived(2, **FILTERED)])
    table = (
        pyarrow.dataset.dataset(tmp_path).to_table().sort_by([("group_id", "ascending"), ("sample_index", "ascending")])
    )
    assert table.column("version").to_pylist() == [7, 7, 8, 8, None, None]
    assert table.column("advantage").to_pylist() == [0.5, -0.5, 0.5, -0.5, None, None]
    assert table.column("outcome").to_pylist() == ["trained"] * 4 + ["filtered"] * 2
    row = table.slice(1, 1).to_pylist()[0]
    assert (row["prompt_id"], row["environment"], row["sample_index"], row["attempt"]) == ("toy/0/0", "toy", 1, 2)
    assert row["prompt"] == '{"text": "\\u00fc", "n": [1, null], "deep": {"x": 0.1}}'
    assert (row["head"], row["tail"], row["prompt_length"], row["turns"]) == (3, 3, 1, 2)
    assert row["segments"] == [{"version": 3, "start": 1, "end": 2}, {"version": None, "start": 2, "end": 3}]
    assert row["token_ids"] == [49151, 49152, 49153]
    assert row["ended_s"] == 1764433000.123456


def test_writing_again_replaces_the_file(tmp_path):
    archive = BatchArchive(tmp_path)
    archive.write(0, [archived(0)])
    archive.write(0, [archived(0, outcome="dropped", version=None, advantages=None), archived(1)])
    assert list(archive.read(0)) == [0, 1]
    assert (
        pyarrow.parquet.read_table(archive.path(0)).column("outcome").to_pylist() == ["dropped"] * 2 + ["trained"] * 2
    )


def test_a_file_that_is_cut_short_is_an_error_that_names_it(tmp_path):
    archive = BatchArchive(tmp_path)
    archive.write(3, [archived(0)])
    os.truncate(archive.path(3), archive.path(3).stat().st_size // 2)
    with pytest.raises(ArchiveError, match=r"can't read .*batch-000003\.parquet: "):
        archive.read(3)


def test_a_file_that_is_no_parquet_is_an_error_that_names_it(tmp_path):
    archive = BatchArchive(tmp_path)
    archive.path(3).write_bytes(b"nothing of the kind")
    with pytest.raises(ArchiveError, match=r"can't read .*batch-000003\.parquet: "):
        archive.read(3)


def test_where_nothing_can_be_written_the_error_names_the_file(tmp_path):
    (tmp_path / "batches").write_text("a file where the directory should be")
    with pytest.raises(ArchiveError, match=r"can't write .*batch-000001\.parquet: .*kept in run\.db"):
        BatchArchive(tmp_path / "batches").write(1, [archived(0)])


def test_what_a_killed_process_did_not_finish_is_removed(tmp_path):
    (tmp_path / "batch-000012.parquet.partial").write_bytes(b"half")
    (tmp_path / "batch-000011.parquet").write_bytes(b"whole")
    BatchArchive(tmp_path).remove_partial()
    assert [path.name for path in tmp_path.iterdir()] == ["batch-000011.parquet"]
