"""Packing: every token scored once, under exactly the tokens that precede it in its own sequence."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rl.packing import PackingSettings, ScoredSequence, pack

SHARED = PackingSettings(micro_batch_tokens=1000, share_prefixes=True, attention_width=1e9)


def test_a_shared_beginning_by_hand():
    (batch,) = pack(
        [
            ScoredSequence([1, 2, 3, 9, 8], [3, 4], 0),
            ScoredSequence([1, 2, 6, 5], [2, 3], 2),
            ScoredSequence([1, 2, 3, 7], [3], 4),
        ],
        SHARED,
    )
    # read, in lexicographic order: 1 2 3 | 1 2 3 9 | 1 2 6
    assert batch.input_ids.tolist() == [[1, 2, 3, 9, 6]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 2]]
    assert batch.visible[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 1, 1, 1, 0],
        [1, 1, 0, 0, 1],
    ]
    places = batch.predictors[batch.predictor].tolist()
    assert dict(zip(batch.tokens.tolist(), zip(places, batch.targets.tolist(), strict=True), strict=True)) == {
        0: (2, 9),
        1: (3, 8),
        2: (1, 6),
        3: (4, 5),
        4: (2, 7),
    }
    assert batch.predictors.tolist() == [1, 2, 3, 4], "one distribution for all samples that continue the same prefix"


def test_without_sharing_a_row_is_a_sequence_and_attention_plain():
    sequences = [ScoredSequence([1, 2], [1], 0), ScoredSequence([1, 2, 3, 4], [2, 3], 1)]
    (batch,) = pack(sequences, PackingSettings(1000, share_prefixes=False, attention_width=1e9))
    assert batch.input_ids.tolist() == [[1, 2, 3], [1, 0, 0]], "widest first; the last token is never read"
    assert batch.visible is None


def test_a_single_sequence_needs_no_mask():
    (batch,) = pack([ScoredSequence([1, 2, 3], [1, 2], 0)], SHARED)
    assert batch.visible is None


def test_a_group_costs_its_distinct_tokens():
    prompt = list(range(38))
    sequences = [ScoredSequence(prompt + [100 * i + t for t in range(12)], range(38, 50), 12 * i) for i in range(8)]
    (batch,) = pack(sequences, SHARED)
    assert batch.input_ids.numel() == 38 + 8 * 11
    assert len(batch.predictors) == 1 + 8 * 11


def test_equal_sequences_are_computed_once():
    (batch,) = pack([ScoredSequence([5, 6, 7], [1, 2], 2 * i) for i in range(4)], SHARED)
    assert batch.input_ids.tolist() == [[5, 6]]
    assert sorted(batch.tokens.tolist()) == list(range(8))


def test_sequences_without_a_scored_token_are_left_out():
    assert pack([ScoredSequence([1, 2, 3], [], 0)], SHARED) == []


def test_rows_are_cut_narrow_where_attention_is_dear():
    sequences = [ScoredSequence([1, 2, *([10 + i] * 30)], range(2, 32), 30 * i) for i in range(8)]
    dear = pack(sequences, PackingSettings(1000, share_prefixes=True, attention_width=5.0))
    cheap = pack(sequences, PackingSettings(1000, share_prefixes=True, attention_width=1e9))
    assert sum(len(b.input_ids) for b in dear) == 8
    assert sum(len(b.input_ids) for b in cheap) == 1


@st.composite
def scored(draw):
    """Sequences that share beginnings, with holes in what is scored."""
    stems = draw(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=3))
    sequences, first = [], 0
    for _ in range(draw(st.integers(1, 9))):
        ids = [*draw(st.sampled_from(stems)), *draw(st.lists(st.integers(0, 2), min_size=1, max_size=6))]
        positions = [p for p in range(1, len(ids)) if draw(st.booleans())]
        sequences.append(ScoredSequence(ids, positions, first))
        first += len(positions)
    return sequences


@settings(max_examples=200)
@given(scored(), st.integers(1, 60), st.booleans(), st.sampled_from([2.0, 20.0, 1e9]))
def test_every_token_is_predicted_from_its_own_past(sequences, budget, share, attention_width):
    expected = {
        s.first_token + i: (s.token_ids[:position], s.token_ids[position])
        for s in sequences
        for i, position in enumerate(s.positions)
    }
    got = {}
    for batch in pack(sequences, PackingSettings(budget, share, attention_width)):
        rows, width = batch.input_ids.shape
        assert rows == 1 or rows * width <= budget
        assert batch.predictors.tolist() == sorted(set(batch.predictors.tolist()))
        visible = torch.ones(width, width).tril().bool().expand(rows, 1, width, width)
        positions = torch.arange(width).expand(rows, width)
        if batch.visible is not None:
            visible, positions = batch.visible, batch.position_ids
            assert visible.any(dim=-1).all(), "a query that sees nothing is NaN"
        for token, place, target in zip(
            batch.tokens.tolist(), batch.predictors[batch.predictor].tolist(), batch.targets.tolist(), strict=True
        ):
            row, column = divmod(place, width)
            seen = visible[row, 0, column].nonzero()[:, 0]
            seen_positions = positions[row, seen]
            order = seen_positions.argsort()
            assert seen_positions[order].tolist() == list(range(len(seen))), "positions count up without a gap"
            assert token not in got
            got[token] = (batch.input_ids[row, seen[order]].tolist(), target)
    assert got == expected


def test_positions_may_be_an_array():
    (batch,) = pack([ScoredSequence([4, 5, 6], np.array([2]), 7)], SHARED)
    assert (batch.targets.tolist(), batch.tokens.tolist()) == ([6], [7])
