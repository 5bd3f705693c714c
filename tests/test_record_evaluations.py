"""Which evaluations a run has finished, as its record keeps them."""

import json

from async_rl.record_evaluations import RecordedEvaluations

FIRST, LATER = ({"version": v, "reward": v / 10, "failures": 1.0} for v in (0, 4))


def test_what_was_finished_is_known_in_the_next_process():
    evaluated = RecordedEvaluations().and_also(FIRST).and_also(LATER)
    meta = json.loads(json.dumps(evaluated.to_meta()))
    assert RecordedEvaluations.from_meta(meta, 4) == evaluated
    assert evaluated.told("eval_end", 4) == {"eval_end": 0.4, "eval_end_version": 4, "eval_end_failures": 1.0}
    assert evaluated.told("eval_end", 3) == {}


def test_what_was_said_of_weights_that_are_made_anew_is_forgotten():
    meta = RecordedEvaluations().and_also(FIRST).and_also(LATER).to_meta()
    assert list(RecordedEvaluations.from_meta(meta, 3).finished) == [0]


def test_where_a_run_stands_counts_as_evaluated_if_an_earlier_version_did_not_say():
    assert list(RecordedEvaluations.from_meta({}, 3).finished) == [3]
    assert RecordedEvaluations.from_meta({}, 3).told("eval_start", 3) == {}
    assert RecordedEvaluations.from_meta({}, 0) == RecordedEvaluations()
