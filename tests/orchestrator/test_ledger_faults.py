"""Ledger: processes that are killed and disks that are full, for real."""

import contextlib
import os
import random
import resource
import signal
import sqlite3
import subprocess
import sys
import textwrap
import time

import pytest
from ledger_kit import batch, flight, group, same, trajectory, write_everything, write_kept

from async_rl.archive import ArchiveError, BatchArchive
from async_rl.orchestrator.ledger import Ledger
from async_rl.orchestrator.ledger_reader import read_run
from async_rl.orchestrator.ledger_rows import LedgerError
from async_rl.types import Outcome

HERE = os.path.dirname(__file__)
STEPS, WIDTH = 60, 3

# A run without a model: from the checkpoint's version on it trains what is recorded again, then what it admits itself.
RUN = """
    import os, sys, threading, time
    sys.path.insert(0, sys.argv[1])
    from test_ledger_faults import *

    version = int(open("checkpoint").read()) if os.path.exists("checkpoint") else 0
    ledger = Ledger("run.db", BatchArchive("batches"))
    recovery = ledger.recover(version)
    threading.Thread(target=ledger.run, daemon=True).start()
    recorded = list(recovery.batches)
    open_groups = [g.id for g in recovery.kept]
    ledger.admit([flight(i) for i, _ in recovery.unfinished])
    for i, landed in recovery.unfinished:
        ledger.land([(i, t) for t in group(i).trajectories if t.sample_index not in landed])
        ledger.keep([group(i)])
        open_groups.append(i)
    following = recovery.next_group_id
    while version < STEPS:
        if recorded:
            again = recorded.pop(0)
            assert same(list(again), [group(i) for i in again.group_ids])
            trained = batch(version, *again.group_ids)
        else:
            while len(open_groups) < WIDTH:
                write_kept(ledger, following)
                open_groups.append(following)
                following += 1
                if following % 10 == 0:
                    ledger.admit([flight(following)])
                    ledger.end([(following, Outcome.FAILED, "timeout")])
                    following += 1
            trained = batch(version, *open_groups[:WIDTH])
            del open_groups[:WIDTH]
            assert ledger.record_batch(trained).wait(20)
        ledger.end_batch(trained, Outcome.TRAINED, "")
        version += 1
        if version % 3 == 0:
            with open("aside", "w") as file:
                file.write(str(version))
            os.replace("aside", "checkpoint")
        time.sleep(0.004)
    ledger.end([(i, Outcome.SAVED, "finished") for i in open_groups])
    ledger.close()
"""


def balanced(db):
    """The sums that hold at any moment, read as a person would read them."""
    (admitted, ended, unknown) = db.execute(
        "SELECT (SELECT count(*) FROM admissions), (SELECT count(*) FROM endings), "
        "(SELECT count(*) FROM endings LEFT JOIN admissions a USING (group_id) WHERE a.group_id IS NULL)"
    ).fetchone()
    return unknown == 0 and ended <= admitted


def test_killed_at_random_moments_the_record_is_whole_balances_and_goes_on(tmp_path):
    """Promises 3 and 10, CASES 17."""
    rng, lives = random.Random(0), 0
    path, archive = tmp_path / "run.db", BatchArchive(tmp_path / "batches")
    while True:
        lives += 1
        run = subprocess.Popen([sys.executable, "-c", textwrap.dedent(RUN), HERE], cwd=tmp_path)
        before = len(list(archive.directory.glob("*")))
        deadline_s = time.monotonic() + 60
        while run.poll() is None and len(list(archive.directory.glob("*.parquet"))) < before + 5:
            assert time.monotonic() < deadline_s
            time.sleep(0.005)
        if path.exists() and run.poll() is None:  # readable while the run goes on
            with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as db:
                assert balanced(db)
        time.sleep(rng.random() * 0.05)
        if lives <= 4:
            run.send_signal(signal.SIGKILL)
        if run.wait(60) == 0:
            break
        with contextlib.closing(sqlite3.connect(path)) as db:
            assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
            assert balanced(db)
        assert Ledger(path, archive).balance().open >= 0
    assert lives == 5
    balance = Ledger(path, archive).balance()
    assert balance.open == 0
    assert balance.ended["trained"] == STEPS * WIDTH
    recovery = read_run(path, archive)
    assert recovery.version == 0
    assert [len(b) for b in recovery.batches] == [WIDTH] * STEPS
    ids = [i for b in recovery.batches for i in b.group_ids]
    assert len(set(ids)) == len(ids)
    assert all(same(list(b), [group(i) for i in b.group_ids]) for b in recovery.batches)
    held = [i for file in archive.directory.iterdir() for i in archive.read(int(file.stem.split("-")[1]))]
    assert sorted(held) == sorted(ids)  # each in one file


# CASES 35


@contextlib.contextmanager
def no_file_beyond(size):
    """The kernel refuses to make a file larger: EFBIG, which a full disk resembles."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 256 KiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", disk], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("file systems can't be mounted here")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


def long_group(group_id):
    return [(group_id, trajectory(s, token_ids=list(range(20_000)), loss_mask=[1] * 20_000)) for s in (0, 1)]


def test_a_record_that_can_not_grow_ends_the_run_and_resumes_later(tmp_path):
    path = tmp_path / "run.db"
    ledger = Ledger(path)
    write_kept(ledger, 0)
    ledger = write_everything(ledger)
    ledger.recover(3)
    ledger.admit([flight(1)])
    ledger.land(long_group(1))
    written = ledger.record_batch(batch(3, 0))
    with no_file_beyond(100_000), pytest.raises(LedgerError, match=r"run\.db: .*what was committed before is kept"):
        ledger.run()
    assert not written.is_set()
    ledger.close()
    again = Ledger(path)
    assert [g.id for g in again.recover(3).kept] == [0]
    write_kept(again, 1)
    assert [g.id for g in write_everything(again).recover(3).kept] == [0, 1]


def test_an_archive_that_can_not_be_written_ends_the_run_and_resumes_later(tmp_path):
    path, archive = tmp_path / "run.db", BatchArchive(tmp_path / "batches")
    ledger = Ledger(path, archive)
    write_kept(ledger, 0, 1)
    ledger.record_batch(batch(3, 0))
    ledger.end_batch(batch(3, 0), Outcome.TRAINED, "")
    write = archive.write

    def write_to_a_full_disk(*args):
        with no_file_beyond(1000):
            write(*args)

    archive.write = write_to_a_full_disk
    ledger.stop()
    with pytest.raises(ArchiveError, match=r"can't write .*batch-000001\.parquet: .*kept in run\.db"):
        ledger.run()
    ledger.close()
    assert list((tmp_path / "batches").iterdir()) == []

    archive.write = write
    ledger = Ledger(path, archive)
    assert ledger.balance().ended == {"trained": 1}
    assert [g.id for g in ledger.recover(4).kept] == [1]
    write_everything(ledger).close()
    assert same(list(archive.read(1).values()), [group(0)])


def test_a_disk_that_is_full_ends_the_run_and_resumes_once_there_is_space(small_disk):
    path, archive = small_disk / "run.db", BatchArchive(small_disk / "batches")
    ledger = Ledger(path, archive)
    write_kept(ledger, 0, 1)
    ledger = write_everything(ledger, archive)
    ledger.recover(3)
    filler = small_disk / "somebody else's"
    with contextlib.suppress(OSError), filler.open("wb") as file:
        while True:
            file.write(b"x" * 4096)
    ledger.admit([flight(2)])
    ledger.land(long_group(2))
    with pytest.raises(
        LedgerError, match=r"can't write the run's record .*run\.db: .*what was committed before is kept"
    ):
        ledger.run()
    ledger.close()
    assert Ledger(path, archive).balance().open == 2  # readable on a full disk

    filler.unlink()
    ledger = Ledger(path, archive)
    assert [g.id for g in ledger.recover(3).kept] == [0, 1]
    ledger.record_batch(batch(3, 0, 1))
    ledger.end_batch(batch(3, 0, 1), Outcome.TRAINED, "")
    write_everything(ledger).close()
    assert same(list(archive.read(1).values()), [group(0), group(1)])
