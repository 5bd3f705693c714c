"""The order of the prompts: a pure function from a position in the run to a prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, Literal

import numpy as np

from async_rl.types import Prompt, SettingError


class PromptStream:
    """Every prompt of every environment, exactly ``epochs`` times, in an order fixed by the seed.

    The position is the group's admission number, so a resumed run continues where the record of its groups ends and
    needs no other cursor. Nothing is kept but the order of the current epoch; any position may be asked for again.

    Args:
        rows: The training rows of each environment, by the environment's name.
        epochs: Passes over the rows, ``>= 1``; ``None``: as many as are asked for.
        shuffle: Reorder the rows of all environments together, anew in every epoch; else they come as they are.
        seed: The run's seed.

    Raises:
        ValueError: If there is no row (a ``SettingError``), or ``epochs`` is below 1.

    Example:
        >>> stream = PromptStream({"sums": [{"a": 1}, {"a": 2}]}, epochs=1, shuffle=False, seed=0)
        >>> stream.at(1).id, stream.at(2)
        ('sums/0/1', None)
    """

    def __init__(
        self, rows: Mapping[str, Sequence[Mapping[str, Any]]], *, epochs: int | None, shuffle: bool, seed: int
    ) -> None:
        if epochs is not None and epochs < 1:
            raise ValueError(f"epochs={epochs} must be >= 1, or null for as many as the steps need")
        if empty := [name for name, r in rows.items() if not len(r)]:
            raise SettingError(f"environment {empty[0]!r} has no training prompts: its prompts('train') is empty")
        if not rows:
            raise ValueError("environment: no environment given, there is nothing to roll out")
        self._names = list(rows)
        self._rows = list(rows.values())
        self._ends = list(accumulate(len(r) for r in self._rows))
        self._epochs = epochs
        self._shuffle = shuffle
        self._seed = seed
        self._epoch = -1
        self._order: list[int] = []

    @property
    def total(self) -> int | None:
        """How many prompts the run has; ``None`` without an end."""
        return None if self._epochs is None else self._epochs * self._ends[-1]

    def check_fills_batch(self, batch_size: int, last_batch: Literal["drop", "train"]) -> None:
        """Refuse data that ends before its first batch is full.

        Raises:
            SettingError: If fewer prompts than ``batch_size`` will ever come and a short batch is not to be trained.
        """
        if self.total is not None and self.total < batch_size and last_batch == "drop":
            raise SettingError(
                f"{self.total} prompts (epochs={self._epochs} over {self._ends[-1]} rows) are fewer than one batch of "
                f"batch_size={batch_size} groups, so no step could be trained: lower batch_size, raise epochs, or set "
                "last_batch=train to train the short batch"
            )

    def at(self, position: int) -> Prompt | None:
        """The prompt at ``position`` (``>= 0``), or ``None`` past the end. For one thread at a time."""
        epoch, index = divmod(position, self._ends[-1])
        if self._epochs is not None and epoch >= self._epochs:
            return None
        if self._shuffle:
            if epoch != self._epoch:
                self._order = np.random.default_rng([self._seed, epoch]).permutation(self._ends[-1]).tolist()
                self._epoch = epoch
            index = self._order[index]
        which = 0
        while index >= self._ends[which]:
            which += 1
        row = index - (self._ends[which] - len(self._rows[which]))
        name = self._names[which]
        return Prompt(f"{name}/{epoch}/{row}", name, self._rows[which][row])

    def again(self, position: int) -> Prompt:
        """The prompt of a group of an earlier process.

        Raises:
            ValueError: There is none.
        """
        prompt = self.at(position)
        if prompt is None:
            raise ValueError(
                f"group {position} of the run's record has no prompt: the data or epochs changed; use a new run_dir"
            )
        return prompt
