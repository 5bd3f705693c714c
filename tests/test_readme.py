"""The README's Python runs, and its links lead somewhere."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

import async_rl
from async_rl.engines.scripted import ScriptedEngine

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.S)


def names_of(block):
    namespace = {"__name__": "readme"}
    exec(compile(block, "README.md", "exec"), namespace)
    return namespace


def test_the_program_trains_as_written(tiny_model_dir, tmp_path, monkeypatch):
    namespace = names_of(BLOCKS[0])
    namespace["resolve_model"] = lambda name: SimpleNamespace(path=tiny_model_dir)
    namespace["VLLMEngine"] = lambda model: ScriptedEngine(lambda prompt, seed: [10 + seed % 5, 11])
    trainers = []

    def shorter(**arguments):
        trainers.append(async_rl.AsyncRLTrainer(**arguments | {"max_steps": 2, "parity_check": False}))
        return trainers[0]

    namespace["AsyncRLTrainer"] = shorter
    monkeypatch.chdir(tmp_path)
    namespace["main"]()
    assert trainers[0].global_step == 2
    assert (tmp_path / "runs/spelling/run.db").exists()


def test_the_environment_and_the_callback_work_as_written(tiny_model_dir, tmp_path, capsys):
    environment = names_of(BLOCKS[1])["Capitals"]()
    assert environment.reward({"word": "tree"}, "TREE!") == 1.0
    callback = names_of(BLOCKS[2])["PrintBest"]()
    data = async_rl.RolloutDataModule(
        environment, ScriptedEngine(lambda prompt, seed: [10 + seed % 5, 11]), batch_size=2, group_size=2
    )
    trainer = async_rl.AsyncRLTrainer(
        max_steps=2, run_dir=tmp_path, callbacks=[callback], parity_check=False, evaluate_at="never", logger=False
    )
    trainer.fit(async_rl.PolicyModule(tiny_model_dir), datamodule=data)
    printed = capsys.readouterr().out
    assert "the engine samples with version 0" in printed
    assert re.search(r"0\.00 '.*'", printed)


@pytest.mark.parametrize("block", BLOCKS[1:])
def test_what_users_write_is_short(block):
    assert len(block.splitlines()) < 20


def test_links_lead_somewhere():
    links = re.findall(r"\]\(([^)#]+)\)", README)
    assert links
    assert [link for link in links if not link.startswith("http") and not (ROOT / link).exists()] == []


def test_every_public_name_can_be_imported():
    assert [name for name in async_rl.__all__ if not hasattr(async_rl, name)] == []
    with pytest.raises(AttributeError, match="nonsense"):
        async_rl.nonsense  # noqa: B018
