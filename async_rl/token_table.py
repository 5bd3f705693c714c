"""TokenTable: the trainable tokens of a batch as flat tensors, and the check that none of them is too old."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from async_rl.types import Batch, Group, Trajectory

NO_STAMP = -1


class StalenessError(RuntimeError):
    """A token about to be trained breaks the age bound: a bug, never a matter of luck. Names the group."""


@dataclass(frozen=True, slots=True)
class TokenTable:
    """Every token the loss takes, trajectory by trajectory, in the batch's order.

    Attributes:
        names: Of each trajectory, for messages: ``"<prompt id>#<sample index>"``.
        token_ids: Of each context (of each trajectory, unless the chat template rewrote its turns), all of them.
        positions: Where in its context each trainable token is, one array per context.
        lengths: Trainable tokens of each trajectory, int64 ``[trajectories]``.
        sequence: Which trajectory each token belongs to, int64 ``[tokens]``.
        behaviour: Behaviour log-probabilities, float32 ``[tokens]``; NaN where the engine gave none.
        advantages: float32 ``[tokens]``.
        stamps: Version that sampled each token, int64 ``[tokens]``; ``NO_STAMP`` where replayed or external.
        version: The version being trained.
    """

    names: tuple[str, ...]
    token_ids: tuple[list[int], ...]
    positions: tuple[np.ndarray, ...]
    lengths: Tensor
    sequence: Tensor
    behaviour: Tensor
    advantages: Tensor
    stamps: Tensor
    version: int

    @staticmethod
    def of(batch: Batch) -> TokenTable:
        """The table of a batch.

        Raises:
            ValueError: a trajectory's lists differ in length, its contexts are out of order, or the first token of one,
                which nothing predicts, is trainable.
        """
        names, token_ids, positions, lengths = [], [], [], []
        behaviour, advantages, stamps = [np.empty(0)], [np.empty(0)], [np.empty(0, dtype=np.int64)]
        for group, group_advantages in zip(batch.groups, batch.advantages, strict=True):
            for trajectory, advantage in zip(group.trajectories, group_advantages, strict=True):
                name = name_of(group, trajectory)
                trained = _trainable_positions(name, trajectory)
                names.append(name)
                lengths.append(len(trained))
                for start, stop in pairwise((*trajectory.starts, len(trajectory.token_ids))):
                    token_ids.append(trajectory.token_ids[start:stop])
                    positions.append(trained[(trained >= start) & (trained < stop)] - start)
                behaviour.append(np.array(trajectory.logprobs, dtype=np.float64)[trained])
                advantages.append(np.full(len(trained), advantage, dtype=np.float64))
                stamps.append(_stamps(trajectory)[trained])
        of_trajectory = torch.tensor(lengths, dtype=torch.int64)
        return TokenTable(
            names=tuple(names),
            token_ids=tuple(token_ids),
            positions=tuple(positions),
            lengths=of_trajectory,
            sequence=torch.repeat_interleave(torch.arange(len(lengths)), of_trajectory),
            behaviour=torch.from_numpy(np.concatenate(behaviour)).float(),
            advantages=torch.from_numpy(np.concatenate(advantages)).float(),
            stamps=torch.from_numpy(np.concatenate(stamps)),
            version=batch.version,
        )

    def __len__(self) -> int:
        return len(self.sequence)

    @property
    def ages(self) -> Tensor:
        """Version being trained minus each token's, int64 ``[tokens]``; ``NO_STAMP`` where it has none."""
        return torch.where(self.stamps == NO_STAMP, NO_STAMP, self.version - self.stamps)

    def check_ages(self, max_staleness: int) -> None:
        """Check promise 1: no stamped token is older than ``max_staleness``, and none is from the future.

        Raises:
            StalenessError: names the worst offender.
        """
        stamped = self.stamps != NO_STAMP
        ages = self.version - self.stamps
        for bad, what in ((stamped & (ages > max_staleness), "older than"), (stamped & (ages < 0), "newer than")):
            if bool(bad.any()):
                worst = int(torch.where(bad, ages.abs(), -1).argmax())
                allowed = f"max_staleness={max_staleness} allows" if what == "older than" else "is possible"
                raise StalenessError(
                    f"training version {self.version}: {self.names[int(self.sequence[worst])]} holds {int(bad.sum())} "
                    f"tokens or more {what} {allowed} (one sampled by version {int(self.stamps[worst])}); "
                    "batch formation has a bug, nothing was trained on it"
                )


def name_of(group: Group, trajectory: Trajectory) -> str:
    """Name of a trajectory in messages."""
    return f"{group.prompt.id}#{trajectory.sample_index}"


def _trainable_positions(name: str, trajectory: Trajectory) -> np.ndarray:
    sizes = {len(trajectory.token_ids), len(trajectory.loss_mask), len(trajectory.logprobs)}
    if len(sizes) > 1:
        raise ValueError(
            f"{name}: {len(trajectory.token_ids)} token_ids, {len(trajectory.loss_mask)} loss_mask and "
            f"{len(trajectory.logprobs)} logprobs entries; each token needs one of each"
        )
    starts = trajectory.starts
    if starts[:1] != (0,) or any(a >= b for a, b in pairwise((*starts, max(len(trajectory.token_ids), 1)))):
        raise ValueError(
            f"{name}: starts={starts} must begin with 0 and ascend below the {len(trajectory.token_ids)} token_ids"
        )
    trained = np.flatnonzero(np.array(trajectory.loss_mask, dtype=bool))
    if first := [start for start in starts if start in trained]:
        raise ValueError(
            f"{name}: loss_mask[{first[0]}] is 1, but nothing comes before a context's first token to predict it from"
        )
    return trained


def _stamps(trajectory: Trajectory) -> np.ndarray:
    stamps = np.full(len(trajectory.token_ids), NO_STAMP, dtype=np.int64)
    for segment in trajectory.segments:
        if segment.version is not None:
            stamps[segment.start : segment.end] = segment.version
    return stamps
