"""Evaluations of a run: which one it owes, and how one is made: weights checked, sampled, its failures told."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from async_rl.eval_failures import report_failures
from async_rl.types import EvalBatch

if TYPE_CHECKING:
    from async_rl.trainer import AsyncRLTrainer

log = logging.getLogger(__name__)
_MADE_UP = "the evaluation at version %d was not finished: it is made up for"


def only_evaluates(trainer: AsyncRLTrainer) -> bool:
    """Where nothing is left to train: say so, and whether an evaluation is owed, for which Lightning is made to begin.

    Args:
        trainer: Before Lightning begins, the record read.
    """
    if not trainer.nothing_to_train:
        return False
    version = trainer.start_version
    owed = _is_owed(trainer, version, batches=version)
    too = f"; {_MADE_UP % version}" if owed else ""
    log.warning("nothing to train: %s%s", trainer.nothing_to_train, too)
    if owed:  # at max_steps Lightning would end before on_train_start, which sets it right again
        trainer.fit_loop.epoch_loop.max_steps = max(trainer.max_steps, version + 1)
    return owed


def evaluate_if_owed(trainer: AsyncRLTrainer) -> None:
    """Before the first batch: make the evaluation at version 0, or up for one that an earlier process did not finish.

    Args:
        trainer: In a live session that has trained nothing yet.
    """
    version = trainer.global_step
    if _is_owed(trainer, version, batches=trainer.fit_loop.total_batch_idx + 1):
        if version:
            log.info(_MADE_UP, version)
        evaluate_now(trainer)


def _is_owed(trainer: AsyncRLTrainer, version: int, batches: int) -> bool:
    """Whether an evaluation is due at the version the run goes on from, and was not finished.

    ``batches`` is how many it had until there, which is what Lightning counts for ``eval_every``.
    """
    if version in trainer.evaluated.finished:
        return False
    if trainer.evaluate_at == "ends" and (version == 0 or trainer.nothing_to_train):
        return True
    return bool(trainer.resume and version and trainer.eval_every and batches % trainer.eval_every == 0)


def evaluate_now(trainer: AsyncRLTrainer) -> None:
    """Run Lightning's validation loop outside its schedule: before a step, or after the last."""
    trainer.validating = True
    trainer.fit_loop.epoch_loop.val_loop.restarting = False  # it begins, whatever a checkpoint says of another one
    trainer.fit_loop.epoch_loop.val_loop.run()
    trainer.training = True


def evaluate(trainer: AsyncRLTrainer, poll: Callable[[], None]) -> EvalBatch:
    """Sample the evaluation prompts with the published weights; where engines do both, no load is applied meanwhile.

    The first two evaluations compare the log-probabilities of engines for evaluations alone with the policy's, as those
    of the others are compared when they serve their first versions (``parity_check``).

    Args:
        trainer: In a live session, the weights of its version published.
        poll: Called at least ten times a second; what it raises ends the evaluation.

    Raises:
        EvaluationError: no sample finished, and nothing has been trained yet that this would lose.
    """
    session, data = trainer.session, trainer.datamodule  # type: ignore[attr-defined]
    version, policy = session.published_version, trainer.lightning_module
    began_s = time.monotonic()

    def ready() -> None:
        if trainer.parity_check and session.eval_engines and len(trainer.evaluations) < 2:
            session.check_parity(session.eval_engines, policy, str(trainer.precision), version, poll)
        nonlocal began_s
        began_s = time.monotonic()

    results = session.orchestrator.evaluate(
        version, session.eval_prompts, data.eval_samples, session.eval_rollout, poll, ready
    )
    batch = EvalBatch(version, tuple(results), time.monotonic() - began_s, data.eval_pass_threshold)
    report_failures(batch, may_raise=version == 0)
    return batch
