"""Ledger: what is written comes back, in whole transactions, whatever happens to the process."""

import os
import signal
import sqlite3
import subprocess
import sys
import textwrap
import threading

import pytest
from ledger_kit import batch, flight, group, same, trajectory, write_everything, write_kept
from loop_kit import eventually

from async_rl.orchestrator.ledger import Ledger
from async_rl.orchestrator.ledger_null import NullLedger
from async_rl.orchestrator.ledger_rows import LedgerError, reading
from async_rl.types import Outcome


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.db"


def test_a_kept_group_comes_back_as_it_was(path):
    ledger = Ledger(path)
    write_kept(ledger, 0)
    recovery = write_everything(ledger).recover(4)
    assert recovery.version == 4
    assert recovery.next_group_id == 1
    assert same(recovery.kept[0], group(0))
    assert recovery.batches == recovery.unfinished == ()


def test_a_running_group_is_unfinished_and_keeps_its_finished_samples(path):
    ledger = Ledger(path)
    ledger.admit([flight(0), flight(1)])
    ledger.land([(1, trajectory(1))])
    recovery = write_everything(ledger).recover(3)
    assert [(i, list(landed)) for i, landed in recovery.unfinished] == [(0, []), (1, [1])]
    assert same(recovery.unfinished[1][1][1], trajectory(1))
    assert recovery.kept == ()


def test_batches_after_the_checkpoint_are_trained_again_in_order_without_the_dropped_ones(path):
    ledger = Ledger(path)
    write_kept(ledger, *range(10))
    for version, ids, outcome in (
        (3, (1, 0), Outcome.TRAINED),
        (4, (3, 2), Outcome.TRAINED),
        (5, (4, 5), Outcome.DROPPED),
        (5, (7, 6), Outcome.TRAINED),
        (6, (8,), None),
    ):
        ledger.record_batch(batch(version, *ids))
        if outcome is not None:
            ledger.end_batch(batch(version, *ids), outcome, "non-finite loss" if outcome is Outcome.DROPPED else "")
    reopened = write_everything(ledger)
    recovery = reopened.recover(4)
    assert [[g.id for g in groups] for groups in recovery.batches] == [[3, 2], [7, 6], [8]]
    assert [g.id for g in recovery.kept] == [9]
    assert recovery.ended == {"trained": 2, "dropped": 2}
    assert recovery.next_group_id == 10
    with sqlite3.connect(path) as db:
        outcomes = db.execute("SELECT version, outcome FROM batches ORDER BY batch_id").fetchall()
    assert outcomes == [(3, "trained"), (4, None), (5, "dropped"), (5, None), (6, None)]
    reopened.close()
    again = Ledger(path).recover(4)  # killed again before anything was written: the same answer
    assert [[g.id for g in groups] for groups in again.batches] == [[3, 2], [7, 6], [8]]
    older = Ledger(path).recover(3)  # the newest checkpoint was unreadable, the one before is used
    assert [[g.id for g in groups] for groups in older.batches] == [[1, 0], [3, 2], [7, 6], [8]]


def test_what_the_checkpoint_has_is_trained_even_if_its_ending_was_never_written(path):
    ledger = Ledger(path)
    write_kept(ledger, 0, 1, 2)
    ledger.record_batch(batch(3, 0, 1))
    recovery = write_everything(ledger).recover(4)  # killed right after the checkpoint of version 4
    assert recovery.ended == {"trained": 2}
    assert [g.id for g in recovery.kept] == [2]
    assert recovery.batches == ()


def test_what_a_clean_end_saved_goes_on(path):
    ledger = Ledger(path)
    write_kept(ledger, 0)
    ledger.admit([flight(1)])
    ledger.end([(0, Outcome.SAVED, "finished"), (1, Outcome.SAVED, "unfinished")])
    reopened = write_everything(ledger)
    assert reopened.balance().open == 0
    recovery = reopened.recover(3)
    assert [g.id for g in recovery.kept] == [0]
    assert [i for i, _ in recovery.unfinished] == [1]
    assert reopened.balance().open == 2


def test_filtered_and_failed_groups_stay_ended(path):
    ledger = Ledger(path)
    ledger.admit([flight(i) for i in range(3)])
    ledger.land([(0, trajectory(0)), (0, trajectory(1))])
    ledger.end([(0, Outcome.FILTERED, "zero_variance"), (1, Outcome.FAILED, "timeout")])
    reopened = write_everything(ledger)
    recovery = reopened.recover(3)
    assert recovery.ended == {"filtered": 1, "failed": 1}
    assert [i for i, _ in recovery.unfinished] == [2]
    assert reopened.balance().admitted == 3
    assert reopened.balance().ended == {"filtered": 1, "failed": 1}
    assert reopened.balance().open == 1


def test_a_group_that_ends_twice_is_an_error(path):
    ledger = Ledger(path)
    ledger.admit([flight(0)])
    ledger.end([(0, Outcome.TRAINED, "")])
    ledger.end([(0, Outcome.DROPPED, "")])
    ledger.stop()
    with pytest.raises(LedgerError, match=r"run\.db.*UNIQUE constraint failed: endings\.group_id"):
        ledger.run()
    ledger.close()
    assert Ledger(path).balance().ended == {}  # the transaction is whole or absent


# CASES 35


def test_a_full_disk_names_the_file_and_keeps_what_was_committed(path):
    ledger = Ledger(path)
    write_kept(ledger, 0)
    ledger = write_everything(ledger)
    ledger.recover(3)
    (pages,) = ledger._db.execute("PRAGMA page_count").fetchone()
    ledger._db.execute(f"PRAGMA max_page_count = {pages + 1}")  # SQLite's own "disk full"
    ledger.admit([flight(1)])
    ledger.land([(1, trajectory(0, token_ids=list(range(50_000)), loss_mask=[1] * 50_000))])
    written = ledger.record_batch(batch(3, 0))
    with pytest.raises(LedgerError, match=r"run\.db: database or disk is full; what was committed before is kept"):
        ledger.run()
    assert not written.is_set()
    ledger.close()
    assert [g.id for g in Ledger(path).recover(3).kept] == [0]


def test_it_is_readable_while_the_run_goes_on(path):
    ledger = Ledger(path)
    writer = threading.Thread(target=ledger.run)
    writer.start()
    try:
        write_kept(ledger, 0, 1)
        assert ledger.record_batch(batch(3, 0, 1)).wait(60)
        rows = sqlite3.connect(path).execute("SELECT group_id, prompt_id, head, outcome FROM groups").fetchall()
        assert rows == [(0, "toy/0/0", 3, None), (1, "toy/0/1", 3, None)]
        ledger.end_batch(batch(3, 0, 1), Outcome.TRAINED, "")
        eventually(lambda: ledger.balance().open == 0)
        assert ledger.take_seconds() > 0
        assert ledger.take_seconds() == 0
    finally:
        ledger.close()
        writer.join(60)


def test_a_reader_sees_one_moment(path):
    ledger = Ledger(path)
    ledger.admit([flight(0)])
    ledger.stop()
    with reading(path) as db:
        assert db.execute("SELECT count(*) FROM admissions").fetchone() == (0,)
        ledger.run()
        assert db.execute("SELECT count(*) FROM admissions").fetchone() == (0,)
    assert ledger.balance().admitted == 1


def test_many_rows_at_once(path):
    ledger = Ledger(path)
    ledger.admit([flight(i) for i in range(7001)])
    ledger.land([(i, trajectory(0)) for i in range(5003)])
    reopened = write_everything(ledger)
    assert reopened.balance().admitted == 7001
    assert len(reopened.recover(3).unfinished) == 7001


def test_an_earlier_run_is_not_written_over(path):
    ledger = Ledger(path)
    ledger.admit([flight(0)])
    reopened = write_everything(ledger)
    with pytest.raises(LedgerError, match="record of an earlier run: resume it, or use another run_dir"):
        reopened.run()


def test_a_file_that_is_no_database_is_refused(path):
    path.write_bytes(b"not a database, but long enough to look at" * 100)
    with pytest.raises(LedgerError, match=r"run\.db: file is not a database"):
        Ledger(path)


def test_a_file_of_another_version_is_refused_and_left_as_it_was(path):
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE admissions (group_id INTEGER PRIMARY KEY)")
    with pytest.raises(LedgerError, match=r"run\.db was written by another version .* version 0, this one reads \d"):
        Ledger(path)
    with sqlite3.connect(path) as db:
        assert db.execute("SELECT count(*) FROM sqlite_master").fetchone() == (1,)


def test_facts_about_the_run_are_there_for_the_next_process(path):
    ledger = Ledger(path)
    assert ledger.meta() == {}
    ledger.set_meta({"batch_size": 4, "environment": {"name": "toy"}})
    ledger.set_meta({"batch_size": 8})
    ledger.close()
    assert Ledger(path).meta() == {"batch_size": 8, "environment": {"name": "toy"}}


def test_facts_noted_while_a_run_goes_on_are_there_for_the_next_process(path):
    ledger = Ledger(path)
    ledger.set_meta({"batch_size": 4, "evaluated": []})
    ledger.note({"evaluated": [2]})
    ledger.note({"evaluated": [2, 4]})
    write_everything(ledger).close()
    assert Ledger(path).meta() == {"batch_size": 4, "evaluated": [2, 4]}


def test_a_forgotten_group_runs_again_from_scratch_under_its_id(path):
    ledger = Ledger(path)
    write_kept(ledger, 0, 1)
    reopened = write_everything(ledger)
    assert [g.id for g in reopened.recover(3).kept] == [0, 1]
    reopened.forget([0])
    reopened.close()
    again = Ledger(path)
    recovery = again.recover(3)
    assert [g.id for g in recovery.kept] == [1]
    assert recovery.unfinished == ((0, {}),)
    write_kept(again, 0)
    assert [g.id for g in write_everything(again).recover(3).kept] == [0, 1]


def test_a_directory_that_is_missing_is_refused(tmp_path):
    with pytest.raises(LedgerError, match="unable to open"):
        Ledger(tmp_path / "nowhere" / "run.db")


def test_closing_twice_and_never_starting(path):
    ledger = Ledger(path)
    ledger.close()
    ledger.close()
    NullLedger().close()


def test_a_batch_is_on_the_disk_before_it_is_trained_even_if_the_process_is_killed(path):
    code = """
        import os, signal, sys, threading
        sys.path.insert(0, sys.argv[2])
        from test_ledger import *
        ledger = Ledger(sys.argv[1])
        threading.Thread(target=ledger.run, daemon=True).start()
        write_kept(ledger, 0, 1)
        assert ledger.record_batch(batch(3, 1, 0)).wait(60)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    here = os.path.dirname(__file__)
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code), str(path), here], timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    recovery = Ledger(path).recover(3)
    assert [[g.id for g in groups] for groups in recovery.batches] == [[1, 0]]
    assert same(recovery.batches[0][1], group(0))
