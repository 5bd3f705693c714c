"""RolloutDataModule: what it refuses before anything is started."""

import pytest

from async_rl.datamodule import RolloutDataModule
from async_rl.engines.scripted import ScriptedEngine
from async_rl.environments import Arithmetic


@pytest.mark.parametrize(
    "argument",
    [{"max_turns": 0}, {"max_generated_tokens": 0}, {"max_context": 1}, {"template_rewrite": "ignore"}],
    ids=lambda a: next(iter(a)),
)
def test_limits_that_leave_nothing_are_refused_by_name(argument):
    with pytest.raises(ValueError, match=next(iter(argument))):
        RolloutDataModule(Arithmetic(), ScriptedEngine(lambda prompt, seed: [1]), **argument)
