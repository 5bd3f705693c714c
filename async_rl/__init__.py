"""Asynchronous RL post-training of language models with an exact staleness bound.

The public names below are imported on first use, so that importing this package costs nothing.
"""

from __future__ import annotations

import importlib
import logging
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from async_rl.callbacks.base import RLCallback
    from async_rl.datamodule import RolloutDataModule
    from async_rl.engines.base import SamplingParams
    from async_rl.engines.transformers import TransformersEngine
    from async_rl.engines.vllm import VLLMEngine
    from async_rl.engines.vllm_server import VLLMServerEngine
    from async_rl.environments.base import Environment, Reward, SingleTurn
    from async_rl.environments.budget import BudgetError
    from async_rl.environments.functional import Task
    from async_rl.environments.tools import ToolEnvironment
    from async_rl.models import resolve_model
    from async_rl.policy import PolicyModule
    from async_rl.trainer import AsyncRLTrainer

_HOME = {
    "AsyncRLTrainer": "async_rl.trainer",
    "BudgetError": "async_rl.environments.budget",
    "Environment": "async_rl.environments.base",
    "PolicyModule": "async_rl.policy",
    "RLCallback": "async_rl.callbacks.base",
    "Reward": "async_rl.environments.base",
    "RolloutDataModule": "async_rl.datamodule",
    "SamplingParams": "async_rl.engines.base",
    "SingleTurn": "async_rl.environments.base",
    "Task": "async_rl.environments.functional",
    "ToolEnvironment": "async_rl.environments.tools",
    "TransformersEngine": "async_rl.engines.transformers",
    "VLLMEngine": "async_rl.engines.vllm",
    "VLLMServerEngine": "async_rl.engines.vllm_server",
    "resolve_model": "async_rl.models",
}

__all__ = [
    "AsyncRLTrainer",
    "BudgetError",
    "Environment",
    "PolicyModule",
    "RLCallback",
    "Reward",
    "RolloutDataModule",
    "SamplingParams",
    "SingleTurn",
    "Task",
    "ToolEnvironment",
    "TransformersEngine",
    "VLLMEngine",
    "VLLMServerEngine",
    "resolve_model",
]


if os.environ.get("ASYNC_RL_ENGINE_CHILD") == "1":
    # A process of an engine imports this before vLLM, which warns while it is imported and not configured yet.
    logging.getLogger("vllm").setLevel(logging.ERROR)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
