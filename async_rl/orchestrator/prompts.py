"""The order of the prompts: a pure function from a position in the run to a prompt."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from fractions import Fraction
from itertools import accumulate, pairwise
from typing import Any, Literal

import numpy as np

from async_rl.types import Prompt, SettingError

_SMALLEST_SHARE = Fraction(1, 10_000)


class Mixture:
    """Which environment each position goes to, for given shares; a pure function of the position.

    Positions come in blocks, in which every environment gets a whole number of places: after any number of blocks, none
    has had more than one place more or less than its share.

    Args:
        weights: The environments' weights by name, each ``> 0``; only their proportions matter.
        shuffle: Order the places of a block by ``seed``; else they are spread evenly.
        seed: The run's seed.

    Raises:
        SettingError: A weight is no number above 0, or too small beside the others.

    Example:
        >>> mixture = Mixture({"sums": 3, "facts": 1}, shuffle=False, seed=0)
        >>> [mixture.at(i) for i in range(8)]
        [(0, 0), (0, 1), (1, 0), (0, 2), (0, 3), (0, 4), (1, 1), (0, 5)]
    """

    def __init__(self, weights: Mapping[str, float], *, shuffle: bool, seed: int) -> None:
        for name, weight in weights.items():
            if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < math.inf:
                raise SettingError(
                    f"mixture.{name}={weight!r}: a weight must be a number > 0; leave out the environment?"
                )
        exact = [Fraction(str(weight)) for weight in weights.values()]
        shares = [weight / sum(exact) for weight in exact]
        if min(shares) < _SMALLEST_SHARE:
            name = list(weights)[shares.index(min(shares))]
            raise SettingError(
                f"mixture.{name}={weights[name]!r} is less than 1/10000 of the sum; leave the environment out"
            )
        # Rounding both ends of its stretch, an environment gets more than length * share - 2 places of any block.
        self._block = math.ceil(2 / min(shares))
        self._bounds = [Fraction(0), *accumulate(shares)]
        self._shuffle = shuffle
        self._seed = seed
        self._number = -1
        self._places: list[int] = []
        self._rank: list[int] = []
        self._before: list[int] = []

    def at(self, position: int) -> tuple[int, int]:
        """The index of the environment at ``position``, and how many positions before went there, too."""
        number, place = divmod(position, self._block)
        if number != self._number:
            self._lay_out(number)
        which = self._places[place]
        return which, self._before[which] + self._rank[place]

    def _lay_out(self, number: int) -> None:
        before, after = self._counts(number), self._counts(number + 1)
        counts = [b - a for a, b in zip(before, after, strict=True)]
        spread = sorted(((i + 0.5) / count, which) for which, count in enumerate(counts) for i in range(count))
        places = [which for _, which in spread]
        if self._shuffle:
            places = np.random.default_rng([self._seed, number]).permutation(places).tolist()
        seen = [0] * len(counts)
        self._rank = []
        for which in places:
            self._rank.append(seen[which])
            seen[which] += 1
        self._places, self._before, self._number = places, before, number

    def _counts(self, blocks: int) -> list[int]:
        """Places each environment has had after so many blocks."""
        ends = [math.floor(bound * blocks * self._block + Fraction(1, 2)) for bound in self._bounds]
        return [end - start for start, end in pairwise(ends)]


class PromptStream:
    """Every prompt of every environment, exactly ``epochs`` times or as a mixture asks, in an order fixed by the seed.

    The position is the group's admission number, so a resumed run continues where the record of its groups ends and
    needs no other cursor. Nothing is kept but the order of the current epoch; any position may be asked for again.

    Args:
        rows: The training rows of each environment, by the environment's name.
        epochs: Passes over the rows, ``>= 1``; ``None``: as many as are asked for.
        shuffle: Reorder the rows of all environments together, anew in every epoch; else they come as they are.
        seed: The run's seed.
        mixture: The weight of each environment, by name; its rows are then gone through as often as the weight asks.
            ``None``: all rows alike. Not with ``epochs``.

    Raises:
        ValueError: If there is no row (a ``SettingError``), ``epochs`` is below 1, or the mixture does not fit.

    Example:
        >>> stream = PromptStream({"sums": [{"a": 1}, {"a": 2}]}, epochs=1, shuffle=False, seed=0)
        >>> stream.at(1).id, stream.at(2)
        ('sums/0/1', None)
    """

    def __init__(
        self,
        rows: Mapping[str, Sequence[Mapping[str, Any]]],
        *,
        epochs: int | None,
        shuffle: bool,
        seed: int,
        mixture: Mapping[str, float] | None = None,
    ) -> None:
        if epochs is not None and epochs < 1:
            raise ValueError(f"epochs={epochs} must be >= 1, or null for as many as the steps need")
        if empty := [name for name, r in rows.items() if not len(r)]:
            raise SettingError(f"environment {empty[0]!r} has no training prompts: its prompts('train') is empty")
        if not rows:
            raise ValueError("environment: no environment given, there is nothing to roll out")
        if mixture is not None:
            check_mixture(mixture, rows, epochs)
        self._names = list(rows)
        self._rows = list(rows.values())
        self._mixture = None
        self._sizes = [sum(len(r) for r in self._rows)]  # of what has epochs: everything together, or each by itself
        if mixture is not None:
            self._mixture = Mixture({name: mixture[name] for name in rows}, shuffle=shuffle, seed=seed)
            self._sizes = [len(r) for r in self._rows]
        self._epochs = epochs
        self._shuffle = shuffle
        self._seed = seed
        self._orders: dict[int, tuple[int, list[int]]] = {}

    @property
    def total(self) -> int | None:
        """How many prompts the run has; ``None`` without an end."""
        return None if self._epochs is None else self._epochs * self._sizes[0]

    def check_fills_batch(self, batch_size: int, last_batch: Literal["drop", "train"]) -> None:
        """Refuse data that ends before its first batch is full.

        Raises:
            SettingError: If fewer prompts than ``batch_size`` will ever come and a short batch is not to be trained.
        """
        if self.total is not None and self.total < batch_size and last_batch == "drop":
            raise SettingError(
                f"{self.total} prompts (epochs={self._epochs} over {self._sizes[0]} rows) are fewer than one batch of "
                f"batch_size={batch_size} groups, so no step could be trained: lower batch_size, raise epochs, or set "
                "last_batch=train to train the short batch"
            )

    def at(self, position: int) -> Prompt | None:
        """The prompt at ``position`` (``>= 0``), or ``None`` past the end. For one thread at a time."""
        pool, index = (0, position) if self._mixture is None else self._mixture.at(position)
        size = self._sizes[pool]
        epoch, index = divmod(index, size)
        if self._epochs is not None and epoch >= self._epochs:
            return None
        if self._shuffle:
            index = self._order(pool, epoch)[index]
        which = pool
        while index >= len(self._rows[which]):
            index -= len(self._rows[which])
            which += 1
        name = self._names[which]
        return Prompt(f"{name}/{epoch}/{index}", name, self._rows[which][index])

    def _order(self, pool: int, epoch: int) -> list[int]:
        """The order of a pool's rows in an epoch; that of the latest one is kept."""
        if self._orders.get(pool, (-1,))[0] != epoch:
            key = [self._seed, epoch] if self._mixture is None else [self._seed, epoch, pool + 1]
            self._orders[pool] = epoch, np.random.default_rng(key).permutation(self._sizes[pool]).tolist()
        return self._orders[pool][1]

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


def check_mixture(mixture: Mapping[str, float], environments: Collection[str], epochs: int | None) -> None:
    """Refuse a mixture that does not fit the environments.

    Raises:
        SettingError: It names others, leaves one out, or comes with ``epochs``.
    """
    if unknown := [name for name in mixture if name not in environments]:
        raise SettingError(f"mixture.{unknown[0]}: there is no such environment; there are {', '.join(environments)}")
    if missing := [name for name in environments if name not in mixture]:
        raise SettingError(f"mixture: has no weight for the environment {missing[0]}; give it one, or leave it out")
    if epochs is not None:
        raise SettingError(
            f"mixture with epochs={epochs}: either each prompt comes {epochs} times or each environment has its share; "
            "leave out one of them"
        )
