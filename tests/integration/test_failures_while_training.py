"""What breaks in the background while a step is trained ends the run before its update (promise 7)."""

import itertools
import threading
import time

import pytest
import torch
from fit_kit import RewardBySeed, make_data, make_policy, make_trainer, outcomes


class LostError(RuntimeError):
    fatal = True


class BreaksLater(RewardBySeed):
    """Rollouts wait from the ``n``-th on, and break the thread they run on when told to."""

    def __init__(self, n):
        super().__init__()
        self.numbers = itertools.count()
        self.n = n
        self.broken = threading.Event()

    def reward(self, prompt, completion):
        if next(self.numbers) >= self.n:
            assert self.broken.wait(30)
            raise LostError("the judge is gone")
        return super().reward(prompt, completion)


def test_a_thread_that_breaks_during_a_step_ends_the_run_before_the_update(tiny_model_dir, tmp_path):
    environment = BreaksLater(3 * 2 * 2)  # enough for three steps
    policy, trainer = make_policy(tiny_model_dir), make_trainer(tmp_path, max_steps=9)
    train, before = policy.training_step, []

    def training_step(batch, batch_idx):
        if batch.version == 2:
            before.extend(p.detach().clone() for p in policy.parameters())
            environment.broken.set()
            deadline_s = time.monotonic() + 20
            while time.monotonic() < deadline_s:
                try:
                    trainer.orchestrator.check()
                except LostError:
                    break
                time.sleep(0.005)
        train(batch, batch_idx)

    policy.training_step = training_step
    with pytest.raises(LostError, match="the judge is gone"):
        trainer.fit(policy, datamodule=make_data(environment))
    assert before
    assert trainer.global_step == 2
    assert all(torch.equal(a, b) for a, b in zip(before, policy.parameters(), strict=True))
    assert trainer.end.exit_code == 1
    assert trainer.end.reason == "LostError: the judge is gone"
    assert outcomes(tmp_path)["trained"] == 4
    assert set(outcomes(tmp_path)) == {"trained", "saved", "failed"}
