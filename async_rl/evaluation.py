"""One evaluation of a run: the newest weights, checked where they are served first, sampled, its failures told."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from async_rl.eval_failures import report_failures
from async_rl.types import EvalBatch

if TYPE_CHECKING:
    from async_rl.trainer import AsyncRLTrainer


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
