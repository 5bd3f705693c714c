"""rng_state, set_rng_state: torch's, NumPy's and Python's random generators as tensors and plain values."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def rng_state() -> dict[str, Any]:
    """The state of the global generators, fit for a checkpoint that is read back without unpickling objects."""
    numpy: Any = np.random.get_state(legacy=False)
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": {
            "key": torch.from_numpy(numpy["state"]["key"].astype(np.int64)),
            "pos": int(numpy["state"]["pos"]),
            "has_gauss": int(numpy["has_gauss"]),
            "gauss": float(numpy["gauss"]),
        },
        "python": random.getstate(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Go on from a state :func:`rng_state` gave; GPUs only where there are as many as then."""
    torch.set_rng_state(state["torch"])
    numpy = state["numpy"]
    np.random.set_state(
        ("MT19937", numpy["key"].numpy().astype(np.uint32), numpy["pos"], numpy["has_gauss"], numpy["gauss"])
    )
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    if (cuda := state.get("cuda")) and torch.cuda.device_count() == len(cuda):
        torch.cuda.set_rng_state_all(cuda)
