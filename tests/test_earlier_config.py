"""A run that is resumed or replayed goes on with its own settings; what would change its data's meaning is refused."""

import json
import shutil
import sys

import pytest
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from async_rl import main
from async_rl.earlier_config import keep

FIRST = (
    *("+recipe=gsm8k", "hardware=cpu", "model=tiny", "environment=arithmetic", "environment.digits=2"),
    *("engine=transformers", "engine.max_batch=3", "optimizer.lr=3e-4", "rollout.max_retries=5", "~callbacks.drain"),
)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A run in ``x`` that is there to be gone on with, and its config; made once."""
    directory, configs = tmp_path_factory.mktemp("made"), []
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        patch.setattr(sys, "argv", ["train.py", *FIRST, "run_dir=x"])
        patch.setattr(main, "_train", lambda config, *_: (configs.append(config) or 0, "finished"))
        GlobalHydra.instance().clear()
        assert main.main() == 0
    return directory / "x", configs[0]


@pytest.fixture
def first(made, tmp_path):
    """The config of the run in ``x``, a copy of its own."""
    shutil.copytree(made[0], tmp_path / "x")
    return made[1]


def without(config, *keys):
    return {name: value for name, value in vars_of(config).items() if name not in keys}


def vars_of(config):
    return {name: getattr(config, name) for name in config.__dataclass_fields__}


def test_a_resume_goes_on_with_the_settings_of_the_run(command, trained, first):
    code, out, _ = command("resume=true", "run_dir=x")
    assert code == 0
    assert out == "going on with the settings in x/config.yaml\n"
    assert without(trained[0], "resume") == without(first, "resume")
    assert "drain" not in trained[0].callbacks


def test_what_the_command_line_gives_is_changed_and_said(command, trained, first):
    code, out, err = command("resume=true", "run_dir=x", "max_steps=400", "optimizer.lr=1e-3", "engine.max_batch=4")
    assert code == 0, err
    assert "changed: " in out
    for change in ("max_steps 6 -> 400", "optimizer.lr 0.0003 -> 0.001", "engine.max_batch 3 -> 4"):
        assert change in out
    (now,) = trained
    assert (now.max_steps, now.optimizer["lr"], now.engine["max_batch"]) == (400, 1e-3, 4)
    assert (now.optimizer["weight_decay"], now.batch_size) == (first.optimizer["weight_decay"], first.batch_size)


def test_the_command_of_the_first_run_with_resume_changes_nothing(command, trained, first):
    assert command(*FIRST, "run_dir=x", "resume=true")[0] == 0
    assert without(trained[0], "resume") == without(first, "resume")


def test_a_group_chosen_anew_replaces_the_section(command, trained, first):
    assert command("resume=true", "run_dir=x", "algorithm=rloo", "optimizer.lr=1e-3")[0] == 0
    assert trained[0].algorithm.advantage != first.algorithm.advantage
    assert trained[0].environment == first.environment


MINE = (
    *("+recipe=team", "hardware=cpu", "model=tiny", "engine=transformers", "environment=custom", "seed=7"),
    *("environment._target_=async_rl.environments.arithmetic.Arithmetic", "+environment.digits=2"),
)


@pytest.fixture
def mine(command, trained, monkeypatch, tmp_path):
    """The config of a run in ``x`` of somebody's own environment and recipe, which leave values to be given."""
    recipes = tmp_path / "recipes"
    recipes.mkdir()
    (recipes / "team.yaml").write_text("seed: ???\nlogger: {jsonl: {path: '${run_dir}/${seed}.jsonl'}}\n")
    monkeypatch.setenv("ASYNC_RL_RECIPES", str(recipes))
    code, _, err = command(*MINE, "run_dir=x")
    assert code == 0, err
    return trained.pop()


def test_what_had_to_be_given_need_not_be_given_again(command, trained, mine, tmp_path):
    code, _, err = command("resume=true", "run_dir=x")
    assert code == 0, err
    assert without(trained[0], "resume") == without(mine, "resume")
    (tmp_path / "x" / "run.db").touch()
    code, _, err = command("replay=x", "run_dir=y")
    assert code == 0, err
    assert trained[1].logger["jsonl"]["path"] == "y/7.jsonl"


OWN = """
defaults: [{override /environment: null}]
environment: {_target_: async_rl.environments.arithmetic.Arithmetic, digits: 2}
"""


def test_a_recipe_with_an_environment_of_its_own(command, trained, monkeypatch, tmp_path):
    """As recipes/README.md teaches it; also where its folder is not known any more, or not yet again."""
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "own.yaml").write_text(OWN)
    monkeypatch.setenv("ASYNC_RL_RECIPES", str(tmp_path / "recipes"))
    code, _, err = command("+recipe=own", "model=tiny", "engine=transformers", "run_dir=x")
    assert code == 0, err
    first = without(trained.pop(), "resume", "max_steps")
    monkeypatch.delenv("ASYNC_RL_RECIPES")
    code, out, err = command("resume=true", "run_dir=x", "max_steps=7")
    assert code == 0, err
    assert out == (
        "going on with the settings in x/config.yaml (recipe own is not among the recipes here); "
        "changed: max_steps 18 -> 7\n"
    )
    monkeypatch.setenv("ASYNC_RL_RECIPES", str(tmp_path / "recipes"))
    for said in (["max_steps=8"], ["+recipe=own", "max_steps=9"]):
        code, out, err = command("resume=true", "run_dir=x", *said)
        assert (code, "not among" in out) == (0, False), err
    (tmp_path / "x" / "run.db").touch()
    assert command("replay=x", "run_dir=y")[0] == 0
    assert [without(c, "resume", "max_steps") for c in trained[:3]] == [first] * 3
    for run in "xy":
        record = json.loads((tmp_path / run / "run.json").read_text())
        assert (record["recipe"], record["choices"]["environment"]) == ("own", None)
    code, _, err = command("resume=true", "run_dir=x", "environment.digits=1")
    assert code == 2
    assert "environment.digits" in err
    assert "resume_allow" in err


def test_a_group_chosen_anew_does_not_take_what_has_to_be_given_from_another(command, trained, first):
    code, _, err = command("resume=true", "run_dir=x", "environment=custom")
    assert code == 2
    assert "environment._target_: has no value; give environment._target_=..." in err


def test_a_run_moved_elsewhere_writes_where_it_is_now(command, trained, first, tmp_path):
    (tmp_path / "x").rename(tmp_path / "y")
    assert command("resume=true", "run_dir=y")[0] == 0
    assert trained[0].logger["jsonl"]["path"] == "y/metrics.jsonl"


def test_settings_that_came_later_take_their_default(command, trained, first, tmp_path):
    saved = OmegaConf.load(tmp_path / "x" / "config.yaml")
    del saved.run["checkpoint_every_s"], saved["resume_allow"]
    OmegaConf.save(saved, tmp_path / "x" / "config.yaml")
    assert command("resume=true", "run_dir=x")[0] == 0
    assert trained[0].run == first.run


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (["batch_size=3"], ["batch_size: was 4, now 3", "resume_allow=[batch_size]"]),
        (["seed=1", "group_size=2"], ["seed: was 0, now 1", "group_size: was 8, now 2", "[group_size,seed]"]),
        (["model.name_or_path=other"], ["model.name_or_path: was tiny, now other"]),
        (["environment.digits=1"], ["environment.digits: was 2, now 1", "resume_allow=[environment.digits]"]),
        (["environment=gsm8k"], ["environment: was {'_target_': 'async_rl.env", "resume_allow=[environment]"]),
        (["rollout.epochs=3"], ["rollout.epochs: was null, now 3"]),
        (["rollout.shuffle=false"], ["rollout.shuffle: was True, now False"]),
        (["rollout.sampling.temperature=0.5"], ["rollout.sampling.temperature: was 1.0, now 0.5"]),
        (["+recipe=arithmetic"], ["recipe: arithmetic, but the run in x has recipe gsm8k"]),
        (["batch_size=abc"], ["batch_size: 'abc' is not possible", "from the command line: batch_size=abc"]),
        (["resume_allow=[batch_siz]"], ["did you mean batch_size?"]),
        (["environment.digit=1"], ["did you mean environment.digits?"]),
    ],
)
def test_what_would_change_the_meaning_of_the_data_is_refused(command, trained, first, tmp_path, changes, said):
    before = (tmp_path / "x" / "config.yaml").read_bytes()
    code, _, err = command("resume=true", "run_dir=x", *changes)
    assert code == 2
    assert trained == []
    for part in said:
        assert part in err
    assert (tmp_path / "x" / "config.yaml").read_bytes() == before
    assert json.loads((tmp_path / "x" / "run.json").read_text())["earlier"] == []


@pytest.mark.parametrize("allow", ["batch_size,environment", "batch_size,environment.digits"])
def test_what_resume_allow_names_may_change_and_is_what_the_run_has_from_then_on(command, trained, first, allow):
    change = ("batch_size=3", "environment.digits=1")
    assert command("resume=true", "run_dir=x", *change, "resume_allow=[batch_size]")[0] == 2
    code, _, err = command("resume=true", "run_dir=x", *change, f"resume_allow=[{allow}]")
    assert code == 0, err
    assert command("resume=true", "run_dir=x")[0] == 0
    assert (trained[-1].batch_size, trained[-1].environment["digits"], trained[-1].resume_allow) == (3, 1, [])


def test_a_resume_refused_once_the_data_was_there_leaves_the_config_as_it_was(command, monkeypatch, first, tmp_path):
    before = (tmp_path / "x" / "config.yaml").read_bytes()
    monkeypatch.setattr(main, "_train", lambda *_: (2, "the data changed"))
    assert command("resume=true", "run_dir=x", "max_steps=99")[0] == 2
    assert (tmp_path / "x" / "config.yaml").read_bytes() == before


# replay


@pytest.fixture
def recorded(first, tmp_path):
    (tmp_path / "x" / "run.db").touch()
    return first


def test_a_replay_has_the_settings_of_the_run_and_a_directory_of_its_own(command, trained, recorded):
    code, out, err = command("replay=x", "run_dir=y", "optimizer.lr=1e-2", "algorithm.loss.clip_low=0.3")
    assert code == 0, err
    assert out.startswith("replaying with the settings in x/config.yaml; changed: ")
    (config,) = trained
    assert (config.replay, config.run_dir, config.optimizer["lr"]) == ("x", "y", 1e-2)
    assert config.logger["jsonl"]["path"] == "y/metrics.jsonl"
    assert (config.model, config.seed) == (recorded.model, recorded.seed)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (["batch_size=3"], "batch_size: 3 changes nothing in a replay"),
        (["environment.digits=1"], "environment.digits: 1 changes nothing in a replay"),
        (["rollout.max_retries=1"], "rollout.max_retries: 1 changes nothing in a replay"),
        (["resume=true"], "remove one of them"),
        (["run_dir=x"], "x holds the run to be replayed"),
        (["run_dir=x", "overwrite=true"], "x holds the run to be replayed"),
    ],
)
def test_what_a_replay_would_not_use_is_refused(command, trained, recorded, changes, said):
    run_dir = [] if any(c.startswith("run_dir") for c in changes) else ["run_dir=y"]
    code, _, err = command("replay=x", *run_dir, *changes)
    assert (code, trained) == (2, [])
    assert said in err


def test_a_replay_cannot_be_resumed(command, trained, recorded):
    assert command("replay=x", "run_dir=y")[0] == 0
    code, _, err = command("resume=true", "run_dir=y")
    assert code == 2
    assert "y is a replay of x" in err


def test_a_sweep_over_a_replay_gives_each_job_the_settings_of_the_run(command, trained, recorded):
    code, _, err = command("-m", "replay=x", "run_dir=sweep", "optimizer.lr=1e-3,1e-2")
    assert code == 0, err
    assert [c.optimizer["lr"] for c in trained] == [1e-3, 1e-2]
    assert {c.batch_size for c in trained} == {recorded.batch_size}
    assert [c.run_dir for c in trained] == ["sweep/0", "sweep/1"]


def test_saved_settings_are_never_half_there(first, tmp_path):
    """Renamed, not written over: a process killed meanwhile leaves the ones that were there."""
    path = tmp_path / "x" / "config.yaml"
    text = path.read_text()
    with path.open() as before:
        keep(tmp_path / "x", "hardware.precision", "32-true")
        assert before.read() == text
    assert OmegaConf.load(path).hardware.precision == "32-true"
