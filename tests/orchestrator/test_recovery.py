"""What a resumed run keeps of an earlier one under another bound."""

import pytest
from loop_kit import ByHand, running

from async_rl.orchestrator.records import Recovery
from async_rl.orchestrator.recovery import described, within_bound
from async_rl.types import Group, Prompt, Segment, Trajectory


def trajectory(head, tail=None):
    segments = (Segment(head, 1, 2), Segment(head if tail is None else tail, 2, 3))
    return Trajectory(0, 0, [1, 2, 3], [0, 1, 1], [0.0] * 3, segments, 1, 0.0)


def group(group_id, head, tail=None, admitted=0):
    return Group(group_id, Prompt(f"p/0/{group_id}", "p", {}), admitted, (trajectory(head, tail),))


def fit(recovery, S, B=2, G=4, **kwargs):  # noqa: N803
    return within_bound(recovery, batch_size=B, group_size=G, max_staleness=S, **kwargs)


def of(version=10, batches=(), kept=(), unfinished=()):
    return Recovery(version, 1000, tuple(map(tuple, batches)), tuple(kept), tuple(unfinished))


def test_with_the_bound_of_then_nothing_changes():
    recovery = of(
        batches=[[group(0, 8), group(1, 10)], [group(2, 9), group(3, 9)]],
        kept=[group(4, 10), group(5, 10), group(6, 11)],
        unfinished=[(7, {1: trajectory(11)}), (8, {})],
    )
    assert fit(recovery, 2) == (recovery, (), None)
    assert fit(recovery, None) == (recovery, (), None)


def test_the_oldest_are_issued_again_until_the_rest_can_be_trained_in_time():
    kept = [group(0, 8), group(1, 9), group(2, 9), group(3, 9), group(5, 10), group(6, 10)]
    recovery = of(kept=kept, unfinished=[(4, {0: trajectory(9)}), (7, {})])
    fitted, reissued, withdrawn = fit(recovery, 1)
    # At version 10 and S = 1: head 8 is too late, of head 9 two can go at 10, of 9 and 10 four in all.
    assert reissued == (0, 1, 2)
    assert [g.id for g in fitted.kept] == [3, 5, 6]
    assert [i for i, _ in fitted.unfinished] == [0, 1, 2, 4, 7]
    assert [i for i, landed in fitted.unfinished if landed] == [4]
    assert withdrawn is None
    assert fit(fitted, 1) == (fitted, (), None)


def test_an_unfinished_group_starts_from_scratch_when_its_samples_are_too_old():
    fitted, reissued, _ = fit(of(unfinished=[(4, {0: trajectory(7), 1: trajectory(10)})]), 2)
    assert (fitted.unfinished, reissued) == (((4, {}),), (4,))


def test_without_deadlines_only_the_number_counts():
    recovery = of(kept=[group(i, 3) for i in range(7)])
    fitted, reissued, _ = fit(recovery, 1, deadlines=False)
    assert reissued == (0, 1, 2)
    assert len(fitted.kept) == 4


def test_recorded_batches_go_again_up_to_the_first_that_is_too_old_and_its_groups_are_planned_anew():
    recovery = of(
        batches=[[group(0, 9), group(1, 9)], [group(2, 9), group(3, 11)], [group(4, 11, 12), group(5, 12)]],
        kept=[group(6, 12), group(7, 11)],
        unfinished=[(8, {0: trajectory(11, 13)})],
    )
    fitted, reissued, withdrawn = fit(recovery, 1)
    assert withdrawn == 11
    assert [[g.id for g in b] for b in fitted.batches] == [[0, 1]]
    # 2 is too old for version 11; 4, 5, 6 and 8 were sampled by versions that are no more.
    assert reissued == (2, 4, 5, 6, 8)
    assert [g.id for g in fitted.kept] == [3, 7]


@pytest.mark.parametrize(
    ("recovery", "told"),
    [
        (of(), "nothing recorded waits to be trained"),
        (
            of(batches=[[group(0, 8)], [group(1, 9)]], kept=[group(2, 10)], unfinished=[(3, {}), (4, {})]),
            "2 recorded batches are trained again from the record, 1 finished group is reused, "
            "2 unfinished groups are generated again",
        ),
        (
            of(batches=[[group(0, 8)]], unfinished=[(3, {0: trajectory(9), 2: trajectory(10)})]),
            "1 recorded batch is trained again from the record, "
            "1 unfinished group is generated again but for its 2 finished rollouts",
        ),
        (of(unfinished=[(3, {0: trajectory(9)}), (4, {})]), "2 unfinished groups are generated again but for their 1 "
         "finished rollout"),
    ],
)  # fmt: skip
def test_what_is_gone_on_with_is_told_in_numbers(recovery, told):
    assert described(recovery) == told


def test_samples_beyond_the_group_size_are_not_gone_on_with():
    fitted, reissued, _ = fit(of(unfinished=[(0, {3: trajectory(10)}), (1, {1: trajectory(10)})]), 2, G=2)
    assert reissued == (0,)
    assert [bool(landed) for _, landed in fitted.unfinished] == [False, True]


@pytest.mark.parametrize("S", range(4))
def test_at_most_s_plus_one_batches_of_groups_are_left(S):  # noqa: N803
    recovery = of(kept=[group(i, 6 + i % 5) for i in range(40)])
    fitted, reissued, _ = fit(recovery, S)
    assert len(fitted.kept) <= (S + 1) * 2
    assert len(fitted.kept) + len(reissued) == 40


def test_the_first_step_after_a_resume_at_version_40_has_24_groups_at_most():
    """CASES 14: B = 8, S = 2; elsewhere 344 were admitted, for the count of accepted ones started at zero."""
    kept = [group(320 + i, 40, admitted=40) for i in range(10)]
    recovered = Recovery(40, 332, kept=tuple(kept), unfinished=((330, {0: trajectory(40)}), (331, {})))
    by_hand = ByHand()
    with running(
        by_hand, start_version=40, recovered=recovered, batch_size=8, max_staleness=2, max_steps=100
    ) as orchestrator:
        by_hand.wait_started(2 * 14 - 1)
        books = orchestrator.outcomes()
        assert (books["kept"], books["running"], books["admitted"]) == (10, 14, 24)
        assert orchestrator.snapshot()["limited_by"] == "bound"


def test_what_waits_to_be_run_again_is_counted_and_saved_though_it_was_not_launched():
    recovered = Recovery(2, 8, (), (group(4, 2),), ((5, {0: trajectory(2)}), (6, {})), {"trained": 4, "failed": 1})
    with running(ByHand(), start_version=2, recovered=recovered, resume=False) as orchestrator:
        books = orchestrator.outcomes()
        assert [books[name] for name in ("admitted", "kept", "running", "reissued", "recorded")] == [8, 1, 1, 1, 0]
    books = orchestrator.outcomes()
    assert [books[name] for name in ("admitted", "saved", "reissued", "trained", "failed")] == [8, 3, 0, 4, 1]
