"""Environments: tasks, conversations and rewards. Importing this is cheap."""

from async_rl.environments.arithmetic import Arithmetic
from async_rl.environments.base import (
    Environment,
    Reward,
    RewardError,
    RewardTimeoutError,
    RolloutError,
    SingleTurn,
)
from async_rl.environments.chat import BlockingChat, Chat, ContextFullError
from async_rl.environments.functional import Task
from async_rl.environments.gsm8k import GSM8K
from async_rl.environments.rollout import make_rollout
from async_rl.environments.template import PLAIN_TEMPLATE, ChatTemplate, TemplateError

__all__ = [
    "GSM8K",
    "PLAIN_TEMPLATE",
    "Arithmetic",
    "BlockingChat",
    "Chat",
    "ChatTemplate",
    "ContextFullError",
    "Environment",
    "Reward",
    "RewardError",
    "RewardTimeoutError",
    "RolloutError",
    "SingleTurn",
    "Task",
    "TemplateError",
    "make_rollout",
]
