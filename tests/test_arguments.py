"""Impossible arguments of the constructors are refused at once, in the words of the config check."""

import numpy as np
import pytest
from lightning.pytorch import Callback

from async_rl.arguments import _KEYS
from async_rl.callbacks.run_loop import RunLoop
from async_rl.config import keys_of
from async_rl.datamodule import RolloutDataModule
from async_rl.engines.scripted import ScriptedEngine
from async_rl.environments import Arithmetic
from async_rl.trainer import AsyncRLTrainer


def trainer(**arguments):
    return AsyncRLTrainer(
        **{"max_steps": 1, "accelerator": "cpu", "logger": False, "enable_progress_bar": False} | arguments
    )


def data(environment=Arithmetic(), **arguments):  # noqa: B008 - never changed
    return RolloutDataModule(environment, ScriptedEngine(lambda prompt, seed: [1]), **arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_staleness": -1}, "AsyncRLTrainer: max_staleness=-1 is not possible; give a number >= 0"),
        ({"max_staleness": "two"}, "AsyncRLTrainer: max_staleness='two' is not possible; give a whole number >= 0"),
        ({"max_staleness": 1.5}, "max_staleness=1.5 is not possible; give a whole number >= 0"),
        ({"max_staleness": True}, "max_staleness=True is not possible; give a whole number >= 0"),
        ({"max_steps": 0}, "max_steps=0 is not possible; give a number >= 1"),
        ({"max_steps": -1}, "max_steps=-1 is not possible; give a number >= 1"),
        ({"admit_ahead": -1}, "admit_ahead=-1 is not possible; give a number >= 0"),
        ({"admit_ahead": 3}, "admit_ahead=3 has no effect above max_staleness=2; lower admit_ahead to at most 2"),
        ({"oversample_factor": 0.5}, "oversample_factor=0.5 is not possible; give a number >= 1"),
        ({"oversample_factor": 2}, "oversample_factor=2 has no room with admit_ahead=2 and max_staleness=2"),
        ({"oversample_factor": 1.5, "max_staleness": 4, "admit_ahead": 4}, "lower admit_ahead below max_staleness"),
        ({"stale_policy": "hope"}, "stale_policy='hope' is not possible; give one of wait, mask, allow"),
        ({"stale_policy": "mask"}, "stale_policy=mask gives up the exact age bound; take stale_policy=wait, or accept"),
        ({"sampling_policy": None}, "sampling_policy=None is not possible; give one of auto, segment, trajectory"),
        ({"evaluate_at": "end"}, "evaluate_at='end' is not possible; give one of ends, never"),
        ({"eval_every": -1}, "eval_every=-1 is not possible; give a number >= 0"),
        ({"keep_last": 0}, "keep_last=0 is not possible; give a number >= 1"),
        ({"stall_timeout_s": 0}, "stall_timeout_s=0 is not possible; give a number > 0"),
        ({"checkpoint_timeout_s": 0}, "checkpoint_timeout_s=0 is not possible; give a number > 0"),
        ({"resume": "yes"}, "resume='yes' is not possible; give true or false"),
    ],
)
def test_an_impossible_trainer_is_refused_naming_argument_value_and_range(arguments, message):
    with pytest.raises(ValueError, match="AsyncRLTrainer: ") as refused:
        trainer(**arguments)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 0}, "RolloutDataModule: batch_size=0 is not possible; give a number >= 1"),
        ({"group_size": "8"}, "group_size='8' is not possible; give a whole number >= 1"),
        ({"eval_samples": 0}, "eval_samples=0 is not possible; give a number >= 1"),
        ({"last_batch": "keep"}, "last_batch='keep' is not possible; give one of drop, train"),
        ({"template_rewrite": "ignore"}, "template_rewrite='ignore' is not possible; give one of refuse, split"),
        ({"mixture": 3}, "mixture=3 is not possible"),
        ({"max_retries": -1}, "max_retries=-1 is not possible; give a number >= 0"),
    ],
)
def test_impossible_data_is_refused_naming_argument_value_and_range(arguments, message):
    with pytest.raises(ValueError, match="RolloutDataModule: ") as refused:
        data(**arguments)
    assert message in str(refused.value)


def test_all_impossible_arguments_are_told_at_once():
    with pytest.raises(ValueError, match=r"max_steps=0.*\n.*seed=-1"):
        trainer(max_steps=0, seed=-1)


def test_numbers_of_numpy_are_numbers():
    assert trainer(max_staleness=np.int64(1), oversample_factor=np.float32(1)).staleness.max_staleness == 1


def test_every_argument_with_a_rule_stands_for_a_key_of_the_config():
    assert {key for schema, key in _KEYS.values() if key not in keys_of(schema)} == set()


class NotOne:
    """No callback, logger or environment."""


CALLBACK = "lightning.pytorch.callbacks.callback.Callback"
ENVIRONMENT = "async_rl.environments.base.Environment"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: trainer(callbacks=[NotOne()]), f"AsyncRLTrainer: callbacks[0] is of type NotOne; give .* {CALLBACK}"),
        (lambda: trainer(callbacks=NotOne()), f"AsyncRLTrainer: callbacks is of type NotOne; give .* {CALLBACK}"),
        (
            lambda: trainer(callbacks=[RunLoop(), Callback]),
            "callbacks[1] is the class Callback, no object; give an object",
        ),
        (lambda: trainer(callbacks=Callback), "callbacks is the class Callback, no object; give an object"),
        (lambda: trainer(logger=[NotOne()]), "AsyncRLTrainer: logger[0] is of type NotOne; give .*Logger"),
        (
            lambda: data(environment=NotOne()),
            f"RolloutDataModule: environment is of type NotOne; give .* {ENVIRONMENT}",
        ),
        (lambda: data(environment=None), "RolloutDataModule: environment is of type NoneType; give an object"),
        (lambda: data(environment=Arithmetic), "environment is the class Arithmetic, no object; give an object"),
        (lambda: data(environment={"a": NotOne()}), f"environment['a'] is of type NotOne; give .* {ENVIRONMENT}"),
    ],
)
def test_an_object_of_another_kind_is_refused_naming_argument_type_and_what_is_wanted(make, message):
    with pytest.raises(TypeError, match=message.replace("[", r"\[")):
        make()
