"""BatchPlanner: which groups, when to wait, and what the other policies give up."""

import pytest

from async_rl.orchestrator.planner import BatchPlanner, Plan


def make_planner(B=2, S=1, policy="wait") -> BatchPlanner:  # noqa: N803
    return BatchPlanner(batch_size=B, max_staleness=S, stale_policy=policy)


def admit(planner, **groups):
    """`admit(planner, g3=(1, None), g4=(1, 2))`: group 3 admitted at 1 and running, group 4 kept with head 2."""
    for name, (version, head) in groups.items():
        planner.admitted(int(name[1:]), version)
        if head is not None:
            planner.keep(int(name[1:]), head)


def test_the_oldest_heads_go_first_then_admission_order():
    planner = make_planner(B=3, S=4)
    admit(planner, g5=(0, 1), g4=(0, 1), g6=(0, 0), g3=(0, 2), g9=(0, 1))
    assert planner.plan(2).groups == (6, 4, 5)
    for group_id in (6, 4, 5):
        planner.end(group_id)
    assert planner.plan(3) == Plan((), "1 more group")
    admit(planner, g10=(3, 3))
    assert planner.plan(3).groups == (9, 3, 10)


def test_it_waits_for_a_straggler_that_is_due_now():
    planner = make_planner(S=2)
    admit(planner, g17=(4, None), g18=(5, 5), g19=(5, 6))
    assert planner.plan(5).groups == (18, 19)  # at 5 there is one more step for group 17
    planner.end(18)
    planner.end(19)
    admit(planner, g20=(6, 6), g21=(6, 6))
    assert planner.plan(6) == Plan((), "group 17 (admitted at version 4) is due by version 6")
    planner.keep(17, 4)
    assert planner.plan(6).groups == (17, 20)


def test_it_waits_when_more_groups_are_due_in_a_future_step_than_fit_in_it():
    planner = make_planner(B=2, S=2)
    admit(planner, g0=(0, None), g1=(0, None), g2=(0, None), g3=(1, 1), g4=(1, 1))
    # Nothing is due at version 1; groups 0, 1, 2 are due by version 2, whose step has two places.
    reason = planner.plan(1).waiting_for
    assert reason == "3 groups are due by version 2, the oldest is group 0 (admitted at version 0)"
    planner.keep(0, 0)
    assert planner.plan(1).groups == (0, 3)


def test_a_late_first_token_moves_the_deadline():
    planner = make_planner(B=1, S=1)
    admit(planner, g0=(0, None), g1=(0, 0))
    assert planner.plan(1).waiting_for == "group 0 (admitted at version 0) is due by version 1"
    planner.keep(0, 1)
    assert planner.plan(1).groups == (1,)


def test_groups_without_a_stamp_keep_their_admission_order():
    planner = make_planner(B=1, S=1)
    planner.admitted(0, 0)
    planner.keep(0, None)
    admit(planner, g1=(0, 0))
    assert planner.plan(0).groups == (0,)


def test_filtered_groups_leave_the_wait():
    planner = make_planner(S=0)
    admit(planner, g0=(0, None), g1=(0, 0), g2=(0, 0))
    assert planner.plan(0).groups == ()
    planner.end(0)
    assert planner.plan(0).groups == (1, 2)


def test_mask_does_not_wait_for_a_group_past_its_deadline_and_trains_it_first():
    planner = make_planner(S=1, policy="mask")
    admit(planner, g0=(0, None), g1=(1, 1), g2=(1, 1))
    assert planner.plan(1).groups == (1, 2)
    planner.end(1)
    planner.end(2)
    planner.keep(0, 0)
    admit(planner, g3=(2, 2))
    assert planner.plan(3).groups == (0, 3)


def test_mask_still_waits_while_it_can_help():
    planner = make_planner(B=2, S=2, policy="mask")
    admit(planner, g0=(0, None), g1=(0, None), g2=(0, None), g3=(1, 1), g4=(1, 1))
    assert planner.plan(1).waiting_for.startswith("3 groups are due by version 2")


def test_allow_never_waits():
    planner = make_planner(S=None, policy="allow")
    admit(planner, g0=(0, None), g1=(0, None), g2=(0, None), g3=(9, 9), g4=(8, 8))
    assert planner.plan(9).groups == (4, 3)


def test_allow_ignores_a_bound_that_is_set():
    planner = make_planner(S=0, policy="allow")
    admit(planner, g0=(0, None), g1=(3, 3), g2=(3, 3))
    assert planner.plan(9).groups == (1, 2)


@pytest.mark.parametrize(("short_ok", "groups"), [(True, (0,)), (False, ())])
def test_the_last_short_batch_is_told_from_a_wait(short_ok, groups):
    planner = make_planner(S=0)
    admit(planner, g0=(0, 0), g1=(0, None))
    assert planner.plan(0, exhausted=True, short_ok=short_ok) == Plan((), "1 more group")  # group 1 still runs
    planner.end(1)
    assert planner.plan(0, short_ok=short_ok) == Plan((), "1 more group")  # prompts are left
    assert planner.plan(0, exhausted=True, short_ok=short_ok) == Plan(groups, "")


def test_full_batches_go_before_the_short_one():
    planner = make_planner(S=1)
    admit(planner, g0=(0, 0), g1=(0, 0), g2=(0, 0))
    assert planner.plan(0, exhausted=True, short_ok=True).groups == (0, 1)
    planner.end(0)
    planner.end(1)
    assert planner.plan(1, exhausted=True, short_ok=True).groups == (2,)
    planner.end(2)
    assert planner.plan(2, exhausted=True, short_ok=True) == Plan((), "")


def test_the_batch_stays_known_until_it_ends():
    planner = make_planner(S=1)
    admit(planner, g0=(0, 0), g1=(0, 0), g2=(0, 0), g3=(0, 0))
    assert planner.plan(0).groups == (0, 1)
    with pytest.raises(RuntimeError, match="group 0 is still in training"):
        planner.plan(0)
    with pytest.raises(ValueError, match="group 1 is in the system already"):
        planner.admitted(1, 0)
    planner.end(0)
    planner.end(1)
    assert planner.plan(1).groups == (2, 3)


def test_a_kept_group_can_be_dropped():
    planner = make_planner(S=1)
    admit(planner, g0=(0, 0), g1=(0, 0), g2=(0, 0))
    planner.end(1)
    assert planner.plan(0).groups == (0, 2)


def test_groups_that_no_wait_can_help_are_an_error_and_never_a_hang():
    planner = make_planner(B=2, S=1)
    admit(planner, **{f"g{i}": (3, 3) for i in range(5)}, g5=(2, 2), g6=(4, 4))
    with pytest.raises(RuntimeError, match="re-issue what `within_bound` names"):
        planner.plan(4)


def test_misuse_is_an_error_that_names_the_group():
    planner = make_planner()
    with pytest.raises(LookupError, match="group 1"):
        planner.keep(1, 0)
    with pytest.raises(LookupError, match="never admitted"):
        planner.end(1)
    planner.admitted(1, 3)
    with pytest.raises(ValueError, match="older than version 3 at its admission"):
        planner.keep(1, 2)
    planner.keep(1, 3)
    with pytest.raises(LookupError, match="not running"):
        planner.keep(1, 3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"B": 0}, "batch_size"),
        ({"S": -1}, "max_staleness must be at least 0"),
        ({"S": None}, "needs max_staleness"),
        ({"policy": "drop"}, "wait, mask or allow"),
    ],
)
def test_impossible_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        make_planner(**settings)
