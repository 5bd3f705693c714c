"""run.json: which process a run is, and what becomes of one that could not say how it ended."""

import json
import os
import platform

from async_rl.run_record import RunRecord


def record(directory):
    return RunRecord(directory, "arithmetic", 0, {}, ["train.py"])


def read(directory):
    return json.loads((directory / "run.json").read_text())


def test_a_run_that_goes_on_names_its_process(tmp_path):
    record(tmp_path)
    now = read(tmp_path)
    assert (now["exit_reason"], now["exit_code"]) == ("running", None)
    assert (now["pid"], now["host"]) == (os.getpid(), platform.node())


def test_a_process_that_was_killed_is_called_so_by_the_one_that_goes_on(tmp_path):
    record(tmp_path)
    record(tmp_path).finish("max_steps=2 reached", 0)
    record(tmp_path)
    assert [e["exit_reason"] for e in read(tmp_path)["earlier"]] == ["killed", "max_steps=2 reached"]


def test_a_process_that_trains_nothing_leaves_the_results_of_the_one_that_did(tmp_path):
    first = record(tmp_path)
    first.add_results([{"version": 4, "reward": 0.5}], {"steps": 4, "version": 4})
    first.finish("max_steps=4 reached", 0)
    record(tmp_path)  # killed before it came to anything
    for _ in range(2):
        last = record(tmp_path)
        last.keep_results(4, {"version": 4, "reward": 0.5}, {})
        last.finish("nothing to train", 0)
        now = read(tmp_path)
        assert (now["evaluations"], now["summary"]) == (
            [{"version": 4, "reward": 0.5}], {"steps": 4, "version": 4}
        )  # fmt: skip
    record(tmp_path).keep_results(6, {}, {})  # who came to version 6 could not say what it found
    assert (read(tmp_path)["evaluations"], read(tmp_path)["summary"]) == ([], {})


def test_an_evaluation_that_was_made_up_for_is_added_to_the_results(tmp_path):
    first, late = {"version": 0, "reward": 0.25}, {"version": 4, "reward": 0.5}
    one = record(tmp_path)
    one.add_results([first], {"steps": 4, "version": 4})
    one.finish("received SIGTERM", 75)
    record(tmp_path).keep_results(4, late, {"eval_end": 0.5})
    assert read(tmp_path)["evaluations"] == [first, late]
    assert read(tmp_path)["summary"] == {"steps": 4, "version": 4, "eval_end": 0.5}


def test_an_evaluation_outlives_a_process_that_was_killed_before_it_could_say_so(tmp_path):
    record(tmp_path)
    for _ in range(2):
        record(tmp_path).keep_results(4, {"version": 4, "reward": 0.5}, {"eval_end": 0.5})
        assert read(tmp_path)["evaluations"] == [{"version": 4, "reward": 0.5}]
        assert read(tmp_path)["summary"] == {"steps": 0, "start_version": 4, "version": 4, "eval_end": 0.5}
