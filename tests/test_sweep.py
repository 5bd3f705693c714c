"""A sweep says which job begins and, at its end, what came of each."""

import json
from pathlib import Path

import pytest

from async_rl import main


@pytest.fixture
def ended(monkeypatch):
    """Leave training out; each job ends as the next entry says: exit code, reason, closing figures."""
    ends = []

    def train(config, choices, record):
        code, reason, figures = ends.pop(0)
        record.add_results([], figures)
        return code, reason

    monkeypatch.setattr(main, "_train", train)
    return ends


def test_each_job_is_announced_and_the_end_lists_what_came_of_them(command, ended):
    figures = {"steps": 2, "eval_end": 0.5, "reward_min": 0.0, "reward_max": 1.0}
    ended += [(0, "max_steps=2 reached", figures), (1, "KeyError: 'x'\nmore", {})]
    code, out, err = command("-m", "max_staleness=0,2", "model=tiny", "run_dir=sweep")
    assert (code, err) == (1, "")
    assert out.splitlines() == [
        "job 1 of 2: max_staleness=0",
        "",
        "job 2 of 2: max_staleness=2",
        "",
        "results of the sweep: sweep",
        "  max_staleness=0  2 steps, evaluation 50.0%, sweep/0",
        "  max_staleness=2  exit code 1: KeyError: 'x', sweep/1",
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
