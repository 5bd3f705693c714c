"""Real signals to a real process that waits for rollouts."""

import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from async_rl.callbacks.checkpoint import latest_checkpoint

SCRIPT = Path(__file__).parent / "interruptible_run.py"


def start(model_dir, run_dir, close="quick"):
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), str(model_dir), str(run_dir), close],
        stdout=subprocess.PIPE, stderr=(run_dir / "err").open("w"), text=True,
    )  # fmt: skip
    read_until(process, "waiting")
    return process


def read_until(process, word):
    for line in process.stdout:
        if line.strip() == word:
            return
    raise AssertionError(f"the run ended with {process.wait()} before it said {word!r}")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_waiting_saves_a_checkpoint_and_exits_with_75(tiny_model_dir, tmp_path, number):
    process = start(tiny_model_dir, tmp_path)
    sent_s = time.monotonic()
    process.send_signal(number)
    read_until(process, "ending")
    assert time.monotonic() - sent_s < 5  # noticed while waiting, not at the end of a step
    said = (tmp_path / "err").read_text()
    assert f"{number.name}: finishing and saving; again = stop at once (nothing more is saved)\n" in said
    assert process.wait(timeout=40) == 75
    assert latest_checkpoint(tmp_path / "checkpoints").name == "version-000002.ckpt"
    with sqlite3.connect(tmp_path / "run.db") as db:
        ended = dict(db.execute("select coalesce(outcome, 'open'), count(*) from groups group by 1"))
    assert ended["trained"] == 4
    assert set(ended) == {"trained", "saved"}


def test_a_second_signal_exits_at_once(tiny_model_dir, tmp_path):
    process = start(tiny_model_dir, tmp_path, close="never")
    process.send_signal(signal.SIGINT)
    read_until(process, "ending")
    sent_s = time.monotonic()
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=5) == 128 + signal.SIGINT
    assert time.monotonic() - sent_s < 2
    assert (tmp_path / "err").read_text().endswith("SIGINT again: stopped at once\n")
    assert (tmp_path / "last_words").read_text() == "130 stopped at once by a second SIGINT"


def test_an_engine_that_will_not_close_is_left_behind_in_time_and_the_exit_code_says_so(tiny_model_dir, tmp_path):
    process = start(tiny_model_dir, tmp_path, close="never")
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=40) == 1
