"""Packing: sequences to score become micro-batches in which every common beginning is computed once.

Samples of a group share their prompt, prompts share the chat template's opening, and short answers repeat. A row
therefore holds a *tree* of tokens: the columns of a sequence are those it shares with the one before, then its own.
Each token sees its ancestors and itself, at its own position, so its hidden state is the one it has in its sequence
alone. Where a model can't take such a mask, a row holds one sequence and padding.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class ScoredSequence:
    """A sequence and which of its tokens to score.

    Attributes:
        token_ids: The sequence.
        positions: Ascending places >= 1 of the tokens to score; what follows the last of them is not computed.
        first_token: Index of the first of them in the caller's flat list of tokens; the others follow.
    """

    token_ids: list[int]
    positions: Sequence[int] | np.ndarray
    first_token: int

    @property
    def inputs(self) -> list[int]:
        """What the model reads: the last token to score is predicted, never read."""
        return self.token_ids[: int(self.positions[-1])]


@dataclass(frozen=True, slots=True)
class PackingSettings:
    """How sequences are laid out.

    Attributes:
        micro_batch_tokens: Most tokens of a micro-batch, padding included, >= 1; a longer sequence gets one alone.
        share_prefixes: Put several sequences into a row and compute common beginnings once.
        attention_width: Row width in tokens at which attention costs as much as everything else; weighs what wider
            rows share against what their attention costs.
    """

    micro_batch_tokens: int
    share_prefixes: bool
    attention_width: float


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One forward pass.

    Attributes:
        input_ids: ``[rows, width]``, padded on the right.
        position_ids: ``[rows, width]``, 0 for padding.
        visible: Which columns each column attends to, bool ``[rows, 1, width, width]``; ``None``: all before it.
        predictors: Flat places (``row * width + column``) whose logits are taken, ascending, ``[places]``.
        predictor: Which of them predicts each token, ``[tokens]``.
        targets: Token ids to score, ``[tokens]``.
        tokens: Index of each in the caller's flat list, ``[tokens]``.
    """

    input_ids: Tensor
    position_ids: Tensor
    visible: Tensor | None
    predictors: Tensor
    predictor: Tensor
    targets: Tensor
    tokens: Tensor

    def to(self, device: torch.device) -> MicroBatch:
        """The micro-batch on a device."""
        return replace(
            self,
            input_ids=self.input_ids.to(device),
            position_ids=self.position_ids.to(device),
            visible=None if self.visible is None else self.visible.to(device),
            predictors=self.predictors.to(device),
            predictor=self.predictor.to(device),
            targets=self.targets.to(device),
            tokens=self.tokens.to(device),
        )


def pack(sequences: Iterable[ScoredSequence], settings: PackingSettings) -> list[MicroBatch]:
    """Lay sequences out in micro-batches, widest rows first; every token to score is in exactly one of them.

    Args:
        sequences: What to score; those without a token to score are left out.
        settings: How.

    Returns:
        Micro-batches on the CPU.
    """
    chosen = [s for s in sequences if len(s.positions)]
    if not chosen:
        return []
    rows = _shared_rows(chosen, settings) if settings.share_prefixes else [_row([s]) for s in chosen]
    return [_micro_batch([rows[i] for i in part]) for part in _split([row.width for row in rows], settings)]


@dataclass(slots=True)
class _Row:
    """A row being filled: a tree of tokens, parents before children."""

    token_ids: list[int] = field(default_factory=list)
    position_ids: list[int] = field(default_factory=list)
    blocks: list[tuple[np.ndarray, int, int]] = field(default_factory=list)  # ancestors' columns, own columns from, to
    last_ids: list[int] = field(default_factory=list)
    last_columns: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    columns: list[np.ndarray] = field(default_factory=list)  # of the predictor of each token to score, per sequence
    targets: list[np.ndarray] = field(default_factory=list)
    tokens: list[np.ndarray] = field(default_factory=list)

    @property
    def width(self) -> int:
        return len(self.token_ids)

    @property
    def is_chain(self) -> bool:
        """Whether every token sees all tokens before it, as plain causal attention has it."""
        return all(len(ancestors) == start for ancestors, start, _ in self.blocks)

    def add(self, sequence: ScoredSequence) -> None:
        inputs = sequence.inputs
        shared, start = _common(self.last_ids, inputs), self.width
        own = len(inputs) - shared
        ancestors = self.last_columns[:shared]
        columns = np.concatenate([ancestors, np.arange(start, start + own)])
        self.token_ids.extend(inputs[shared:])
        self.position_ids.extend(range(shared, len(inputs)))
        if own:
            self.blocks.append((ancestors, start, start + own))
        self.last_ids, self.last_columns = inputs, columns
        positions = np.asarray(sequence.positions, dtype=np.int64)
        self.columns.append(columns[positions - 1])
        self.targets.append(np.asarray(sequence.token_ids, dtype=np.int64)[positions])
        self.tokens.append(np.arange(sequence.first_token, sequence.first_token + len(positions)))


def _row(sequences: Sequence[ScoredSequence]) -> _Row:
    row = _Row()
    for sequence in sequences:
        row.add(sequence)
    return row


def _common(a: list[int], b: list[int]) -> int:
    """Tokens at the beginning of both."""
    count = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        count += 1
    return count


def _shared_rows(sequences: list[ScoredSequence], settings: PackingSettings) -> list[_Row]:
    """Rows of sequences that share beginnings, cut at the width that is estimated to be cheapest."""
    # In lexicographic order a sequence shares most with the one before it.
    ordered = sorted(sequences, key=lambda s: s.inputs)
    lengths = [len(s.inputs) for s in ordered]
    shared = [0, *(_common(a.inputs, b.inputs) for a, b in pairwise(ordered))]
    narrowest, widest = max(lengths), sum(lengths) - sum(shared)
    limit, limits = float(narrowest), []
    while limit < min(widest, settings.micro_batch_tokens):
        limits.append(limit)
        limit *= 1.1
    limits.append(max(narrowest, min(widest, settings.micro_batch_tokens)))
    cuts = [_cut(lengths, shared, limit) for limit in limits]
    best = min(cuts, key=lambda cut: _cost([width for _, _, width in cut], settings))
    return [_row(ordered[start:stop]) for start, stop, _ in best]


def _cut(lengths: list[int], shared: list[int], limit: float) -> list[tuple[int, int, int]]:
    """Fill rows in order up to a width; each as (first sequence, behind the last, width)."""
    rows: list[tuple[int, int, int]] = []
    for i, (length, common) in enumerate(zip(lengths, shared, strict=True)):
        if rows and rows[-1][2] + length - common <= limit:
            start, _, width = rows[-1]
            rows[-1] = (start, i + 1, width + length - common)
        else:
            rows.append((i, i + 1, length))
    return rows


def _split(widths: list[int], settings: PackingSettings) -> list[list[int]]:
    """Indices of the rows of each micro-batch, widest first."""
    parts: list[list[int]] = []
    for i in sorted(range(len(widths)), key=lambda i: -widths[i]):
        if parts and (len(parts[-1]) + 1) * widths[parts[-1][0]] <= settings.micro_batch_tokens:
            parts[-1].append(i)
        else:
            parts.append([i])
    return parts


def _cost(widths: list[int], settings: PackingSettings) -> float:
    """Time of rows in units of one token's, padding and attention included."""
    padded = [(len(part), widths[part[0]]) for part in _split(widths, settings)]
    return sum(rows * width * (1.0 + width / settings.attention_width) for rows, width in padded)


def _micro_batch(rows: list[_Row]) -> MicroBatch:
    width = rows[0].width
    input_ids = np.zeros((len(rows), width), dtype=np.int64)
    position_ids = np.zeros((len(rows), width), dtype=np.int64)
    columns: list[np.ndarray] = []
    targets: list[np.ndarray] = []
    tokens: list[np.ndarray] = []
    for r, row in enumerate(rows):
        input_ids[r, : row.width] = row.token_ids
        position_ids[r, : row.width] = row.position_ids
        columns.extend(c + r * width for c in row.columns)
        targets.extend(row.targets)
        tokens.extend(row.tokens)
    predictors, predictor = torch.from_numpy(np.concatenate(columns)).unique(return_inverse=True)
    return MicroBatch(
        input_ids=torch.from_numpy(input_ids),
        position_ids=torch.from_numpy(position_ids),
        visible=None if all(row.is_chain for row in rows) else torch.from_numpy(_visible(rows, width)),
        predictors=predictors,
        predictor=predictor,
        targets=torch.from_numpy(np.concatenate(targets)),
        tokens=torch.from_numpy(np.concatenate(tokens)),
    )


def _visible(rows: list[_Row], width: int) -> np.ndarray:
    visible = np.zeros((len(rows), 1, width, width), dtype=bool)
    for r, row in enumerate(rows):
        for ancestors, start, stop in row.blocks:
            visible[r, 0, start:stop, ancestors] = True
            visible[r, 0, start:stop, start:stop] = np.tri(stop - start, dtype=bool)
        padding = np.arange(row.width, width)
        visible[r, 0, padding, padding] = True  # a query that sees nothing would be NaN
    return visible
