"""Fixtures every test may use: the tiny model on disk."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may wait for a network
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of about 1M random parameters with a character tokenizer, as a Hugging Face directory. Read-only."""
    from async_rl.models import build_tiny_model

    return build_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def command(monkeypatch: Any, capsys: Any, tmp_path: Path) -> Callable[..., tuple[int, str, str]]:
    """Run the command in this process, in an empty directory: ``command(*args) -> (code, out, err)``."""
    from hydra.core.global_hydra import GlobalHydra

    from async_rl import compose, main

    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", [str(compose.REPOSITORY / "train.py"), *arguments])
        GlobalHydra.instance().clear()
        try:
            code = main.main()
        except SystemExit as exit:
            code = int(exit.code or 0)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture
def trained(monkeypatch: Any) -> list[Any]:
    """Leave training out: ``trained`` is the list of checked configs that would have been trained."""
    from async_rl import main

    configs: list[Any] = []

    def train(config: Any, choices: Any, record: Any, directory: Any) -> tuple[int, str]:
        directory.begin()
        configs.append(config)
        return 0, "finished"

    monkeypatch.setattr(main, "_train", train)
    return configs


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out slow tests unless they are asked for, and vLLM's where vLLM is not installed."""
    import importlib.util

    asked_for = config.getoption("-m")
    for item in items:
        if "slow" in item.keywords and "slow" not in asked_for:
            item.add_marker(pytest.mark.skip(reason="slow; run with -m slow"))
        if "vllm" in item.keywords and importlib.util.find_spec("vllm") is None:
            item.add_marker(pytest.mark.skip(reason="vLLM is not installed here"))
