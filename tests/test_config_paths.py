"""Paths in a config that must be there: what is refused as bad config before a run begins, and what is not."""

from pathlib import Path

import pytest

from async_rl.models import local_fault


def refused(command, tmp_path, *arguments):
    before = set(tmp_path.rglob("*"))
    code, _, err = command(*arguments)
    assert code == 2, err
    assert "Traceback" not in err
    assert set(tmp_path.rglob("*")) == before
    return err


@pytest.mark.parametrize(
    ("given", "fault"), [("./nowhere", "does not exist"), ("empty", "has no config.json"), ("a/b/c", "does not exist")]
)
def test_a_model_directory_that_holds_no_model_is_bad_config(command, trained, tmp_path, given, fault):
    (tmp_path / "empty").mkdir()
    err = refused(command, tmp_path, f"model.name_or_path={given}")
    assert f"config error: model.name_or_path: {given}: {tmp_path / given} {fault}; give a directory as" in err
    assert f"(from the command line: model.name_or_path={given})" in err
    assert trained == []


def test_a_name_on_the_hub_is_looked_for_by_the_run(command, trained):
    assert command("model.name_or_path=some/where")[0] == 0
    assert len(trained) == 1


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        (("environment=gsm8k", "environment.path=nowhere"), "environment.path"),
        (("environment=math", "environment.path=nowhere"), "environment.path"),
        (
            ("environment=math", "environment.path=there.jsonl", "environment.eval_path=nowhere"),
            "environment.eval_path",
        ),
        (
            ("~environment", "+environment.sums={_target_: async_rl.environments.gsm8k.GSM8K, path: nowhere}"),
            "environment.sums.path",
        ),
    ],
)
def test_data_that_is_not_there_is_bad_config(command, trained, tmp_path, arguments, key):
    (tmp_path / "there.jsonl").touch()
    err = refused(command, tmp_path, "model=tiny", *arguments)
    assert f"{key}: nowhere: {tmp_path / 'nowhere'} does not exist; give the file or directory with the data" in err
    assert trained == []


def test_a_path_of_somebody_else_s_environment_is_its_own_matter(command, trained, tmp_path, monkeypatch):
    (tmp_path / "mine_with_a_path.py").write_text("class Mine:\n    def __init__(self, path): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    own = ("environment=custom", "environment._target_=mine_with_a_path.Mine", "+environment.path=to_be_made")
    assert command("model=tiny", *own)[0] == 0


@pytest.mark.parametrize("name", ["tiny", "some/model", "gpt2"])
def test_a_name_is_no_directory(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert local_fault(name) == ""


def test_a_model_is_none(tiny_model_dir: Path):
    assert local_fault(str(tiny_model_dir)) == ""
