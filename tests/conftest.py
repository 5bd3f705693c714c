"""Fixtures every test may use: the tiny model on disk."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may wait for a network


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of about 1M random parameters with a character tokenizer, as a Hugging Face directory. Read-only."""
    from async_rl.models import build_tiny_model

    return build_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out slow tests unless they are asked for, and vLLM's where vLLM is not installed."""
    import importlib.util

    asked_for = config.getoption("-m")
    for item in items:
        if "slow" in item.keywords and "slow" not in asked_for:
            item.add_marker(pytest.mark.skip(reason="slow; run with -m slow"))
        if "vllm" in item.keywords and importlib.util.find_spec("vllm") is None:
            item.add_marker(pytest.mark.skip(reason="vLLM is not installed here"))
