"""A run that is refused leaves on disk what was there before it, and nothing else."""

import json

import pytest

from async_rl import main
from async_rl.run_directory import RunDirectory
from async_rl.run_lock import LOCK

WRONG = ("environment.digits=2", "+environment.train_size=100000", "model=tiny")
"""Found by a constructor, when the run directory is there."""
NO_SUCH_OBJECT = """
class Nothing: pass
class NotFound:
    def __init__(self): raise ValueError("no data for me")
"""


def on_disk(directory):
    return {str(path.relative_to(directory)): path.is_file() and path.read_bytes() for path in directory.rglob("*")}


@pytest.fixture
def my_objects(tmp_path, monkeypatch):
    """The module ``my_objects`` with classes that are no environment, no callback and no logger."""
    folder = tmp_path.parent / f"{tmp_path.name}-modules"
    folder.mkdir()
    (folder / "my_objects.py").write_text(NO_SUCH_OBJECT)
    monkeypatch.syspath_prepend(folder)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (WRONG, "there are only 8100 sums"),
        (("engine.dtype=float99", "engine=transformers", "model=tiny"), "engine.dtype='float99': must be one of"),
        (("engine=vllm_server", "engine.urls=[not-a-url]"), "engine.urls: 'not-a-url' is no address of a server"),
        (("max_staleness=-1",), "max_staleness: -1 is not possible; give a number >= 0"),
        (("batch_size=abc",), "batch_size: 'abc' is not possible"),
        (("environment=custom", "environment._target_=my_objects.Nope"), "my_objects has no Nope"),
        (("environment=custom", "environment._target_=my_objects.NotFound", "model=tiny"), "no data for me"),
        (
            ("environment=custom", "environment._target_=my_objects.Nothing", "model=tiny"),
            "environment._target_: my_objects.Nothing makes no Environment; give a class derived from "
            "async_rl.environments.base.Environment",
        ),
        (
            ("+callbacks.mine._target_=my_objects.Nothing", "engine=transformers", "model=tiny"),
            "callbacks.mine._target_: my_objects.Nothing makes no Callback; give a class derived from lightning.",
        ),
        (
            ("+logger.mine._target_=my_objects.Nothing", "engine=transformers", "model=tiny"),
            "logger.mine._target_: my_objects.Nothing makes no Logger; give a class derived from lightning.",
        ),
        (("replay=nowhere",), "there is no run's record (run.db) in nowhere"),
    ],
)
def test_a_refusal_leaves_nothing_new(command, tmp_path, my_objects, arguments, message):
    code, _, err = command("hardware=cpu", *arguments)
    assert code == 2, err
    assert message in err
    assert "Traceback" not in err
    assert on_disk(tmp_path) == {}


def test_a_directory_that_was_there_stays_with_what_was_in_it(command, tmp_path):
    (tmp_path / "here").mkdir()
    (tmp_path / "above" / "other").mkdir(parents=True)
    for run_dir in ("here", "above/of/mine"):
        assert command(*WRONG, f"run_dir={run_dir}")[0] == 2
    assert on_disk(tmp_path) == {"here": False, "above": False, "above/other": False}


def test_a_job_of_a_sweep_that_is_refused_leaves_nothing_and_the_others_their_results(command, monkeypatch, tmp_path):
    ends = [(2, "no prompts"), (0, "done")]
    monkeypatch.setattr(main, "_train", lambda *_: ends.pop(0))
    assert command("-m", "seed=0,1", "run_dir=sweep")[0] == 2
    assert {path.name for path in (tmp_path / "sweep").iterdir()} == {"1", "multirun.yaml"}


def test_a_resume_that_is_refused_leaves_the_run_as_it_was(command, monkeypatch, tmp_path):
    monkeypatch.setattr(main, "_train", lambda *_: (75, "received SIGTERM"))
    assert command("run_dir=here", "model=tiny")[0] == 75
    before = on_disk(tmp_path)
    monkeypatch.setattr(main, "_train", lambda *_: (2, "refused"))
    assert command("run_dir=here", "resume=true", "max_steps=99")[0] == 2
    after = on_disk(tmp_path)
    for told in (before, after):
        del told["here/run.log"], told[f"here/{LOCK}"]
    assert before == after
    assert json.loads(before["here/run.json"])["exit_code"] == 75


def test_a_refusal_deletes_nothing_either(command, monkeypatch, tmp_path):
    with monkeypatch.context() as patched:
        patched.setattr(main, "_train", lambda *_: (0, "done"))
        assert command("run_dir=here", "model=tiny")[0] == 0
    (tmp_path / "here" / "checkpoints").mkdir()
    (tmp_path / "here" / "checkpoints" / "version-000001.ckpt").touch()
    before = on_disk(tmp_path)
    assert command(*WRONG, "run_dir=here", "overwrite=true")[0] == 2
    after = on_disk(tmp_path)
    for told in (before, after):
        del told[f"here/{LOCK}"]
    assert before == after


@pytest.mark.parametrize("stopped_by", [KeyboardInterrupt(), OSError("no room")])
def test_a_run_that_is_stopped_before_it_begins_overwrites_nothing(command, monkeypatch, tmp_path, stopped_by):
    with monkeypatch.context() as patched:
        patched.setattr(main, "_train", lambda *_: (0, "done"))
        assert command("run_dir=here", "model=tiny")[0] == 0
    before = on_disk(tmp_path)

    def build(*_):
        raise stopped_by

    monkeypatch.setattr(main, "build", build)
    assert command("run_dir=here", "model=tiny", "overwrite=true")[0] == 1
    after = on_disk(tmp_path)
    for told in (before, after):
        del told[f"here/{LOCK}"]
    assert before == after


def test_what_is_overwritten_is_gone_when_the_run_begins(tmp_path):
    (tmp_path / "run" / "batches").mkdir(parents=True)
    (tmp_path / "run" / "run.json").touch()
    directory = RunDirectory(tmp_path / "run", exist_ok=True)
    directory.overwrite()
    directory.begin()
    assert set(on_disk(tmp_path / "run")) == {LOCK}
    directory.release()


@pytest.mark.parametrize("holds", ["checkpoints", "groups", "nothing"])
def test_what_was_recorded_or_saved_is_never_taken_back(tmp_path, monkeypatch, holds):
    monkeypatch.setattr("async_rl.run_directory.holds_groups", lambda database: holds == "groups")
    directory = RunDirectory(tmp_path / "runs" / "one", exist_ok=False)
    if holds == "checkpoints":
        (tmp_path / "runs" / "one" / "checkpoints").mkdir()
    assert directory.restore() is (holds == "nothing")
    directory.release()
    assert (on_disk(tmp_path) == {}) is (holds == "nothing")
