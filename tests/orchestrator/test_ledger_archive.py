"""Ledger and archive: payloads leave run.db, nothing is lost on the way, and what left is found again."""

import sqlite3
import threading

import numpy as np
import pyarrow.parquet
import pytest
from ledger_kit import batch, flight, group, same, trajectory, write_everything, write_kept
from loop_kit import eventually

from async_rl.archive import BatchArchive
from async_rl.orchestrator.latencies import read_run as read_latencies
from async_rl.orchestrator.ledger import Ledger
from async_rl.orchestrator.ledger_reader import read_run
from async_rl.orchestrator.ledger_rows import LedgerError
from async_rl.types import Outcome


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.db"


@pytest.fixture
def archive(tmp_path):
    return BatchArchive(tmp_path / "batches")


def train(ledger, version, *group_ids, outcome=Outcome.TRAINED):
    ledger.record_batch(batch(version, *group_ids))
    ledger.end_batch(batch(version, *group_ids), outcome, "")


def query(path, statement):
    with sqlite3.connect(path) as db:
        found = db.execute(statement).fetchall()
    db.close()
    return found


def in_run_db(path):
    """Groups whose payload is in run.db."""
    return [i for (i,) in query(path, "SELECT DISTINCT group_id FROM trajectories ORDER BY 1")]


def outcomes(archive, batch_id):
    rows = pyarrow.parquet.read_table(archive.path(batch_id)).select(["group_id", "version", "outcome", "advantage"])
    return [tuple(row.values()) for row in rows.to_pylist()]


def test_what_has_ended_moves_to_the_file_of_the_batch(path, archive):
    ledger = Ledger(path, archive)
    write_kept(ledger, 0, 1, 2)
    ledger.admit([flight(3), flight(4), flight(5)])
    ledger.land([(3, trajectory(0)), (3, trajectory(1)), (5, trajectory(1))])
    ledger.end([(3, Outcome.FILTERED, "zero_variance"), (4, Outcome.FAILED, "timeout")])
    train(ledger, 3, 1, 0)
    write_everything(ledger).close()
    assert outcomes(archive, 1) == [
        (0, 3, "trained", 0.5), (0, 3, "trained", -0.5), (1, 3, "trained", 0.5), (1, 3, "trained", -0.5),
        (3, None, "filtered", None), (3, None, "filtered", None),
    ]  # fmt: skip
    assert in_run_db(path) == [2, 5]  # kept, running
    assert [i for (i,) in query(path, "SELECT group_id FROM prompts")] == [2, 5]
    assert query(path, "SELECT count(*) FROM admissions") == [(6,)]
    assert query(path, "SELECT group_id, head, outcome FROM groups WHERE group_id IN (0, 2, 4)") == [
        (0, 3, "trained"), (2, 3, None), (4, None, "failed"),
    ]  # fmt: skip
    assert Ledger(path, archive).balance().open == 2


def test_a_saved_group_stays(path, archive):
    ledger = Ledger(path, archive)
    write_kept(ledger, 0, 1)
    ledger.end([(1, Outcome.SAVED, "finished")])
    train(ledger, 3, 0)
    write_everything(ledger).close()
    assert in_run_db(path) == [1]


def test_run_db_does_not_grow_with_the_run(path, archive):
    ledger = Ledger(path, archive)
    sizes = []
    for version in range(40):
        ids = range(8 * version, 8 * version + 8)
        ledger.admit([flight(i) for i in ids])
        long = {"token_ids": [1] * 2000, "loss_mask": [1] * 2000}
        ledger.land([(i, trajectory(sample, **long)) for i in ids for sample in (0, 1)])
        ledger.keep([group(i) for i in ids])
        train(ledger, version, *ids)
        ledger._stopping = True  # lets the writer return; it is the next step's again
        ledger.run()
        ledger._stopping = False
        sizes.append(query(path, "PRAGMA page_count")[0][0])
    assert sizes[-1] - sizes[5] < 20  # the payloads of 34 batches would be more than 2,000 pages
    assert len(list(archive.directory.iterdir())) == 40


class Slow(BatchArchive):
    """Writes when the test lets it."""

    def __init__(self, directory):
        super().__init__(directory)
        self.began, self.go = threading.Event(), threading.Event()

    def write(self, batch_id, groups):
        self.began.set()
        assert self.go.wait(20)
        super().write(batch_id, groups)


def test_the_next_batch_never_waits_for_the_archive_and_other_rows_only_wait_to_be_written(path, tmp_path):
    archive = Slow(tmp_path / "batches")
    ledger = Ledger(path, archive)
    writer = threading.Thread(target=ledger.run)
    writer.start()
    try:
        write_kept(ledger, 0, 1, 2)
        assert ledger.record_batch(batch(3, 0)).wait(60)
        ledger.end_batch(batch(3, 0), Outcome.TRAINED, "")
        eventually(lambda: ledger.balance().ended == {"trained": 1})
        assert not archive.began.wait(0.05)  # the batch comes first
        assert ledger.record_batch(batch(4, 1)).wait(60)
        assert archive.began.wait(60)  # while it is trained
        ledger.end_batch(batch(4, 1), Outcome.TRAINED, "")
        archive.go.set()
        assert ledger.record_batch(batch(5, 2)).wait(60)
        eventually(lambda: archive.path(2).is_file())
    finally:
        archive.go.set()
        ledger.close()
        writer.join(60)


def test_a_batch_that_waits_to_be_recorded_waits_for_one_file_at_most(path, archive):
    ledger = Ledger(path, archive)
    write_kept(ledger, *range(5))
    for version in (3, 4, 5):  # a replay, for example, records nothing, and files accumulate
        train(ledger, version, version - 3)
    write, next_batch, written, before = archive.write, [], [], []

    def write_while_the_next_batch_comes(batch_id, groups):
        if not written:
            next_batch.append(ledger.record_batch(batch(6, 3)))
        elif next_batch[0].is_set():
            before.append(written[-1])
        write(batch_id, groups)
        written.append(batch_id)
        if len(written) == 3:
            ledger.stop()

    archive.write = write_while_the_next_batch_comes
    ledger.record_batch(batch(5, 4))  # starts it
    ledger.run()
    assert written == [1, 2, 3]
    assert before == [1, 2]  # it was recorded once the first file was written


# resume


def test_an_archived_batch_is_trained_again_from_its_file(path, archive):
    ledger = Ledger(path, archive)
    write_kept(ledger, 0, 1, 2)
    train(ledger, 3, 1, 0)
    ledger = write_everything(ledger, archive)
    assert in_run_db(path) == [2]
    recovery = ledger.recover(3)
    assert [b.group_ids for b in recovery.batches] == [(1, 0)]
    assert same(list(recovery.batches[0]), [group(1), group(0)])
    assert [g.id for g in recovery.kept] == [2]
    assert ledger.balance().open == 3
    ledger.end_batch(batch(3, 1, 0), Outcome.DROPPED, "non-finite loss")  # this time it makes no update
    write_everything(ledger).close()
    assert outcomes(archive, 1) == [(i, None, "dropped", None) for i in (0, 0, 1, 1)]
    assert same(list(archive.read(1).values()), [group(0), group(1)])
    assert query(path, "SELECT outcome FROM batches") == [("dropped",)]


def test_a_recorded_batch_that_moves_up_a_version_ends_under_the_version_it_made(path, archive):
    ledger = Ledger(path, archive)
    write_kept(ledger, 0, 1)
    train(ledger, 3, 0)
    train(ledger, 4, 1)
    ledger = write_everything(ledger, archive)
    ledger.recover(3)
    ledger.end_batch(batch(3, 0), Outcome.DROPPED, "non-finite loss")
    ledger.end_batch(batch(3, 1), Outcome.TRAINED, "")  # recorded at 4
    write_everything(ledger).close()
    assert query(path, "SELECT version, outcome FROM batches") == [(3, "dropped"), (3, "trained")]
    assert outcomes(archive, 2) == [(1, 3, "trained", 0.5), (1, 3, "trained", -0.5)]


def test_withdrawn_batches_are_planned_anew(path, archive):
    ledger = Ledger(path, archive)
    write_kept(ledger, 0, 1, 2)
    train(ledger, 3, 0)
    train(ledger, 4, 1)
    ledger = write_everything(ledger, archive)
    ledger.recover(3)
    ledger.withdraw(4)
    ledger.close()
    ledger = Ledger(path, archive)
    recovery = ledger.recover(3)
    assert [b.group_ids for b in recovery.batches] == [(0,)]
    assert same(recovery.kept, (group(1), group(2)))  # one from its file, one from run.db
    ledger.end_batch(batch(3, 0), Outcome.TRAINED, "")
    train(ledger, 4, 2, 1)
    write_everything(ledger).close()
    assert Ledger(path, archive).balance().ended == {"trained": 3}
    assert outcomes(archive, 2) == [(1, 4, "trained", 0.5), (1, 4, "trained", -0.5)]
    assert outcomes(archive, 3) == [(2, 4, "trained", 0.5), (2, 4, "trained", -0.5)]


def test_what_a_forgotten_group_brought_before_is_replaced_in_its_file(path, archive):
    ledger = Ledger(path, archive)
    write_kept(ledger, 0)
    train(ledger, 3, 0)
    ledger = write_everything(ledger, archive)
    ledger.recover(3)
    ledger.withdraw(3)
    ledger.forget([0])
    assert ledger._reader.recovery(3).unfinished == ((0, {}),)
    ledger.admit([flight(0)])
    ledger.land([(0, trajectory(0, reward=9.0)), (0, trajectory(1, reward=9.0))])
    ledger.end([(0, Outcome.FILTERED, "zero_variance")])
    write_kept(ledger, 1)
    train(ledger, 3, 1)
    write_everything(ledger).close()
    assert {t.reward for b in (1, 2) for g in archive.read(b).values() for t in g.trajectories if g.id == 0} == {9.0}
    assert in_run_db(path) == []


class Killed(BaseException):
    """The process died."""


class Crashing(BatchArchive):
    """Dies in its ``at``-th write, before or after the file is there."""

    def __init__(self, directory, at, after):
        super().__init__(directory)
        self.at, self.after, self.writes = at, after, 0

    def write(self, batch_id, groups):
        self.writes += 1
        if self.writes != self.at:
            super().write(batch_id, groups)
            return
        if self.after:
            super().write(batch_id, groups)
        raise Killed


@pytest.mark.parametrize("checkpoint", [3, 4, 5])
@pytest.mark.parametrize("after", [False, True], ids=["before the file", "after the file"])
@pytest.mark.parametrize("at", [1, 2])
def test_a_crash_between_file_and_record_is_harmless(path, tmp_path, archive, at, after, checkpoint):
    ledger = Ledger(path, Crashing(archive.directory, at, after))
    write_kept(ledger, 0, 1, 2, 3)
    ledger.end([(3, Outcome.FILTERED, "zero_variance")])
    train(ledger, 3, 0)
    train(ledger, 4, 1)
    ledger.stop()
    with pytest.raises(Killed):
        ledger.run()
    ledger.close()

    ledger = Ledger(path, archive)
    recovery = ledger.recover(checkpoint)
    again = [b for b in ((0,), (1,)) if 3 + b[0] >= checkpoint]
    assert [b.group_ids for b in recovery.batches] == again
    assert same([g for b in recovery.batches for g in b], [group(i) for (i,) in again])
    assert same(recovery.kept, (group(2),))
    for (i,) in again:
        ledger.end_batch(batch(3 + i, i), Outcome.TRAINED, "")
    train(ledger, 5, 2)
    write_everything(ledger).close()
    assert Ledger(path, archive).balance().ended == {"trained": 3, "filtered": 1}
    assert in_run_db(path) == []
    held = [i for batch_id in (1, 2, 3) for i in archive.read(batch_id)]
    assert sorted(held) == [0, 1, 2, 3]  # each once
    assert [row[:3:2] for b in (1, 2, 3) for row in outcomes(archive, b)[::2]] == [
        (0, "trained"), (3, "filtered"), (1, "trained"), (2, "trained"),
    ]  # fmt: skip


def test_what_the_checkpoint_has_goes_to_the_file_of_its_batch_though_its_ending_was_never_written(path, archive):
    ledger = Ledger(path, archive)
    write_kept(ledger, 0, 1)
    ledger.record_batch(batch(3, 0))
    ledger = write_everything(ledger, archive)
    ledger.recover(4)
    train(ledger, 4, 1)
    write_everything(ledger).close()
    assert outcomes(archive, 1) == [(0, 3, "trained", 0.5), (0, 3, "trained", -0.5)]
    assert list(archive.read(2)) == [1]
    assert [b.group_ids for b in read_run(path, archive).batches] == [(0,), (1,)]


def test_a_batch_whose_file_is_missing_is_refused_at_once(path, archive):
    ledger = Ledger(path, archive)
    write_kept(ledger, 0)
    train(ledger, 3, 0)
    write_everything(ledger).close()
    archive.path(1).unlink()
    with pytest.raises(LedgerError, match=r"batch-000001\.parquet is missing: it holds group 0"):
        Ledger(path, archive).recover(3)
    with pytest.raises(LedgerError, match=r"group 0 is in the archive, and none was given"):
        Ledger(path).recover(3)
    assert Ledger(path, archive).recover(4).batches == ()


# reading a whole run


def test_a_run_is_replayed_from_its_first_batch_whatever_holds_the_payload(path, archive):
    ledger = Ledger(path, archive)
    write_kept(ledger, *range(6))
    train(ledger, 3, 1, 0)
    train(ledger, 4, 2, outcome=Outcome.DROPPED)
    train(ledger, 4, 3)
    ledger = write_everything(ledger, archive)
    ledger.recover(5)
    train(ledger, 5, 5)
    ledger.record_batch(batch(6, 4))  # not trained
    writer = threading.Thread(target=ledger.run)
    writer.start()
    try:
        eventually(lambda: query(path, "SELECT count(*) FROM batches") == [(5,)])
        before = path.read_bytes()
        recovery = read_run(path, archive)
        assert (recovery.version, recovery.next_group_id) == (3, 6)
        assert [b.group_ids for b in recovery.batches] == [(1, 0), (3,), (5,)]
        assert same([g for b in recovery.batches for g in b], [group(i) for i in (1, 0, 3, 5)])
        assert recovery.kept == recovery.unfinished == ()
        assert path.read_bytes() == before
    finally:
        ledger.close()
        writer.join(60)


def test_a_record_without_a_trained_batch_or_with_a_gap_can_not_be_replayed(path, archive):
    with pytest.raises(LedgerError, match=r"run\.db does not exist: give the directory of a run"):
        read_run(path, archive)
    ledger = Ledger(path, archive)
    write_kept(ledger, 0, 1)
    ledger = write_everything(ledger)
    with pytest.raises(LedgerError, match=r"run\.db records no trained batch: there is nothing to train again"):
        read_run(path, archive)
    ledger.recover(0)
    train(ledger, 3, 0)
    train(ledger, 5, 1)
    write_everything(ledger).close()
    with pytest.raises(LedgerError, match=r"records no trained batch of version 4, but later ones"):
        read_run(path, archive)


def test_the_simulator_draws_from_rollouts_wherever_they_are(path, archive):
    ledger = Ledger(path, archive)
    ledger.admit([flight(i) for i in range(2)])
    ledger.land([(i, trajectory(s, ended_s=1.5 + i + s)) for i in range(2) for s in range(2)])
    ledger.keep([group(0), group(1)])
    train(ledger, 3, 0)
    write_everything(ledger).close()
    assert in_run_db(path) == [1]
    run = read_latencies(path)
    assert run.group_size == 2
    drawn = {tuple(run.latencies.draw(np.random.default_rng(i), 2)) for i in range(20)}
    assert drawn == {(0.0, 1.0), (1.0, 2.0)}
