"""RolloutDataModule: what it refuses before anything is started."""

import numpy as np
import pytest

from async_rl.datamodule import RolloutDataModule
from async_rl.engines.scripted import ScriptedEngine
from async_rl.environments import Arithmetic
from async_rl.types import SettingError


@pytest.mark.parametrize(
    "argument",
    [{"max_turns": 0}, {"max_generated_tokens": 0}, {"max_context": 1}, {"template_rewrite": "ignore"}],
    ids=lambda a: next(iter(a)),
)
def test_limits_that_leave_nothing_are_refused_by_name(argument):
    with pytest.raises(ValueError, match=next(iter(argument))):
        RolloutDataModule(Arithmetic(), ScriptedEngine(lambda prompt, seed: [1]), **argument)


class Rows(Arithmetic):
    def __init__(self, train, evaluation):
        super().__init__()
        self.rows = {"train": train, "eval": evaluation}

    def prompts(self, split):
        return self.rows[split]


ROW = {"question": "1+1="}


@pytest.mark.parametrize(
    ("train", "evaluation", "message"),
    [
        (None, [], r"environment 'sums': Rows.prompts\('train'\) returned None; return a list with a mapping for each"),
        ((row for row in [ROW]), [], r"Rows.prompts\('train'\) returned a generator; return a list"),
        ({ROW["question"]}, [], r"Rows.prompts\('train'\) returned a set; return a list"),
        (ROW, [], r"Rows.prompts\('train'\) returned a dict; return a list"),
        (
            [ROW],
            None,
            r"Rows.prompts\('eval'\) returned None; return a list with a mapping for each prompt, \[\] for none",
        ),
        ([], [], "'sums' has no training prompts"),
    ],
)
def test_prompts_that_are_no_list_are_refused_naming_the_environment(train, evaluation, message):
    data = RolloutDataModule({"sums": Rows(train, evaluation)}, ScriptedEngine(lambda prompt, seed: [1]))
    with pytest.raises(SettingError, match=message):
        data.setup("fit")


def test_whatever_has_a_length_and_places_will_do_for_prompts():
    data = RolloutDataModule(
        {"sums": Rows(np.array([ROW] * 8), (ROW,))}, ScriptedEngine(lambda prompt, seed: [1]), eval_limit=1
    )
    data.setup("fit")
    assert len(data.train_rows["sums"]) == 8
    assert [prompt.id for prompt in data.eval_prompts] == ["eval/sums/0"]
