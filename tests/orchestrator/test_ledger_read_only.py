"""Reading a record: nothing of it is missed, and nothing beside it is made or changed, so a read-only place will do."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest
from ledger_kit import flight, write_everything

from async_rl.orchestrator.ledger import Ledger
from async_rl.orchestrator.ledger_reader import holds_groups, read_meta
from async_rl.orchestrator.ledger_rows import LedgerError, reading

WRITES = """
import sys
from ledger_kit import flight
from async_rl.orchestrator.ledger import Ledger
ledger = Ledger(sys.argv[1])
ledger.set_meta({"batch_size": 4})
ledger.admit([flight(i) for i in range(7)])
ledger.stop()
ledger.run()
print("written", flush=True)
sys.stdin.read()
"""


def finished(directory):
    ledger = Ledger(directory / "run.db")
    ledger.set_meta({"batch_size": 4})
    ledger.admit([flight(i) for i in range(7)])
    write_everything(ledger).close()


@contextmanager
def going_on(directory):
    command = [sys.executable, "-c", WRITES, str(directory / "run.db")]
    paths = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": paths}
    ) as process:
        try:
            assert process.stdout.readline() == b"written\n"
            yield
        finally:
            process.send_signal(signal.SIGKILL)


def killed(directory):
    with going_on(directory):
        pass
    assert (directory / "run.db-wal").stat().st_size > 0


def killed_and_copied_without_the_index(directory):
    killed(directory)
    (directory / "run.db-shm").unlink()


def with_what_another_reader_left(directory):
    finished(directory)
    for suffix in ("-wal", "-shm"):
        (directory / f"run.db{suffix}").touch()


MADE = [finished, killed, killed_and_copied_without_the_index, with_what_another_reader_left]


def state(directory):
    """Names, contents and times of a directory and what is in it."""
    files = sorted(directory.iterdir())
    return directory.stat().st_mtime_ns, [(f.name, f.read_bytes(), f.stat().st_mtime_ns) for f in files]


def read(path):
    assert holds_groups(path)
    with reading(path) as db:
        (admitted,) = db.execute("SELECT count(*) FROM admissions").fetchone()
    return admitted, read_meta(path)


@contextmanager
def unprivileged():
    """As somebody who may not write where it is forbidden, which root may."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)


@pytest.fixture
def read_only_place():
    """A directory that everybody can reach, unlike ``tmp_path``."""
    directory = Path(tempfile.mkdtemp())
    yield directory
    directory.chmod(0o755)
    shutil.rmtree(directory)


@pytest.mark.parametrize("make", MADE, ids=lambda make: make.__name__)
def test_a_record_is_read_whole_and_left_as_it_was(make, tmp_path):
    make(tmp_path)
    before = state(tmp_path)
    assert read(tmp_path / "run.db") == (7, {"batch_size": 4})
    assert state(tmp_path) == before


def test_the_record_of_a_run_that_goes_on_is_read_whole_and_left_as_it_was(tmp_path):
    with going_on(tmp_path):
        before = state(tmp_path)
        assert read(tmp_path / "run.db") == (7, {"batch_size": 4})
        assert state(tmp_path) == before


@pytest.mark.parametrize("make", MADE, ids=lambda make: make.__name__)
def test_a_record_is_read_where_nothing_may_be_written(make, read_only_place):
    make(read_only_place)
    for file in read_only_place.iterdir():
        file.chmod(0o444)
    read_only_place.chmod(0o555)
    with unprivileged():
        with pytest.raises(PermissionError):
            (read_only_place / "new").touch()
        assert read(read_only_place / "run.db") == (7, {"batch_size": 4})


def test_the_record_of_a_run_of_somebody_else_that_goes_on_is_read(read_only_place):
    read_only_place.chmod(0o755)
    with going_on(read_only_place), unprivileged():
        assert read(read_only_place / "run.db") == (7, {"batch_size": 4})


def test_a_link_to_a_record_is_read_with_what_lies_beside_the_record(tmp_path):
    for name in ("there", "here"):
        (tmp_path / name).mkdir()
    killed(tmp_path / "there")
    (tmp_path / "here" / "run.db").symlink_to(tmp_path / "there" / "run.db")
    assert read(tmp_path / "here" / "run.db") == (7, {"batch_size": 4})


def test_a_run_that_was_killed_goes_on_after_it_was_read(tmp_path):
    killed(tmp_path)
    read(tmp_path / "run.db")
    ledger = Ledger(tmp_path / "run.db")
    assert ledger.meta() == {"batch_size": 4}
    assert len(ledger.recover(3).unfinished) == 7
    ledger.close()
    assert read(tmp_path / "run.db") == (7, {"batch_size": 4})


def test_a_record_that_is_missing_is_refused_by_name(tmp_path):
    with pytest.raises(LedgerError, match=r"run\.db does not exist: give the directory of a run"):
        read_meta(tmp_path / "run.db")
