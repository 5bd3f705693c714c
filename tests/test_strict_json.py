"""What a run writes as JSON any reader of JSON can read."""

import json
import math

from async_rl.jsonl_logger import JsonlLogger
from async_rl.run_record import RunRecord
from async_rl.strict_json import strict_json


def strict(text):
    def refuse(name):
        raise ValueError(name)

    return json.loads(text, parse_constant=refuse)


def test_numbers_that_json_does_not_know_are_null():
    value = {"a": [math.nan, 1.5, (math.inf,)], "b": {"c": -math.inf, "d": True, "e": None, "f": "NaN"}}
    expected = {"a": [None, 1.5, [None]], "b": {"c": None, "d": True, "e": None, "f": "NaN"}}
    assert strict(strict_json(value)) == expected


def test_a_run_without_a_measured_evaluation_leaves_valid_json(tmp_path):
    record = RunRecord(tmp_path, "mine", 0, {}, ["train.py"])
    record.add_results([{"version": 0, "reward": math.nan}], {"eval_start": math.nan})
    written = strict((tmp_path / "run.json").read_text())
    assert (written["evaluations"], written["summary"]) == ([{"version": 0, "reward": None}], {"eval_start": None})
    JsonlLogger(tmp_path / "metrics.jsonl").log_metrics({"eval/reward": math.nan}, 0)
    assert strict((tmp_path / "metrics.jsonl").read_text())["eval/reward"] is None
