"""What the engines did between two readings."""

import pytest

from async_rl.engine_meter import EngineMeter
from async_rl.engines.base import EngineStats


class Counted:
    def __init__(self, stats):
        self.now = stats

    def stats(self):
        return self.now


def test_it_tells_the_growth_of_all_counters_and_the_highest_kv_age():
    now_s = 100.0
    one, two = Counted(EngineStats(50, 2.0, 0.5, 3, 1, 2)), Counted(EngineStats())
    meter = EngineMeter([one, two], clock=lambda: now_s)
    now_s = 110.0
    one.now, two.now = EngineStats(250, 10.0, 0.75, 5, 2, 0), EngineStats(100, 4.0, 0.25, 1, 0, 1)
    assert meter.drain() == {
        "engine/tokens_per_s": 30.0,
        "engine/idle_share": pytest.approx(0.4),
        "engine/loads": 3.0,
        "engine/pause_s": 0.5,
        "engine/recomputes": 1.0,
        "engine/kv_age": 1.0,
    }
    now_s = 111.0
    assert meter.drain()["engine/tokens_per_s"] == 0.0


def test_an_engine_that_starts_anew_does_not_count_backwards_and_without_any_nothing_is_told():
    engine = Counted(EngineStats(50, 2.0, 0.5, 3))
    meter = EngineMeter([engine])
    engine.now = EngineStats()
    assert min(meter.drain().values()) >= 0
    assert EngineMeter([]).drain() == {}


def test_counters_go_on_over_a_restart_and_the_kv_age_is_that_of_now():
    assert EngineStats(1, 2.0, 3.0, 4, 5, 6) + EngineStats(1, 1.0, 1.0, 1, 1, 0) == EngineStats(2, 3.0, 4.0, 5, 6, 0)
