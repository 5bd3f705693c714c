"""PolicyVersion: monotone."""

import pytest

from async_rl.orchestrator.version import PolicyVersion


def test_it_starts_where_told_and_only_grows():
    version = PolicyVersion(40, name="trained version")
    version.advance_to(41)
    version.advance_to(41)
    assert version.value == 41
    with pytest.raises(ValueError, match="trained version can't go back from 41 to 40"):
        version.advance_to(40)
    with pytest.raises(ValueError, match="at least 0"):
        PolicyVersion(-1)
