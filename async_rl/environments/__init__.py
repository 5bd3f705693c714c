"""Environments: tasks, conversations and rewards. Importing this is cheap."""

from async_rl.environments.base import (
    Environment,
    Reward,
    RewardError,
    RewardTimeoutError,
    RolloutError,
    SingleTurn,
)
from async_rl.environments.chat import BlockingChat, Chat, ContextFullError
from async_rl.environments.rollout import make_rollout
from async_rl.environments.template import PLAIN_TEMPLATE, ChatTemplate, TemplateError

__all__ = [
    "PLAIN_TEMPLATE",
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
    "TemplateError",
    "make_rollout",
]
