"""Advantages and losses: pure functions of tensors, and the classes a config names."""

from async_rl.algorithms.advantages import GRPO, RLOO, AdvantageFn, BatchNormalised, DrGRPO
from async_rl.algorithms.losses import DecoupledPPOLoss, PolicyLoss

__all__ = ["GRPO", "RLOO", "AdvantageFn", "BatchNormalised", "DecoupledPPOLoss", "DrGRPO", "PolicyLoss"]
