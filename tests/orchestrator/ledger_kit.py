"""What goes into a ledger in tests, and how it is written without a thread."""

import math

from loop_kit import FakeEngine

from async_rl.orchestrator.ledger import Ledger
from async_rl.orchestrator.records import EngineSlot, Flight
from async_rl.orchestrator.version import PolicyVersion
from async_rl.types import Batch, Group, Prompt, Segment, Trajectory


def trajectory(sample=0, reward=0.5, **changes):
    values = {
        "sample_index": sample, "attempt": 1, "token_ids": [5, 49151, 7], "loss_mask": [0, 1, 1],
        "logprobs": [0.0, -0.5, math.nan], "segments": (Segment(3, 1, 2), Segment(None, 2, 3)), "prompt_length": 1,
        "reward": reward, "reward_parts": {"exact": 1.0}, "finish_reason": "length", "completion": "ä\n8", "turns": 2,
        "started_s": 1.5, "ended_s": 2.5, "starts": (0, 2),
    } | changes  # fmt: skip
    return Trajectory(**values)


def flight(group_id, version=3):
    slot = EngineSlot(1, FakeEngine(), PolicyVersion(version), drains=False)
    return Flight(group_id, prompt(group_id), version, slot, 0, None, (0, 1), {}, 2)


def prompt(group_id):
    return Prompt(f"toy/0/{group_id}", "toy", {"n": group_id, "text": "ü"})


def group(group_id, samples=2, version=3):
    return Group(group_id, prompt(group_id), version, tuple(trajectory(i) for i in range(samples)), engine=1)


def batch(version, *group_ids):
    groups = tuple(group(i) for i in group_ids)
    return Batch(version, groups, tuple((0.5, -0.5) for _ in groups), 2)


def write_kept(ledger, *group_ids):
    ledger.admit([flight(i) for i in group_ids])
    for i in group_ids:
        ledger.land([(i, t) for t in group(i).trajectories])
    ledger.keep([group(i) for i in group_ids])


def write_everything(ledger, archive=None):
    """Let the writer write what is queued, as the end of a run does, and re-open the file."""
    ledger.stop()
    ledger.run()
    ledger.close()
    return Ledger(ledger.path, archive)


def same(a, b):
    """Trajectories are equal, NaN included."""
    return repr(a) == repr(b)
