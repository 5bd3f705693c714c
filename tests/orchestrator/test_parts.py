"""Parts of a batch that are trained before it is complete: whole groups, each once, and all of them in the batch."""

import asyncio

import pytest
from loop_kit import ByHand, FakeSource, eventually, finished, make_prompts, make_settings, patient, running

from async_rl.orchestrator.settings import ForwardBackwardBatch

EACH = ForwardBackwardBatch(min_sequences=1)


def ids(batch):
    return [g.id for g in batch.groups]


def end(orchestrator, batch):
    orchestrator.batch_trained(batch)
    orchestrator.fleet.publish(batch.version + 1, FakeSource(batch.version + 1))


def test_complete_groups_come_at_once_filtered_ones_never():
    by_hand = ByHand()
    with running(
        by_hand, max_staleness=0, batch_size=3, forward_backward_batch=EACH, filter_zero_variance=True
    ) as orchestrator:
        by_hand.wait_started(6)
        by_hand.finish(1, 0, reward=1.0)
        by_hand.finish(1, 1, reward=0.0)
        part = orchestrator.next_part(patient())
        assert (ids(part), part.version, part.max_staleness) == ([1], 0, 0)
        assert part.advantages == ((0.5, -0.5),)
        for sample in (0, 1):
            by_hand.finish(0, sample, reward=1.0)  # filtered: group 3 is admitted in its place
        by_hand.wait_started(8)
        for sample in (0, 1):
            by_hand.finish(3, sample, reward=float(sample))
        assert ids(orchestrator.next_part(patient())) == [3]
        for sample in (0, 1):
            by_hand.finish(2, sample, reward=float(sample))
        assert orchestrator.next_part(patient()) is None  # the batch is complete: the rest comes with it
        batch = orchestrator.next_batch(patient())
        assert ids(batch) == [1, 2, 3]
        assert batch.advantages[0] == part.advantages[0]
        end(orchestrator, batch)
        by_hand.wait_started(14)
        for sample in (0, 1):
            by_hand.finish(5, sample, reward=float(sample))
        part = orchestrator.next_part(patient())
        assert (ids(part), part.version) == ([5], 1)


def test_either_number_is_enough_and_both_are_at_least():
    for enough, at in (
        (ForwardBackwardBatch(min_sequences=4), 2),
        (ForwardBackwardBatch(min_tokens=13), 3),  # 6 tokens a group
        (ForwardBackwardBatch(min_sequences=4, min_tokens=6), 1),
    ):
        by_hand = ByHand()
        with running(by_hand, max_staleness=0, batch_size=4, forward_backward_batch=enough) as orchestrator:
            for group in range(at):
                with pytest.raises(AssertionError, match="still waiting"):
                    orchestrator.next_part(patient(0.05))
                by_hand.finish(group, 0)
                by_hand.finish(group, 1)
                eventually(lambda kept=group + 1: orchestrator.snapshot()["kept"] == kept)
            assert ids(orchestrator.next_part(patient())) == list(range(at))


def test_every_part_is_in_its_batch_and_no_group_is_given_twice():
    """Filtered and failed groups are replaced, slow ones waited for, some batches make no update."""

    async def rollout(task, engine):
        head = engine.version
        await asyncio.sleep(0.0005 * ((task.group_id * 7 + task.sample_index * 3) % 5))
        if task.group_id % 11 == 4:
            raise ValueError("fails")
        return finished(task, engine, reward=float(task.sample_index * (task.group_id % 3 > 0)), head=head)

    settings = {"filter_zero_variance": True, "max_retries": 0, "max_failures": 100, "max_steps": 30}
    with running(rollout, max_staleness=0, batch_size=4, forward_backward_batch=EACH, **settings) as orchestrator:
        parts_seen, batches = 0, []
        while True:
            given = []
            while (part := orchestrator.next_part(patient())) is not None:
                parts_seen += 1
                given += ids(part)
            if (batch := orchestrator.next_batch(patient())) is None:
                break
            assert len(set(given)) == len(given)
            assert set(given) <= set(ids(batch))
            assert batch.ages() == [0] * 4
            batches.append(ids(batch))
            if len(batches) % 7 == 3:
                orchestrator.batch_dropped(batch, "nonfinite")
            else:
                end(orchestrator, batch)
        assert parts_seen > 10
    with running(rollout, max_staleness=0, batch_size=4, **settings) as orchestrator:
        whole = []
        while (batch := orchestrator.next_batch(patient())) is not None:
            whole.append(ids(batch))
            if len(whole) % 7 == 3:
                orchestrator.batch_dropped(batch, "nonfinite")
            else:
                end(orchestrator, batch)
    assert batches == whole  # the synchronous order


@pytest.mark.parametrize("last_batch", ["drop", "train"])
def test_at_the_end_of_the_data_parts_may_have_been_for_nothing(last_batch):
    by_hand = ByHand()
    with running(
        by_hand, prompts=make_prompts(rows=2, epochs=1), max_staleness=0, batch_size=3, group_size=1,
        forward_backward_batch=EACH, last_batch=last_batch,
    ) as orchestrator:  # fmt: skip
        by_hand.wait_started(2)
        by_hand.finish(1)
        assert ids(orchestrator.next_part(patient())) == [1]
        by_hand.finish(0)
        part = orchestrator.next_part(patient())
        assert part is None or ids(part) == [0]  # whichever is noticed first: the group, or the end of the data
        while part is not None:
            part = orchestrator.next_part(patient())
        batch = orchestrator.next_batch(patient())
        if last_batch == "drop":
            assert batch is None
            assert orchestrator.outcomes()["dropped"] == 2
        else:
            assert ids(batch) == [0, 1]
            end(orchestrator, batch)


def test_without_the_setting_there_are_no_parts():
    with running(max_staleness=0) as orchestrator:
        assert orchestrator.next_part(patient()) is None


@pytest.mark.parametrize("changes", [{"max_staleness": 1}, {"max_staleness": 0, "stale_policy": "mask"}])
def test_what_runs_ahead_has_no_parts(changes):
    with pytest.raises(ValueError, match=r"forward_backward_batch .* only with max_staleness=0 and stale_policy=wait"):
        make_settings(forward_backward_batch=EACH, **changes)


@pytest.mark.parametrize(
    "bad", [{"min_sequences": 0}, {"min_tokens": -1}, {"min_tokens": 1.5}, {"min_sequences": True}]
)
def test_impossible_numbers_are_refused(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        ForwardBackwardBatch(**bad)
