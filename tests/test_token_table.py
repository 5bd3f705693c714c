"""TokenTable: what is trained, with which stamp and advantage, and the age bound."""

import math
from dataclasses import replace

import pytest
from policy_examples import make_batch, trajectory

from async_rl.token_table import NO_STAMP, StalenessError, TokenTable
from async_rl.types import Batch, Group, Prompt, Segment


def batch_of(*trajectories, version=5, max_staleness=2, advantages=None):
    group = Group(0, Prompt("add/0/7", "add", {}), 0, tuple(trajectories))
    return Batch(version, (group,), (tuple(advantages or [1.0] * len(trajectories)),), max_staleness)


def test_several_turns_by_hand():
    # prompt 0-1 | turn 2-4 (version 3, then 4) | tool 5-6 | turn 7-8 (version 5, then a replayed token)
    several_turns = replace(
        trajectory([1, 2], [3, 4, 5, 6, 7, 8, 9]),
        loss_mask=[0, 0, 1, 1, 1, 0, 0, 1, 1],
        logprobs=[0, 0, -1.0, -2.0, math.nan, 0, 0, -3.0, None],
        segments=(Segment(3, 2, 4), Segment(4, 4, 5), Segment(5, 7, 8), Segment(None, 8, 9)),
    )
    table = TokenTable.of(batch_of(several_turns, trajectory([1, 2], [3]), advantages=[0.5, -0.5]))
    assert [p.tolist() for p in table.positions] == [[2, 3, 4, 7, 8], [2]]
    assert table.lengths.tolist() == [5, 1]
    assert table.sequence.tolist() == [0, 0, 0, 0, 0, 1]
    assert table.stamps.tolist() == [3, 3, 4, 5, NO_STAMP, 0]
    assert table.ages.tolist() == [2, 2, 1, 0, NO_STAMP, 5]
    assert table.advantages.tolist() == [0.5] * 5 + [-0.5]
    assert table.behaviour.tolist() == pytest.approx([-1.0, -2.0, math.nan, -3.0, math.nan, -2.0], nan_ok=True)
    assert table.names == ("add/0/7#0", "add/0/7#0")


def test_a_batch_without_trainable_tokens():
    table = TokenTable.of(batch_of(trajectory([1], [2, 3], mask=[0, 0])))
    assert len(table) == 0
    table.check_ages(0)


def test_lists_of_different_lengths_are_refused():
    with pytest.raises(ValueError, match="add/0/7#0: 3 token_ids, 3 loss_mask and 2 logprobs"):
        TokenTable.of(batch_of(replace(trajectory([1], [2, 3]), logprobs=[0.0, -1.0])))


def test_a_trainable_first_token_is_refused():
    with pytest.raises(ValueError, match="nothing comes before"):
        TokenTable.of(batch_of(replace(trajectory([1], [2]), loss_mask=[1, 1])))


def test_the_bound_holds_for_every_token():
    table = TokenTable.of(batch_of(trajectory([1], [2], version=3), trajectory([1], [2], version=5)))
    table.check_ages(2)
    with pytest.raises(StalenessError, match=r"training version 5: add/0/7#0 .*older than max_staleness=1 .*version 3"):
        table.check_ages(1)


def test_a_stamp_from_the_future_is_an_error():
    with pytest.raises(StalenessError, match="newer than is possible"):
        TokenTable.of(batch_of(trajectory([1], [2], version=6))).check_ages(9)


def test_masked_and_replayed_tokens_have_no_say_in_the_bound():
    masked = replace(trajectory([1], [2, 3], mask=[0, 1]), segments=(Segment(0, 1, 2), Segment(5, 2, 3)))
    replayed = replace(trajectory([1], [2]), segments=(Segment(None, 1, 2),))
    TokenTable.of(batch_of(masked, replayed)).check_ages(0)


def test_order_is_the_batch_order():
    batch = make_batch()
    table = TokenTable.of(batch)
    assert [len(t.token_ids) for t in batch.trajectories] == [len(ids) for ids in table.token_ids]
    flat = [a for group in batch.advantages for a in group]
    assert [table.advantages[table.sequence == i][0].item() for i in range(len(flat))] == pytest.approx(flat)


def test_contexts_of_a_split_trajectory_are_rows_of_their_own():
    # context 0: prompt 0-1, turn 2-3 | context 1: what the template made of it 4-6, turn 7-8
    split = replace(
        trajectory([1, 2], [3, 4, 1, 4, 6, 7, 8]),
        loss_mask=[0, 0, 1, 1, 0, 0, 0, 1, 1],
        segments=(Segment(4, 2, 4), Segment(5, 7, 9)),
        starts=(0, 4),
    )
    table = TokenTable.of(batch_of(split, trajectory([1, 2], [3]), advantages=[0.5, -0.5]))
    assert table.token_ids == ([1, 2, 3, 4], [1, 4, 6, 7, 8], [1, 2, 3])
    assert [p.tolist() for p in table.positions] == [[2, 3], [3, 4], [2]]
    assert table.lengths.tolist() == [4, 1], "one trajectory to the loss, however many contexts"
    assert table.sequence.tolist() == [0, 0, 0, 0, 1]
    assert table.stamps.tolist() == [4, 4, 5, 5, 0]


@pytest.mark.parametrize("starts", [(), (1,), (0, 0), (0, 2, 1), (0, 3)])
def test_starts_out_of_order_are_refused(starts):
    with pytest.raises(ValueError, match="add/0/7#0: starts="):
        TokenTable.of(batch_of(replace(trajectory([1], [2, 3]), starts=starts)))


def test_a_trainable_first_token_of_a_context_is_refused():
    with pytest.raises(ValueError, match=r"loss_mask\[1\] is 1, but nothing comes before"):
        TokenTable.of(batch_of(replace(trajectory([1], [2, 3]), starts=(0, 1))))
