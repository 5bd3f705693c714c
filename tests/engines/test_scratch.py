"""Scratch directories of engines: gone with their owner's cleanup, or with the next one made after its death."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from async_rl.engines.scratch import Scratch
from async_rl.engines.vllm import VLLMEngine

OWNER = """
import sys, tempfile
tempfile.tempdir = sys.argv[1]
from async_rl.engines.scratch import Scratch
scratch = Scratch()
print(scratch.name, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def temp_dir(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_it_is_there_until_it_is_cleaned_up(temp_dir):
    scratch = Scratch()
    (Path(scratch.name) / "socket").touch()
    assert Path(scratch.name).parent == temp_dir
    scratch.cleanup()
    scratch.cleanup()
    assert list(temp_dir.iterdir()) == []


def test_an_engine_that_was_never_started_removes_it_too(temp_dir):
    left = temp_dir / "async-rl-engine-0"
    left.mkdir()
    (left / "owner").touch()
    asyncio.run(VLLMEngine("model").close())  # a run that is resumed with nothing left to do
    assert not left.exists()


def test_what_a_killed_process_left_is_removed_by_the_next_one_and_nothing_else(temp_dir):
    (temp_dir / "async-rl-of-somebody").mkdir()
    mine = Scratch()
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, str(temp_dir)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        theirs = Path(owner.stdout.readline().strip())
        (theirs / "socket").touch()
        Scratch().cleanup()
        assert theirs.exists()  # its owner lives
        owner.kill()
        owner.wait()
    assert theirs.exists()  # nobody could remove it
    Scratch().cleanup()
    assert not theirs.exists()
    assert Path(mine.name).exists()
    assert (temp_dir / "async-rl-of-somebody").exists()
    mine.cleanup()
