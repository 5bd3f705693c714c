"""DecodeBatch: the requests a model decodes together and their keys and values; rows join and leave between tokens."""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import torch
from torch.nn.functional import pad
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from async_rl.engines.base import Generation, GenerationRequest
from async_rl.engines.sampling import draw
from async_rl.engines.stamps import segments_of


class Row:
    """One request while it runs.

    Args:
        request: What to sample.

    Attributes:
        token_ids: Sampled so far.
        logprobs: Of each sampled token.
        versions: Version that sampled each token.
        kv_version: Oldest version that computed a key or value of the row.
        outcome: Gets the :class:`Generation`; cancelled by whoever waits for it.
    """

    def __init__(self, request: GenerationRequest) -> None:
        self.request = request
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        self.kv_version = -1
        self.outcome: Future[Generation] = Future()
        self._random = random.Random(request.seed)

    @property
    def context(self) -> list[int]:
        """Prompt and what was sampled so far."""
        return [*self.request.prompt_token_ids, *self.token_ids]

    def uniform(self) -> float:
        """The row's next random number: a function of its seed and of how many were taken."""
        return self._random.random()

    def generation(self, finish_reason: str) -> Generation:
        """The finished result."""
        return Generation(self.token_ids, self.logprobs, segments_of(self.versions), finish_reason)


class DecodeBatch:
    """Left-padded rows that share one cache of keys and values.

    Args:
        model: A causal language model; the batch reads it at every step, so its weights may change in between.
        device: Where it runs.
    """

    def __init__(self, model: Any, device: torch.device) -> None:
        self._model = model
        self._device = device
        self.rows: list[Row] = []
        self._cache: Any = DynamicCache(config=model.config)
        self._mask = torch.zeros((0, 0), dtype=torch.long, device=device)  # [rows, width], 1 where a token is
        # Caches of sliding windows and recurrent states can't be padded; there new rows wait for the batch to end.
        self.joinable = all(type(layer) is DynamicLayer for layer in self._cache.layers)

    def add(self, rows: Sequence[Row], version: int) -> int:
        """Compute the contexts of ``rows``, sample one token for each and take them in; returns their number.

        Equal contexts (the samples of a group) are computed once.
        """
        contexts = [tuple(row.context) for row in rows]
        distinct = list(dict.fromkeys(contexts))
        width = max(map(len, distinct))
        ids = torch.tensor([[0] * (width - len(c)) + list(c) for c in distinct], device=self._device)
        mask = torch.tensor([[0] * (width - len(c)) + [1] * len(c) for c in distinct], device=self._device)
        cache: Any = DynamicCache(config=self._model.config)
        logits = self._forward(ids, mask, (mask.cumsum(-1) - 1).clamp(min=0), cache)
        places = torch.tensor([distinct.index(c) for c in contexts], device=self._device)
        if len(distinct) < len(rows):
            cache.reorder_cache(places)
        for row in rows:
            row.kv_version = version
        self._sample(rows, logits[places], version)
        if self.rows:
            self._join(cache, mask[places])
        else:
            self._cache, self._mask = cache, mask[places]
        self.rows += rows
        return len(rows)

    def step(self, version: int) -> int:
        """Sample one token for every row; returns their number."""
        ids = torch.tensor([[row.token_ids[-1]] for row in self.rows], device=self._device)
        self._mask = pad(self._mask, (0, 1), value=1)
        logits = self._forward(ids, self._mask, self._mask.sum(-1, keepdim=True) - 1, self._cache)
        self._sample(self.rows, logits, version)
        return len(self.rows)

    def keep(self, kept: Sequence[int]) -> None:
        """Drop all rows but ``kept`` (indices, increasing), and the columns that nobody needs any more."""
        if len(kept) == len(self.rows):
            return
        self.rows = [self.rows[i] for i in kept]
        if not self.rows:
            self.clear()
            return
        index = torch.tensor(kept, device=self._device)
        self._cache.reorder_cache(index)
        self._mask = self._mask[index]
        empty = int(self._mask.argmax(-1).min()) if self.joinable else 0
        if empty:
            self._mask = self._mask[:, empty:]
            for layer in self._cache.layers:
                layer.keys, layer.values = layer.keys[:, :, empty:], layer.values[:, :, empty:]

    def clear(self) -> list[Row]:
        """Forget all rows and their keys and values; returns the rows."""
        rows, self.rows = self.rows, []
        self._cache = DynamicCache(config=self._model.config)
        return rows

    def _forward(self, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, cache: Any) -> torch.Tensor:
        output = self._model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits: torch.Tensor = output.logits[:, -1]
        return logits.cpu() if logits.device.type == "mps" else logits  # no float64 there

    def _sample(self, rows: Sequence[Row], logits: torch.Tensor, version: int) -> None:
        by_sampling: dict[Any, list[int]] = {}
        for i, row in enumerate(rows):
            by_sampling.setdefault(row.request.sampling, []).append(i)
        for sampling, places in by_sampling.items():
            tokens, logprobs = draw(logits[places], sampling, [rows[i].uniform() for i in places])
            for i, token, logprob in zip(places, tokens, logprobs, strict=True):
                rows[i].token_ids.append(token)
                rows[i].logprobs.append(logprob)
                rows[i].versions.append(version)

    def _join(self, cache: Any, mask: torch.Tensor) -> None:
        """Put the rows of ``cache`` under ours, both padded on the left to the longer one."""
        width = max(self._mask.shape[1], mask.shape[1])
        ours, theirs = width - self._mask.shape[1], width - mask.shape[1]
        self._mask = torch.cat([pad(self._mask, (ours, 0)), pad(mask, (theirs, 0))])
        for mine, other in zip(self._cache.layers, cache.layers, strict=True):
            mine.keys = torch.cat([pad(mine.keys, (0, 0, ours, 0)), pad(other.keys, (0, 0, theirs, 0))])
            mine.values = torch.cat([pad(mine.values, (0, 0, ours, 0)), pad(other.values, (0, 0, theirs, 0))])
