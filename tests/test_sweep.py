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
    figures = {"steps": 2, "eval_end": 0.5}
    ended += [(0, "max_steps=2 reached", figures), (1, "KeyError: 'x'\nmore", {})]
    code, out, err = command("-m", "max_staleness=0,2", "model=tiny", "run_dir=sweep")
    assert (code, err) == (1, "")
    assert out.splitlines() == [
        "job 1 of 2: max_staleness=0",
        "",
        "job 2 of 2: max_staleness=2",
        "",
        "results of the sweep: sweep",
        "  max_staleness=0  2 steps, evaluation 0.500, sweep/0",
        "  max_staleness=2  exit code 1: KeyError: 'x', sweep/1",
    ]


def test_an_interruption_lists_what_was_done_and_ends_the_sweep(command, ended):
    ended += [(0, "max_steps=2 reached", {"steps": 2}), (75, "received SIGINT", {"steps": 1})]
    code, out, _ = command("-m", "seed=0,1,2", "model=tiny", "run_dir=sweep")
    assert (code, ended) == (75, [])
    assert out.splitlines()[-3:] == [
        "results of the sweep, which ends with job 2 of 3: sweep",
        "  seed=0  2 steps, sweep/0",
        "  seed=1  1 steps, exit code 75: received SIGINT, sweep/1",
    ]
    assert not Path("sweep/2").exists()


def test_an_interruption_before_training_does_so_too(command, ended, monkeypatch):
    train = main._train

    def interrupted(*arguments):
        if not ended:
            raise KeyboardInterrupt
        return train(*arguments)

    monkeypatch.setattr(main, "_train", interrupted)
    ended += [(0, "done", {"steps": 2})]
    code, out, _ = command("-m", "seed=0,1,2", "model=tiny", "run_dir=sweep")
    assert code == 1
    assert "  seed=1  exit code 1: interrupted before training, sweep/1" in out.splitlines()
    assert not Path("sweep/2").exists()


def test_a_job_that_is_refused_is_listed_as_that_whatever_is_in_its_directory(command, ended, monkeypatch):
    ended += [(0, "done", {"steps": 2}), (2, "no prompts", {}), (0, "done", {"steps": 2})]
    assert command("run_dir=sweep/0", "model=tiny")[0] == 0
    code, out, _ = command("-m", "seed=0,1,2", "model=tiny", "run_dir=sweep")
    assert code == 2
    assert out.splitlines()[-3:] == [
        "  seed=0  exit code 2: refused, see above",
        "  seed=1  exit code 2: refused, see above",
        "  seed=2  2 steps, sweep/2",
    ]


def test_jobs_of_several_recipes_are_found_each_in_its_directory(command, ended):
    ended += [(0, "done", {"steps": 1})] * 2
    code, out, _ = command("-m", "+recipe=arithmetic,gsm8k", "hardware=cpu")
    first, second = (Path(line.split(", ")[-1]) for line in out.splitlines()[-2:])
    assert code == 0
    assert [json.loads((path / "run.json").read_text())["recipe"] for path in (first, second)] == [
        "arithmetic",
        "gsm8k",
    ]
    assert "results of the sweep: runs\n" in out


def test_a_single_run_says_nothing_of_jobs(command, ended):
    ended += [(0, "done", {})]
    code, out, _ = command("model=tiny")
    assert (code, "job" in out, "sweep" in out) == (0, False, False)


def test_a_group_without_a_choice_is_refused_before_the_first_job(command, trained):
    code, _, err = command("-m", "environment=arithmetic,null", "model=tiny")
    assert (code, trained) == (2, [])
    assert "in the job environment=null model=tiny: environment=null: a run needs it" in err
