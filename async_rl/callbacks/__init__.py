"""Callbacks of asynchronous RL runs; ordinary Lightning callbacks work beside them."""

from async_rl.callbacks.base import RLCallback
from async_rl.callbacks.drain import DrainCallback
from async_rl.callbacks.empty_batch_guard import EmptyBatchGuard
from async_rl.callbacks.progress import RunProgress
from async_rl.callbacks.resume import ResumeVersionRecovery
from async_rl.callbacks.summary import RunSummary

__all__ = [
    "DrainCallback",
    "EmptyBatchGuard",
    "RLCallback",
    "ResumeVersionRecovery",
    "RunProgress",
    "RunSummary",
]
