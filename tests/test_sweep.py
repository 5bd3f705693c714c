"""A sweep says which job begins and, at its end, what came of each."""

import json
from pathlib import Path

import pytest

from async_rl import main


@pytest.fixture
def ended(monkeypatch):
    """Leave training out; each job ends as the next entry says: exit code, reason, closing figures."""
    ends = []

    def train(config, choices, record, directory):
        code, reason, figures = ends.pop(0)
        record.add_results([], figures)
        return code, reason

    monkeypatch.setattr(main, "_train", train)
    return ends


def test_each_job_is_announced_and_the_end_lists_what_came_of_them(command, ended):
    figures = {"steps": 1, "version": 2, "eval_end": 0.5}  # the last of its processes made one of them
    ended += [(0, "max_steps=2 reached", figures), (1, "KeyError: 'x'\nmore", {})]
    code, out, err = command("-m", "max_staleness=0,2", "model=tiny", "run_dir=sweep")
    assert (code, err) == (1, "")
    assert out.splitlines() == [
        "job 1 of 2: max_staleness=0",
        "",
        "job 2 of 2: max_staleness=2",
        "",
        "results of the sweep: sweep",
        "  max_staleness=0  version 2, evaluation 0.500, sweep/0",
        "  max_staleness=2  exit code 1: KeyError: 'x', sweep/1",
    ]


def test_an_interruption_lists_what_was_done_and_ends_the_sweep(command, ended):
    ended += [(0, "max_steps=2 reached", {"version": 2}), (75, "received SIGINT", {"version": 1})]
    code, out, _ = command("-m", "seed=0,1,2", "model=tiny", "run_dir=sweep")
    assert (code, ended) == (75, [])
    assert out.splitlines()[-4:] == [
        "results of the sweep, which ends with job 2 of 3: sweep",
        "  seed=0  version 2, sweep/0",
        "  seed=1  version 1, exit code 75: received SIGINT, sweep/1",
        "to go on with all 3 jobs: the same command with resume=true run_dir=sweep",
    ]
    assert not Path("sweep/2").exists()


def test_a_sweep_that_is_resumed_begins_the_jobs_that_never_began(command, ended, monkeypatch):
    resumed = []
    train = main._train

    def noting(config, *more):
        resumed.append((config.run_dir, config.resume))
        return train(config, *more)

    monkeypatch.setattr(main, "_train", noting)
    ended += [(0, "done", {"version": 2}), (75, "received SIGINT", {"version": 1})]
    command("-m", "seed=0,1,2", "model=tiny", "run_dir=sweep")
    ended += [(0, "done", {"version": 2})] * 3
    code, out, err = command("-m", "seed=0,1,2", "model=tiny", "run_dir=sweep", "resume=true")
    assert (code, err) == (0, "")
    assert resumed[2:] == [("sweep/0", True), ("sweep/1", True), ("sweep/2", False)]
    assert "there is no run in sweep/2 yet: it begins now" in out.splitlines()


def test_a_sweep_that_never_was_is_not_resumed(command, ended):
    code, _, err = command("-m", "seed=0,1", "model=tiny", "run_dir=typo", "resume=true")
    assert code == 2
    assert "there is no run in typo/0" in err
    assert not list(Path().glob("typo/*/run.json"))


def test_an_interruption_before_training_does_so_too(command, ended, monkeypatch):
    train = main._train

    def interrupted(*arguments):
        if not ended:
            raise KeyboardInterrupt
        return train(*arguments)

    monkeypatch.setattr(main, "_train", interrupted)
    ended += [(0, "done", {"version": 2})]
    code, out, _ = command("-m", "seed=0,1,2", "model=tiny", "run_dir=sweep")
    assert code == 1
    assert out.splitlines()[-2:] == [
        "  seed=1  exit code 1: interrupted before training, sweep/1",
        "to go on with all 3 jobs: delete sweep/1, which holds nothing to go on from, then the same command with "
        "resume=true run_dir=sweep",
    ]
    assert not Path("sweep/2").exists()


def test_a_job_that_is_refused_is_listed_as_that_whatever_is_in_its_directory(command, ended, monkeypatch):
    ended += [(0, "done", {"version": 2}), (2, "no prompts", {}), (0, "done", {"version": 2})]
    assert command("run_dir=sweep/0", "model=tiny")[0] == 0
    code, out, _ = command("-m", "seed=0,1,2", "model=tiny", "run_dir=sweep")
    assert code == 2
    assert out.splitlines()[-3:] == [
        "  seed=0  exit code 2: refused, see above",
        "  seed=1  exit code 2: refused, see above",
        "  seed=2  version 2, sweep/2",
    ]


def test_jobs_of_several_recipes_are_found_each_in_its_directory(command, ended):
    ended += [(0, "done", {"version": 1})] * 2
    code, out, _ = command("-m", "+recipe=arithmetic,gsm8k", "hardware=cpu")
    first, second = (Path(line.split(", ")[-1]) for line in out.splitlines()[-2:])
    assert code == 0
    assert [json.loads((path / "run.json").read_text())["recipe"] for path in (first, second)] == [
        "arithmetic",
        "gsm8k",
    ]
    assert "results of the sweep: runs\n" in out


def test_an_interrupted_sweep_of_several_recipes_goes_on_job_by_job(command, ended):
    ended += [(0, "done", {"version": 1}), (75, "received SIGTERM", {"version": 1})]
    _, out, _ = command("-m", "+recipe=arithmetic,gsm8k", "hardware=cpu")
    assert out.splitlines()[-1] == "to go on with a job: resume=true and its directory as run_dir"


def test_a_single_run_says_nothing_of_jobs(command, ended):
    ended += [(0, "done", {})]
    code, out, _ = command("model=tiny")
    assert (code, "job" in out, "sweep" in out) == (0, False, False)


def test_a_group_without_a_choice_is_refused_before_the_first_job(command, trained):
    code, _, err = command("-m", "environment=arithmetic,null", "model=tiny")
    assert (code, trained) == (2, [])
    assert "in the job environment=null model=tiny: environment=null: a run needs it" in err
