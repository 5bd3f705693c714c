"""fingerprint: what gives the data of a run its meaning, as plain values that a later process can compare."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from async_rl.datamodule import RolloutDataModule
    from async_rl.policy import PolicyModule


def fingerprint(policy: PolicyModule, data: RolloutDataModule, seed: int) -> dict[str, Any]:
    """Values by key, named as in the config (see :mod:`async_rl.resume_rules`); every training row is read once.

    Args:
        policy: Its vocabulary says what tokens mean, its weights' shapes what a checkpoint fits.
        data: After ``setup``.
        seed: The run's, which orders prompts and samples.
    """
    return {
        "model.weights": _digest((name, list(tensor.shape)) for name, tensor in policy.named_weights()),
        "model.vocabulary": vocabulary(policy),
        "environment": {name: f"{len(rows)} prompts, {_digest(rows)}" for name, rows in data.train_rows.items()},
        "batch_size": data.batch_size,
        "group_size": data.group_size,
        "seed": seed,
        "rollout.epochs": data.epochs,
        "rollout.shuffle": data.shuffle,
        "rollout.mixture": None if data.mixture is None else dict(data.mixture),
        "rollout.sampling.temperature": data.sampling.temperature,
    }


def vocabulary(policy: PolicyModule) -> str:
    """Digest of the tokenizer's vocabulary."""
    return _digest(sorted(policy.tokenizer.get_vocab().items()))


def _digest(items: Iterable[Any]) -> str:
    digest = hashlib.sha256()
    for item in items:
        row = dict(item) if isinstance(item, Mapping) else item
        digest.update(json.dumps(row, default=_stable, skipkeys=True).encode())
    return f"sha256 {digest.hexdigest()[:16]}"


def _stable(value: Any) -> Any:
    """What stands for a value JSON does not know: the same in every process, so never an address."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, bytes | bytearray):
        return hashlib.sha256(value).hexdigest()
    if callable(to_list := getattr(value, "tolist", None)):  # NumPy and torch
        return to_list()
    return type(value).__name__
