"""The bounds of a run as its record tells them: of a run resumed with others, of one that masked, of an older one."""

import pytest

from async_rl.record_bounds import RecordedBounds


def test_a_resume_changes_the_bound_from_its_version_on_and_takes_back_what_was_said_of_later_ones():
    bounds = RecordedBounds().changed(0, 2, "wait").changed(4, 2, "wait").changed(5, 0, "wait").changed(9, 4, "wait")
    assert bounds.phases == ((0, 2, "wait"), (5, 0, "wait"), (9, 4, "wait"))
    assert bounds.changed(7, 1, "wait").phases == ((0, 2, "wait"), (5, 0, "wait"), (7, 1, "wait"))
    assert bounds.changed(5, 2, "wait").phases == ((0, 2, "wait"),)
    assert RecordedBounds.from_meta(bounds.to_meta()) == bounds


@pytest.mark.parametrize(
    ("phases", "exact", "described"),
    [
        (((0, 2, "wait"),), 2, "max_staleness 2"),
        (((0, 0, "wait"), (5, 3, "wait")), 3, "max_staleness 0, 3 from version 5 on"),
        (((0, 2, "wait"), (5, 1, "mask")), None, "max_staleness 2, 1 (mask) from version 5 on"),
        (((0, 2, "allow"),), None, "max_staleness 2 (allow)"),
        ((), None, "max_staleness not recorded"),
    ],
)
def test_the_age_that_nothing_exceeded_is_known_where_every_batch_waited(phases, exact, described):
    bounds = RecordedBounds(phases)
    assert (bounds.exact, bounds.described()) == (exact, described)


def test_what_was_masked_is_what_was_masked_at_that_version():
    bounds = RecordedBounds(((0, 2, "wait"), (5, 1, "mask"), (8, 3, "mask"), (10, 0, "allow")))
    assert [bounds.masked_below(v) for v in (4, 5, 7, 8, 12)] == [None, 4, 6, 5, None]
    assert RecordedBounds().masked_below(3) is None
