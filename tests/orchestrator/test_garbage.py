import gc

from async_rl.orchestrator.garbage import rare_collections


def test_collections_are_rare_inside_and_as_before_after():
    before = gc.get_threshold()
    with rare_collections():
        assert gc.get_threshold()[0] > 10 * before[0]
    assert gc.get_threshold() == before


def test_a_user_who_set_more_keeps_it_and_one_who_switched_collecting_off_keeps_that():
    before = gc.get_threshold()
    try:
        for own in ((50_000, 20, 20), (0, 10, 10)):
            gc.set_threshold(*own)
            with rare_collections():
                assert gc.get_threshold() == own
    finally:
        gc.set_threshold(*before)
