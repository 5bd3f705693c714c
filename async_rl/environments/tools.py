"""ToolEnvironment: a model that may call tools, turn after turn, until it answers."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from async_rl.environments.base import Environment, Reward, call_reward
from async_rl.environments.budget import BudgetError
from async_rl.environments.offload import call_user
from async_rl.environments.tool import CallOutcome
from async_rl.environments.toolbox import Toolbox

if TYPE_CHECKING:
    from async_rl.environments.chat import Chat


class ToolEnvironment(Environment):
    """An environment whose model may call tools: write ``prompts``, ``messages``, ``tools`` and ``reward``.

    The model is told about the tools through its chat template, in its own format. While a turn holds calls, they are
    carried out, all those of a turn at the same time, and their results go back to it; the first turn without a call is
    its answer. When the budget is used up (``rollout.max_turns``, ``rollout.max_generated_tokens``,
    ``rollout.max_context``) the last turn is the answer, whatever it holds.

    Whatever goes wrong in a call goes back to the model as text beginning with ``Error:``: a call that can't be read,
    an unknown tool, wrong arguments, a tool that raises or takes longer than ``tool_timeout_s``. Beside the reward's
    own parts, ``tool_calls``, ``tool_errors`` and ``tool_timeouts`` are counted as parts of every reward.

    All four methods and the tools may block: they run off the event loop. Tools and ``reward`` may be ``async def``.

    Attributes:
        tool_timeout_s: Deadline of one tool call, > 0. Set it on the class or the object.

    Example::

        def multiply(a: int, b: int) -> int:
            '''Multiplies two numbers.

            Args:
                a: One number.
                b: The other.
            '''
            return a * b

        class Products(ToolEnvironment):
            tool_timeout_s = 5.0

            def prompts(self, split):
                return [{"a": a, "b": b} for a in range(100, 200) for b in range(3, 9)]

            def messages(self, prompt):
                return f"What is {prompt['a']} * {prompt['b']}? Use the tool, then answer with the number."

            def tools(self, prompt):
                return [multiply]

            def reward(self, prompt, completion, chat):
                return float(str(prompt["a"] * prompt["b"]) in completion)
    """  # noqa: D214

    tool_timeout_s: float = 30.0

    @abstractmethod
    def messages(self, prompt: Mapping[str, Any]) -> Sequence[Mapping[str, Any]] | str:
        """What the conversation begins with, as role/content messages; a string is one user message."""

    @abstractmethod
    def tools(self, prompt: Mapping[str, Any]) -> Sequence[Callable[..., Any]]:
        """The tools of one attempt: functions with type hints and a docstring that describes them and their parameters.

        Called once per attempt, so that functions or bound methods made here may share state of their own.
        """

    @abstractmethod
    def reward(
        self, prompt: Mapping[str, Any], completion: str, chat: Chat
    ) -> float | Reward | Awaitable[float | Reward]:
        """Score the attempt.

        Args:
            prompt: The task.
            completion: Text of the last turn, which is the answer.
            chat: The finished conversation, for instance ``chat.messages`` and ``chat.turns``.
        """

    @override
    async def rollout(self, prompt: Mapping[str, Any], chat: Chat) -> Reward:
        """Let the model call tools until it answers, then score.

        Raises:
            BudgetError: there was no budget for the first turn.
            RewardTimeoutError: ``reward`` took longer than ``chat.reward_timeout_s`` seconds.
        """
        toolbox = Toolbox(await call_user(self.tools, prompt), self.tool_timeout_s)
        chat.offer(toolbox.schemas)
        outcomes: Counter[CallOutcome] = Counter()
        await chat.generate(await call_user(self.messages, prompt))
        while (calls := chat.calls) and not chat.budget.exhausted:
            results = await toolbox.run(calls)
            outcomes.update(result.outcome for result in results)
            try:
                await chat.generate([result.message for result in results])
            except BudgetError:  # the results don't fit
                break
        score = await call_reward(self.reward, prompt, chat.completion, chat, timeout_s=chat.reward_timeout_s)
        reward = score if isinstance(score, Reward) else Reward(score)
        counted = {
            "tool_calls": outcomes.total(),
            "tool_errors": outcomes[CallOutcome.ERROR],
            "tool_timeouts": outcomes[CallOutcome.TIMEOUT],
        }
        return Reward(reward.value, {**counted, **reward.parts})
