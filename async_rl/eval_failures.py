"""What is said aloud about an evaluation whose samples failed, and when that ends the run."""

from __future__ import annotations

import logging
from collections import Counter

from async_rl.types import EvalBatch, RunError

log = logging.getLogger(__name__)


class EvaluationError(RunError):
    """An evaluation of which no sample finished; says with what they failed."""


def report_failures(batch: EvalBatch, *, may_raise: bool) -> None:
    """Log how many samples of an evaluation failed and why, at level debug with a traceback; nothing if none did.

    Args:
        batch: The evaluation.
        may_raise: Whether one of which no sample finished is an error of the run. That is right before the first step,
            when nothing is lost; later it would throw away what was trained, and is an error in the log instead.

    Raises:
        EvaluationError: no sample finished, and ``may_raise``; its cause is what the first one failed with.
    """
    failures = batch.failures
    finished = sum(len(result.trajectories) for result in batch.results)
    if not batch.results:
        log.warning(
            "evaluation at version %d: the environments have no prompts for it (split 'eval'), nothing was measured; "
            "give them some, or set run.evaluation.at=never",
            batch.version,
        )
    if not failures:
        return
    reasons = Counter(failure.partition(":")[0] for failure in failures)
    what = (
        f"evaluation at version {batch.version}: {len(failures)} of {finished + len(failures)} samples failed ("
        + ", ".join(f"{reason} {n}x" for reason, n in reasons.most_common(5))
        + f"); the first one with {failures[0]}"
    )
    if may_raise and not finished:
        raise EvaluationError(
            f"{what}. None finished, so there is nothing to measure; see rollout.* and environment.*"
        ) from batch.first_error
    log.debug("the first failed sample of the evaluation", exc_info=batch.first_error)
    if finished:
        log.warning("%s. They are not in the mean reward; reward_lower_bound counts them as 0", what)
    else:
        log.error("%s. None finished: this evaluation measured nothing, its mean reward is not a number", what)
