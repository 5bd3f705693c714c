"""PromptStream and seeds: the order of the data is a function of the position, and repeats."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rl.orchestrator.prompts import Mixture, PromptStream
from async_rl.orchestrator.seeds import sampling_seed


def rows(**counts):
    return {name: [{"env": name, "n": n} for n in range(count)] for name, count in counts.items()}


def everything(stream):
    prompts = []
    while (prompt := stream.at(len(prompts))) is not None:
        prompts.append(prompt)
    return prompts


@given(
    a=st.integers(1, 9),
    b=st.integers(1, 9),
    epochs=st.integers(1, 4),
    shuffle=st.booleans(),
    seed=st.integers(0, 2**40),
)
@settings(max_examples=60)
def test_each_prompt_comes_exactly_epochs_times(a, b, epochs, shuffle, seed):
    stream = PromptStream(rows(one=a, two=b), epochs=epochs, shuffle=shuffle, seed=seed)
    prompts = everything(stream)
    assert len(prompts) == stream.total == epochs * (a + b)
    assert set(Counter((p.data["env"], p.data["n"]) for p in prompts).values()) == {epochs}
    assert len({p.id for p in prompts}) == len(prompts)
    for epoch in range(epochs):  # an epoch is a whole pass
        part = prompts[epoch * (a + b) : (epoch + 1) * (a + b)]
        assert {p.id.split("/")[1] for p in part} == {str(epoch)}
    again = PromptStream(rows(one=a, two=b), epochs=epochs, shuffle=shuffle, seed=seed)
    assert [again.at(i) for i in reversed(range(len(prompts)))] == prompts[::-1]


def test_order_and_ids():
    stream = PromptStream(rows(sums=2, facts=1), epochs=None, shuffle=False, seed=0)
    assert [stream.at(i).id for i in range(4)] == ["sums/0/0", "sums/0/1", "facts/0/0", "sums/1/0"]
    assert stream.at(2).data == {"env": "facts", "n": 0}
    assert stream.at(2).environment == "facts"
    assert stream.total is None
    assert stream.at(3_000_000).id == "sums/1000000/0"


def test_epochs_and_seeds_shuffle_differently():
    def order(seed, epoch):
        stream = PromptStream(rows(x=50), epochs=None, shuffle=True, seed=seed)
        return [stream.at(epoch * 50 + i).data["n"] for i in range(50)]

    assert order(0, 0) != order(0, 1)
    assert order(0, 0) != order(1, 0)
    assert sorted(order(3, 7)) == list(range(50))


# CASES 4


def test_data_smaller_than_a_batch_is_refused_before_training():
    stream = PromptStream(rows(x=7), epochs=1, shuffle=True, seed=0)
    with pytest.raises(ValueError, match=r"7 prompts .* batch_size=8 .*raise epochs, or set last_batch=train"):
        stream.check_fills_batch(8, "drop")
    stream.check_fills_batch(8, "train")
    stream.check_fills_batch(7, "drop")
    PromptStream(rows(x=7), epochs=2, shuffle=True, seed=0).check_fills_batch(8, "drop")
    PromptStream(rows(x=1), epochs=None, shuffle=True, seed=0).check_fills_batch(8, "drop")


def test_no_data_is_refused():
    with pytest.raises(ValueError, match="environment 'two' has no training prompts"):
        PromptStream(rows(one=1, two=0), epochs=None, shuffle=True, seed=0)
    with pytest.raises(ValueError, match="epochs=0"):
        PromptStream(rows(one=1), epochs=0, shuffle=True, seed=0)
    with pytest.raises(ValueError, match="no environment given"):
        PromptStream({}, epochs=1, shuffle=True, seed=0)


def test_seeds_repeat_and_differ_in_every_argument():
    seeds = {
        sampling_seed(run, prompt, sample, attempt)
        for run in (0, 1)
        for prompt in ("x/0/1", "x/1/1")
        for sample in range(8)
        for attempt in range(3)
    }
    assert len(seeds) == 2 * 2 * 8 * 3
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert sampling_seed(0, "x/0/1", 2, 1) == sampling_seed(0, "x/0/1", 2, 1) == 329177721132677918


# mixtures

WEIGHTS = st.dictionaries(st.sampled_from("abcd"), st.integers(1, 50) | st.floats(0.01, 10.0), min_size=1, max_size=4)


@given(weights=WEIGHTS, shuffle=st.booleans(), seed=st.integers(0, 2**40), length=st.integers(1, 2000))
@settings(max_examples=60)
def test_every_environment_gets_its_share_from_the_first_block_on(weights, shuffle, seed, length):
    mixture = Mixture(weights, shuffle=shuffle, seed=seed)
    places = [mixture.at(i) for i in range(length)]
    for which, weight in enumerate(weights.values()):
        mine = [rank for w, rank in places if w == which]
        assert mine == list(range(len(mine)))  # none skipped, none twice
        share = weight / sum(weights.values())
        block = 2 / (min(weights.values()) / sum(weights.values())) + 1
        assert abs(len(mine) - share * length) <= 1 + block * min(share, 1 - share)


@given(
    weights=WEIGHTS, shuffle=st.booleans(), seed=st.integers(0, 2**40), at=st.lists(st.integers(0, 3000), max_size=20)
)
@settings(max_examples=60)
def test_a_mixture_resumed_at_any_position_goes_on_with_the_same_prompts(weights, shuffle, seed, at):
    data = rows(**{name: 3 + 7 * i for i, name in enumerate(weights)})
    stream = PromptStream(data, epochs=None, shuffle=shuffle, seed=seed, mixture=weights)
    in_order = [stream.at(i) for i in range(3001)]
    again = PromptStream(data, epochs=None, shuffle=shuffle, seed=seed, mixture=weights)
    assert [again.at(i) for i in at] == [in_order[i] for i in at]
    assert len({p.id for p in in_order}) == len(in_order)
    for name, environment in data.items():  # within an environment, epochs are whole passes
        mine = [p for p in in_order if p.environment == name]
        for first in range(0, len(mine) - len(environment), len(environment)):
            epoch = mine[first : first + len(environment)]
            assert {p.data["n"] for p in epoch} == set(range(len(environment)))
            assert {p.id.split("/")[1] for p in epoch} == {str(first // len(environment))}


def test_a_mixture_is_the_weights_and_not_the_number_of_rows():
    stream = PromptStream(rows(big=1000, small=2), epochs=None, shuffle=True, seed=3, mixture={"small": 3, "big": 1})
    counts = Counter(stream.at(i).environment for i in range(800))
    assert counts == {"small": 600, "big": 200}
    assert stream.total is None
    assert PromptStream(rows(big=1000, small=2), epochs=None, shuffle=True, seed=3).at(0) is not None
    orders = [
        [
            PromptStream(rows(x=9, y=9), epochs=None, shuffle=True, seed=s, mixture={"x": 1, "y": 1}).at(i).id
            for i in range(40)
        ]
        for s in (0, 1)
    ]
    assert orders[0] != orders[1]


@pytest.mark.parametrize(
    ("mixture", "epochs", "match"),
    [
        ({"one": 1, "tow": 1}, None, r"mixture\.tow: there is no such environment; there are one, two"),
        ({"one": 1}, None, "has no weight for the environment two"),
        ({"one": 1, "two": 0}, None, r"mixture\.two=0: a weight must be a number > 0"),
        ({"one": 1, "two": float("nan")}, None, r"mixture\.two=nan"),
        ({"one": 1, "two": float("inf")}, None, r"mixture\.two=inf"),
        ({"one": 1, "two": True}, None, r"mixture\.two=True"),
        ({"one": 1, "two": 1e-9}, None, r"mixture\.two=1e-09 is less than 1/10000"),
        ({"one": 1, "two": 1}, 2, "mixture with epochs=2"),
    ],
)
def test_a_mixture_that_does_not_fit_is_refused(mixture, epochs, match):
    with pytest.raises(ValueError, match=match):
        PromptStream(rows(one=3, two=3), epochs=epochs, shuffle=True, seed=0, mixture=mixture)
