"""Environments: tasks, conversations and rewards. Importing this is cheap."""

from async_rl.environments.arithmetic import Arithmetic
from async_rl.environments.base import (
    Environment,
    Reward,
    RewardError,
    RewardTimeoutError,
    RolloutError,
    SingleTurn,
    ToolError,
)
from async_rl.environments.blocking_chat import BlockingChat
from async_rl.environments.budget import BudgetError, BudgetLimits, ChatBudget, ContextFullError
from async_rl.environments.calculator import Calculator
from async_rl.environments.chat import Chat
from async_rl.environments.functional import Task
from async_rl.environments.gsm8k import GSM8K
from async_rl.environments.math_answers import Math, MathAnswers
from async_rl.environments.reasoning_gym import ReasoningGym
from async_rl.environments.rollout import make_rollout
from async_rl.environments.rubric import Rubric
from async_rl.environments.template import PLAIN_TEMPLATE, ChatTemplate, TemplateError, TemplateRewriteError
from async_rl.environments.tool_calls import ToolCall
from async_rl.environments.tools import ToolEnvironment

__all__ = [
    "GSM8K",
    "PLAIN_TEMPLATE",
    "Arithmetic",
    "BlockingChat",
    "BudgetError",
    "BudgetLimits",
    "Calculator",
    "Chat",
    "ChatBudget",
    "ChatTemplate",
    "ContextFullError",
    "Environment",
    "Math",
    "MathAnswers",
    "ReasoningGym",
    "Reward",
    "RewardError",
    "RewardTimeoutError",
    "RolloutError",
    "Rubric",
    "SingleTurn",
    "Task",
    "TemplateError",
    "TemplateRewriteError",
    "ToolCall",
    "ToolEnvironment",
    "ToolError",
    "make_rollout",
]
