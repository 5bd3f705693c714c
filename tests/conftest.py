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
