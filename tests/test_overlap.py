"""OverlapClock on made-up clocks."""

from async_rl.overlap import OverlapClock


def test_overlap_is_the_shared_part_of_the_smaller_side():
    clock = OverlapClock()
    clock.step_started(now_s=10.0, busy_s=4.0)
    clock.step_ended(now_s=14.0, busy_s=7.0)  # generation ran 3 of the 4 training seconds
    clock.step_started(now_s=20.0, busy_s=9.0)
    clock.step_ended(now_s=22.0, busy_s=9.0)
    assert (clock.train_s, clock.both_s) == (6.0, 3.0)
    assert clock.overlap(generation_s=12.0) == 0.5  # training is the smaller side
    assert clock.overlap(generation_s=3.0) == 1.0  # generation is: all of it ran beside training


def test_overlap_is_zero_without_generation():
    assert OverlapClock().overlap(generation_s=0.0) == 0.0
