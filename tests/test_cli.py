"""The command as people use it: exit codes, messages, what is imported, what a run leaves behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from async_rl import compose, main
from async_rl.hub import SourceNotFoundError

TRAIN = compose.REPOSITORY / "train.py"
TINY_RUN = (
    *(
        "model=tiny",
        "engine=transformers",
        "max_steps=2",
        "batch_size=2",
        "group_size=2",
        "rollout.sampling.max_tokens=4",
    ),
    *("run.evaluation.limit=2", "run.evaluation.samples=1", "hardware.trainer_threads=1", "engine.threads=1"),
)
PROBE = """
import json, sys
from async_rl import main
from hydra.core.global_hydra import GlobalHydra
for line in sys.stdin:
    GlobalHydra.instance().clear()
    sys.argv = ["train.py", *json.loads(line)]
    print("=====", file=sys.stderr, flush=True)
    try:
        code = main.main()
    except SystemExit as error:
        code = error.code
    heavy = sorted({m.partition(".")[0] for m in sys.modules} & {"torch", "vllm", "lightning", "transformers"})
    print("=====", json.dumps([code, heavy]), flush=True)
"""


def test_mistakes_are_refused_with_exit_code_2_without_importing_anything_heavy(tmp_path):
    """The promise is under two seconds, which holds as long as torch, Lightning and vLLM stay out of it."""
    cases = {
        ("max_stalenes=4",): "did you mean max_staleness?",
        ("+recipe=gsm8",): "did you mean recipe=gsm8k?",
        (
            "model=Qwen/Qwen2.5-7B",
        ): "model=Qwen/Qwen2.5-7B: there is no model 'Qwen/Qwen2.5-7B'; available: by_hardware, "
        "qwen2_5_0_5b, smollm2, tiny. A model of your own: model.name_or_path=path/or/name",
        ("batch_size=0",): "batch_size: 0 is not possible; give a number >= 1",
        ("batch_size=abc",): "a whole number",
        ("max_staleness=0", "admit_ahead=1"): "admit_ahead: 1 has no effect",
        ("+environment.digit=2",): "did you mean environment.digits?",
        ("+engine.max_seqs=2", "engine=vllm"): "did you mean engine.max_num_seqs?",
        ("+optimizer.weight_dacay=0",): "did you mean optimizer.weight_decay?",
        ("batch_size=[1",): "batch_size=[1",
        ("-m", "batch_size=4,0"): "in the job batch_size=0",
        ("-m", "+recipe=gsm8k,gsm9k"): "did you mean recipe=gsm8k?",
        ("resume=true", "run_dir=nowhere"): "there is no run in nowhere",
        ("replay=nowhere",): "there is no run's record (run.db) in nowhere",
    }
    done = subprocess.run(
        [sys.executable, "-c", PROBE],
        input="".join(json.dumps(case) + "\n" for case in cases),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line.removeprefix("=====")) for line in done.stdout.splitlines() if line.startswith("=====")]
    messages = done.stderr.split("=====\n")[1:]
    assert len(answers) == len(messages) == len(cases)
    for (case, expected), answer, message in zip(cases.items(), answers, messages, strict=True):
        assert answer == [2, []], (case, answer, message)
        assert expected in message, (case, message)
        assert "Traceback" not in message, (case, message)
    assert list(tmp_path.iterdir()) == []


def test_help_names_the_recipes_the_main_keys_and_the_exit_codes(command):
    code, out, _ = command("--help")
    assert code == 0
    for part in (
        "recipe: arithmetic, calculator, gsm8k",
        "max_staleness  ",
        "rollout.max_retries  ",
        "for example ${engine}",
        "digits: 1",
        "Exit codes",
        "+recipe=gsm8k",
    ):
        assert part in out


def test_the_config_can_be_shown_and_nothing_is_written(command, tmp_path):
    code, out, _ = command("--cfg", "job", "--resolve", "+recipe=gsm8k", "hardware=cpu", "max_staleness=3")
    assert code == 0
    shown = OmegaConf.create(out)
    assert shown.max_staleness == 3
    assert shown.run_dir.startswith("runs/gsm8k/")
    assert shown.environment._target_.endswith("GSM8K")
    assert list(tmp_path.iterdir()) == []


# the run directory


def test_a_run_leaves_its_resolved_config_and_what_it_was_made_of(command, trained, tmp_path):
    assert command("+recipe=gsm8k", "hardware=cpu", "seed=3")[0] == 0
    (directory,) = (tmp_path / "runs" / "gsm8k").iterdir()
    config = OmegaConf.load(directory / "config.yaml")
    assert OmegaConf.to_container(config, resolve=False) == OmegaConf.to_container(config, resolve=True)
    assert (config.seed, config.run_dir) == (3, str(directory.relative_to(tmp_path)))
    record = json.loads((directory / "run.json").read_text())
    assert record["recipe"] == "gsm8k"
    assert (record["seed"], record["exit_reason"], record["exit_code"]) == (3, "finished", 0)
    assert record["packages"]["torch"]
    assert record["ended"] >= record["started"]


def test_a_run_without_a_recipe_is_not_called_by_that_of_the_base_config(command, trained, tmp_path):
    assert command("environment=custom", "environment._target_=async_rl.environments.Arithmetic")[0] == 0
    (directory,) = (tmp_path / "runs" / "custom").iterdir()
    assert json.loads((directory / "run.json").read_text())["recipe"] == "none (base config)"


def test_a_callback_that_the_config_leaves_out_is_not_there(command, trained):
    assert command("model=tiny", "callbacks.drain=null", "logger=jsonl")[0] == 0
    trainer = main._build_trainer(trained[0], None)
    names = {type(callback).__name__ for callback in trainer.callbacks}
    assert {"RunProgress", "RunSummary", "EmptyBatchGuard", "ResumeVersionRecovery"} <= names
    assert "DrainCallback" not in names
    assert [type(logger).__name__ for logger in trainer.loggers] == ["JsonlLogger"]


def test_a_used_directory_is_refused_unless_resumed_or_overwritten(command, trained, tmp_path):
    assert command("run_dir=here")[0] == 0
    (tmp_path / "here" / "old").touch()
    code, _, err = command("run_dir=here")
    assert code == 2
    assert "here is already used" in err
    assert "resume=true" in err
    assert "overwrite=true" in err
    assert len(trained) == 1
    assert command("run_dir=here", "resume=true")[0] == 0
    assert (tmp_path / "here" / "old").exists()
    record = json.loads((tmp_path / "here" / "run.json").read_text())
    assert [r["exit_reason"] for r in record["earlier"]] == ["finished"]
    assert command("run_dir=here", "overwrite=true")[0] == 0
    assert not (tmp_path / "here" / "old").exists()


def test_only_a_run_is_ever_deleted(command, trained, tmp_path):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1.tex").write_text("years of work")
    code, _, err = command("run_dir=thesis", "overwrite=true")
    assert code == 2
    assert "not deleted" in err
    assert (tmp_path / "thesis" / "chapter1.tex").exists()
    assert trained == []


def test_a_directory_that_cannot_be_made_is_a_config_error(command, trained, tmp_path):
    (tmp_path / "file").touch()
    code, _, err = command("run_dir=file/run")
    assert code == 2
    assert "run_dir" in err


# sweeps


def test_a_sweep_runs_every_job_in_a_directory_of_its_own(command, trained, tmp_path):
    assert command("-m", "max_staleness=0,2", "run_dir=sweep")[0] == 0
    assert [c.max_staleness for c in trained] == [0, 2]
    assert [c.run_dir for c in trained] == ["sweep/0", "sweep/1"]
    assert {p.name for p in tmp_path.iterdir()} == {"sweep"}
    assert {p.name for p in (tmp_path / "sweep").iterdir()} == {"0", "1", "multirun.yaml"}


@pytest.mark.parametrize(("codes", "expected"), [([0, 1], 1), ([3, 0], 3), ([0, 0], 0)])
def test_a_sweep_ends_with_the_code_of_the_first_job_that_did_not_finish(command, monkeypatch, codes, expected):
    left = list(codes)
    monkeypatch.setattr(main, "_train", lambda *_: (left.pop(0), "as told"))
    assert command("-m", "seed=0,1", "run_dir=sweep")[0] == expected
    assert left == []


def test_an_interrupted_job_ends_the_sweep(command, monkeypatch):
    monkeypatch.setattr(main, "_train", lambda *_: (75, "received SIGINT"))
    assert command("-m", "seed=0,1", "run_dir=sweep")[0] == 75
    assert not Path("sweep/1").exists()


def test_an_interruption_before_training_is_75_only_where_a_record_is(command, monkeypatch):
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(main, "_train", interrupted)
    code, _, err = command("run_dir=here")
    assert (code, err) == (1, "interrupted before training\n")
    Path("here/run.db").touch()
    code, _, err = command("run_dir=here", "resume=true")
    assert (code, err) == (75, "interrupted before training; go on with resume=true run_dir=here\n")
    assert json.loads(Path("here/run.json").read_text())["exit_code"] == 75


# errors after the check


def test_a_value_that_a_constructor_refuses_is_a_config_error_without_traceback(command):
    code, _, err = command("environment.digits=2", "+environment.train_size=100000", "model=tiny")
    assert code == 2
    assert "there are only 8100 sums" in err
    assert "Traceback" not in err


def test_a_source_that_is_nowhere_ends_with_its_one_message(command, monkeypatch):
    def nowhere(*_: object) -> None:
        raise SourceNotFoundError("the model is nowhere; give a path")

    monkeypatch.setattr(main, "build", nowhere)
    code, _, err = command("run_dir=here")
    assert code == 1
    assert "error: the model is nowhere; give a path" in err
    assert "Traceback" not in err
    assert "nowhere" in json.loads(Path("here/run.json").read_text())["exit_reason"]


def test_any_other_error_shows_its_traceback_and_is_recorded(command, monkeypatch):
    def broken(*_: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(main, "build", broken)
    code, _, err = command("run_dir=here")
    assert code == 1
    assert "ZeroDivisionError: a bug" in err
    assert "Traceback" in err
    assert "Traceback" in Path("here/run.log").read_text()
    assert json.loads(Path("here/run.json").read_text())["exit_reason"] == "ZeroDivisionError: a bug"


def test_real_runs_from_another_directory_one_after_the_other(tmp_path):
    environment = {**os.environ, "ASYNC_RL_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(TRAIN), "-m", "max_staleness=0,2", "run_dir=runs", *TINY_RUN],
        cwd=tmp_path,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
    for header in ("model    tiny", "data     Arithmetic(digits=1)", "engine   TransformersEngine", "results  runs/1"):
        assert header in done.stdout
    for job, staleness in enumerate((0, 2)):
        directory = tmp_path / "runs" / str(job)
        record = json.loads((directory / "run.json").read_text())
        assert (record["exit_code"], record["exit_reason"]) == (0, "max_steps=2 reached")
        assert record["facts"]["model"].startswith("tiny")
        assert [e["version"] for e in record["evaluations"]] == [0, 2]
        config = OmegaConf.load(directory / "config.yaml")
        assert config.max_staleness == staleness
        assert config.hardware.precision in ("32-true", "bf16-mixed")  # what was found out, for a resume to go on with
        assert (directory / "metrics.jsonl").stat().st_size > 0
        assert list((directory / "tensorboard").iterdir())
        assert (directory / "run.log").read_text()
