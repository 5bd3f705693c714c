"""PromptStream and seeds: the order of the data is a function of the position, and repeats."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rl.orchestrator.prompts import PromptStream
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
@settings(max_examples=60, deadline=None)
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
