"""Task: an environment made of rows and a reward function, for Python and for a config."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from typing_extensions import override

from async_rl.environments.base import SingleTurn
from async_rl.environments.offload import call_user
from async_rl.environments.rows import read_rows

Rows = Sequence[Mapping[str, Any]] | str | os.PathLike[str]


class Task(SingleTurn):
    """One question, one answer, one reward, without writing a class.

    Example::

        Task(
            rows=[{"word": "tree"}, {"word": "river"}],
            messages="Write {word} in capitals.",
            reward=lambda prompt, completion: prompt["word"].upper() in completion,
        )

    In a config the reward is ``{_target_: my_package.my_reward, _partial_: true}``.

    Args:
        rows: The training prompts: mappings, or a ``.jsonl`` or ``.parquet`` file.
        reward: ``(prompt, completion) -> number or Reward``: function, lambda, partial, callable object, sync or async.
        messages: What to ask: a ``str.format`` template over the row's keys, or ``prompt -> messages``.
        eval_rows: The evaluation prompts, as ``rows``; default: the training prompts.
        name: Name for metrics and the ledger. It is never taken from the reward, so it stays when the reward changes.

    Raises:
        RowError: a file that cannot be used.
        ValueError: the template names a key a row does not have, or ``reward`` cannot be called.
    """

    def __init__(
        self,
        rows: Rows,
        reward: Callable[[Mapping[str, Any], str], Any],
        messages: str | Callable[[Mapping[str, Any]], Sequence[Mapping[str, Any]] | str] = "{prompt}",
        eval_rows: Rows | None = None,
        name: str = "task",
    ) -> None:
        if not callable(reward):
            raise ValueError(f"{name}: reward={reward!r} cannot be called; give a function of (prompt, completion)")
        self.name = name
        self._reward = reward
        self._messages = messages
        self._train = _rows(rows)
        self._eval = self._train if eval_rows is None else _rows(eval_rows)
        if isinstance(messages, str):
            for row in [*self._train, *self._eval]:
                try:
                    messages.format_map(row)
                except (KeyError, IndexError, ValueError, AttributeError) as error:
                    raise ValueError(
                        f"{name}: messages={messages!r} cannot be filled in ({type(error).__name__}: {error}); the row "
                        f"has {', '.join(map(repr, row))}; double the braces that are meant as text"
                    ) from error

    @override
    def prompts(self, split: Literal["train", "eval"]) -> Sequence[Mapping[str, Any]]:
        return self._train if split == "train" else self._eval

    @override
    def messages(self, prompt: Mapping[str, Any]) -> Sequence[Mapping[str, Any]] | str:
        return self._messages.format_map(prompt) if isinstance(self._messages, str) else self._messages(prompt)

    @override
    async def reward(self, prompt: Mapping[str, Any], completion: str) -> Any:
        return await call_user(self._reward, prompt, completion)


def _rows(rows: Rows) -> list[dict[str, Any]]:
    if isinstance(rows, str | os.PathLike):
        return read_rows(rows)
    from omegaconf import OmegaConf

    # Rows written in a config arrive as config nodes; the ledger needs plain values.
    return [dict(OmegaConf.to_container(r, resolve=True) if OmegaConf.is_config(r) else r) for r in rows]  # type: ignore[arg-type]
