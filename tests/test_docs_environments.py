"""docs/environments.md: every snippet runs as written, every command and config composes."""

import asyncio
import json
import re
import shlex
from pathlib import Path

import pytest
from test_config import composed

import async_rl
from async_rl import compose
from async_rl.engines.base import SamplingParams
from async_rl.engines.scripted import ScriptedEngine
from async_rl.environments import ToolEnvironment, make_rollout
from async_rl.environments.base import by_name
from async_rl.environments.demonstrations import demonstrate
from async_rl.jsonl_logger import JsonlLogger
from async_rl.types import Prompt, RolloutTask

PAGE = (Path(__file__).resolve().parent.parent / "docs/environments.md").read_text()


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", PAGE, flags=re.S)


@pytest.fixture(scope="module")
def names():
    namespace = {"__name__": "environments_page"}
    for block in blocks("python"):  # one after the other: later ones use names of earlier ones
        exec(compile(block, "environments.md", "exec"), namespace)
    return namespace


@pytest.fixture(scope="module")
def tokenizer(tiny_model_dir):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_model_dir)


def attempt(tokenizer, environment, *turns):
    """The trajectory in which the model says ``turns`` to the first training prompt."""
    said = iter(turns)
    engine = ScriptedEngine(lambda prompt, seed: [*tokenizer.encode(next(said)), tokenizer.eos_token_id])
    ((name, _),) = by_name(environment).items()
    prompt = Prompt(f"{name}/0/0", name, environment.prompts("train")[0])

    async def run():
        await engine.load_weights(0, None)
        rollout = make_rollout({name: environment}, tokenizer, SamplingParams(max_tokens=100))
        return await rollout(RolloutTask(0, prompt, 0, 0, seed=1), engine)

    return asyncio.run(run())


def test_one_question_one_answer(names, tokenizer):
    assert attempt(tokenizer, names["Capitals"](), "TREE").reward == 1.0
    assert attempt(tokenizer, names["Capitals"](), "tree").reward == 0.0
    assert attempt(tokenizer, names["backwards"], "eert").reward == 1.0


def test_tools(names, tokenizer):
    cities = names["Cities"]()
    assert isinstance(cities, ToolEnvironment)
    call = '<tool_call>{"name": "population", "arguments": {"city": "Lyon"}}</tool_call>'
    trajectory = attempt(tokenizer, cities, call, "522000")
    assert (trajectory.turns, trajectory.reward, trajectory.reward_parts["tool_calls"]) == (2, 1.0, 1)
    wrong = attempt(tokenizer, cities, call.replace("Lyon", "Rome"), "none")
    assert (wrong.reward, wrong.reward_parts["tool_errors"]) == (0.0, 1)


def test_a_demonstration(names, tokenizer):
    (trace,) = demonstrate({"cities": names["DemonstratedCities"]()}, tokenizer, 1)
    learned = [t for t, mask in zip(trace.token_ids, trace.loss_mask, strict=True) if mask]
    call = '<tool_call>{"name": "population", "arguments": {"city": "Lyon"}}</tool_call>'
    assert tokenizer.decode(learned, skip_special_tokens=True) == f"{call}522000"


def test_own_loops(names, tokenizer):
    guess, blocking = names["Guess"](), names["BlockingGuess"]()
    assert attempt(tokenizer, guess, "1").reward == 1.0
    assert attempt(tokenizer, guess, "5", "1").reward == 0.5
    trajectory = attempt(tokenizer, guess, "5", "6", "7")
    assert (trajectory.turns, trajectory.reward) == (3, 0.0)
    assert attempt(tokenizer, blocking, "1").reward == 1.0


def test_rubric(names, tokenizer):
    trajectory = attempt(tokenizer, names["ShortCapitals"](), "TREE")
    assert trajectory.reward == pytest.approx(1.2)
    assert trajectory.reward_parts == {"right": 1.0, "short": 1.0}
    assert attempt(tokenizer, names["ShortCapitals"](), "t" * 50).reward == 0.0


def test_a_run_logs_the_parts_of_each_environment_in_training_and_evaluation(names, tiny_model_dir, tmp_path):
    class Seen(async_rl.RLCallback):
        def on_train_batch_end(self, trainer, *_):
            told.update(trainer.callback_metrics)

        def on_validation_end(self, trainer, policy):
            told.update(trainer.callback_metrics)

    told = {}
    data = async_rl.RolloutDataModule(
        {"words": names["ShortCapitals"](), "spelling": names["backwards"]},
        ScriptedEngine(lambda prompt, seed: [10 + seed % 5, 11]),
        batch_size=4,
        group_size=2,
        mixture={"words": 1, "spelling": 3},
    )
    trainer = async_rl.AsyncRLTrainer(
        max_steps=2,
        run_dir=tmp_path,
        callbacks=[Seen()],
        parity_check=False,
        logger=JsonlLogger(tmp_path / "metrics.jsonl"),
        accelerator="cpu",
    )
    trainer.fit(async_rl.PolicyModule(tiny_model_dir), datamodule=data)
    for name in ("reward/words", "reward/words/right", "reward/words/short", "reward/spelling"):
        assert name in told
        assert f"eval/{name}" in told
    # A step may have groups of one environment only.
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    trained = [sum(n for key, n in line.items() if key.startswith("groups_trained/")) for line in lines]
    assert [n for n in trained if n] == [4, 4]
    assert {"length/trained", "latency/admitted_s"} <= set(told)


@pytest.mark.parametrize("block", blocks("yaml"))
def test_configs_compose(block, tmp_path, monkeypatch):
    (tmp_path / "mine.yaml").write_text(block)
    monkeypatch.setenv(compose.RECIPES_VARIABLE, str(tmp_path))
    config = composed("+recipe=mine")
    assert set(config.environment) == set(config.rollout.mixture) == {"sums", "legs"}


@pytest.mark.parametrize("command", [c for b in blocks("bash") for c in b.splitlines()])
def test_commands_compose(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = shlex.split(command, comments=True)
    for data in re.findall(r"environment\.path=(\S+)", command):  # the reader has it
        (tmp_path / data).mkdir(parents=True)
    assert words[:2] == ["python", "train.py"]
    composed(*words[2:], *re.findall(r"# (\+\S+)", command))


def test_the_page_is_a_page():
    assert len(PAGE.splitlines()) <= 180
