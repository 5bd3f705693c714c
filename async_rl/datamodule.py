"""RolloutDataModule: environments and engines in, one planned batch per training step out."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from lightning.pytorch import LightningDataModule
from typing_extensions import override

from async_rl.arguments import refuse_impossible, refuse_other
from async_rl.engines.base import Engine, SamplingParams
from async_rl.environments.base import Environment, by_name, rows_of
from async_rl.environments.budget import BudgetLimits
from async_rl.orchestrator.prompts import PromptStream
from async_rl.types import Batch, Prompt

if TYPE_CHECKING:
    from async_rl.trainer import AsyncRLTrainer
    from async_rl.types import EvalBatch


def _list_of(engine: Engine | Sequence[Engine] | None) -> list[Engine]:
    if engine is None:
        return []
    return list(engine) if isinstance(engine, Sequence) else [engine]


def _checked(environment: Environment | Mapping[str, Environment]) -> dict[str, Environment]:
    """The environments by name, if they are some."""
    if not isinstance(environment, Mapping):
        refuse_other("RolloutDataModule", "environment", environment, Environment)
        return by_name(environment)
    for name, one in environment.items():
        refuse_other("RolloutDataModule", f"environment[{name!r}]", one, Environment)
    return by_name(environment)


class BatchFeed:
    """The training loader: asks the trainer for the next planned batch.

    It has a (huge) length because Lightning fetches a loader without one a batch ahead, and the batch after this one
    must be planned only when this one was trained.
    """

    def __init__(self, trainer: AsyncRLTrainer) -> None:
        self._trainer = trainer

    def __len__(self) -> int:
        return sys.maxsize

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        return self._trainer.next_batch()

    def state_dict(self) -> dict[str, Any]:
        """Nothing: the position in the data is the orchestrator's, saved with the checkpoint and in the ledger."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to restore; having it tells Lightning that a resume mid-epoch is safe."""


class EvalFeed:
    """The validation loader: one item, the finished evaluation; none where the run is stopped meanwhile."""

    def __init__(self, trainer: AsyncRLTrainer) -> None:
        self._trainer = trainer
        self._asked = False

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[EvalBatch]:
        self._asked = False
        return self

    def __next__(self) -> EvalBatch:
        # No generator: a run that is stopped says so with a StopIteration, which a generator turns into an error.
        if self._asked:
            raise StopIteration
        self._asked = True
        return self._trainer.run_evaluation()


class RolloutDataModule(LightningDataModule):
    """Feeds rollouts to :class:`~async_rl.trainer.AsyncRLTrainer`, one batch of groups per policy version.

    Args:
        environment: One environment, or several by name.
        engine: One engine, or several colocated ones.
        batch_size: Groups per training step (B), >= 1.
        group_size: Trajectories per group (G), >= 1.
        max_concurrent: Trajectories in flight at most (C); default ``(W + 1) * B * G``.
        sampling: How training rollouts are sampled.
        eval_sampling: How evaluation is sampled; default: as training.
        eval_samples: Samples per evaluation prompt, >= 1.
        eval_limit: Evaluate on the first so many prompts of the split; default all.
        eval_pass_threshold: Least reward with which a sample passes, for pass@k.
        eval_engine: One engine, or several, for evaluations alone, so that rollouts go on meanwhile; they load only the
            versions that are evaluated. Default: evaluations are sampled by ``engine``.
        epochs: Passes over the prompts; default: as many as the steps need.
        shuffle: Reorder the prompts every epoch (by the run's seed).
        mixture: With several environments, the weight of each in the training prompts, by name: ``{"a": 3, "b": 1}``;
            default: in proportion to their prompts. Not with ``epochs``.
        last_batch: What happens to a last batch with fewer than ``batch_size`` groups: ``"drop"`` or ``"train"``.
        group_completion: ``"all"``, or ``"quorum"`` to go on without stragglers.
        min_group_size: Trajectories that make a quorum.
        straggler_timeout_s: Seconds a quorum waits for the rest.
        max_retries: Attempts after the first for a failed trajectory, >= 0.
        max_failures: Failed attempts in a row that are put up with, >= 0; one more ends the run.
        rollout_timeout_s: Deadline of one attempt.
        reward_timeout_s: Deadline of one reward call.
        max_turns: Most model turns of one trajectory, >= 1; default: no limit.
        max_generated_tokens: Most sampled tokens of one trajectory, over all its turns, >= 1; default: no limit.
        max_context: Most tokens the model sees at once, those it samples included; default: the engine's limit.
        template_rewrite: Where the chat template rewrites earlier turns (drops their thinking, for instance), fail the
            attempt (``"refuse"``), or go on in a fresh context that is trained as its own sequence (``"split"``).
        rollout_threads: Event loops that run rollouts, >= 1.
        filter_zero_variance: End groups whose rewards are all equal as filtered; they carry no signal.
        load_timeout_s: Deadline of one weight load.
        max_engine_restarts: How often engines whose process died are started again in a run, >= 0; one more death ends
            it.
        forward_backward_batch: At ``max_staleness=0``, train complete groups while others of their batch still run:
            ``"auto"`` (where advantages are group-centred), ``"off"``, or how much has to be complete, of which either
            is enough: ``{"min_sequences": 64, "min_tokens": 131072}``.

    Raises:
        TypeError: what is given as an environment is none.
        ValueError: a value is impossible, or two engines share a name; names the argument and what is possible.
    """

    def __init__(
        self,
        environment: Environment | Mapping[str, Environment],
        engine: Engine | Sequence[Engine],
        *,
        batch_size: int = 8,
        group_size: int = 8,
        max_concurrent: int | None = None,
        sampling: SamplingParams | None = None,
        eval_sampling: SamplingParams | None = None,
        eval_samples: int = 4,
        eval_limit: int | None = None,
        eval_pass_threshold: float = 1.0,
        eval_engine: Engine | Sequence[Engine] | None = None,
        epochs: int | None = None,
        shuffle: bool = True,
        mixture: Mapping[str, float] | None = None,
        last_batch: Literal["drop", "train"] = "drop",
        group_completion: Literal["all", "quorum"] = "all",
        min_group_size: int | None = None,
        straggler_timeout_s: float | None = None,
        max_retries: int = 2,
        max_failures: int = 16,
        rollout_timeout_s: float = 600.0,
        reward_timeout_s: float = 60.0,
        max_turns: int | None = None,
        max_generated_tokens: int | None = None,
        max_context: int | None = None,
        template_rewrite: Literal["refuse", "split"] = "refuse",
        rollout_threads: int = 2,
        filter_zero_variance: bool = False,
        load_timeout_s: float = 120.0,
        max_engine_restarts: int = 3,
        forward_backward_batch: Literal["auto", "off"] | Mapping[str, Any] = "auto",
    ) -> None:
        refuse_impossible("RolloutDataModule", locals())
        super().__init__()
        self.environments = _checked(environment)
        self.engines = _list_of(engine)
        self.eval_engines = _list_of(eval_engine)
        if twice := {e.name for e in self.engines} & {e.name for e in self.eval_engines}:
            raise ValueError(
                f"RolloutDataModule: engine and eval_engine are both named {min(twice)}; give the latter another name"
            )
        self.batch_size = batch_size
        self.group_size = group_size
        self.max_concurrent = max_concurrent
        self.sampling = sampling or SamplingParams()
        self.eval_sampling = eval_sampling or self.sampling
        self.eval_samples = eval_samples
        self.eval_limit = eval_limit
        self.eval_pass_threshold = eval_pass_threshold
        self.epochs = epochs
        self.shuffle = shuffle
        self.mixture = mixture
        self.last_batch = last_batch
        self.group_completion = group_completion
        self.min_group_size = min_group_size
        self.straggler_timeout_s = straggler_timeout_s
        self.max_retries = max_retries
        self.max_failures = max_failures
        self.rollout_timeout_s = rollout_timeout_s
        self.reward_timeout_s = reward_timeout_s
        self.limits = BudgetLimits(max_turns, max_generated_tokens, max_context)
        self.template_rewrite = template_rewrite
        self.rollout_threads = rollout_threads
        self.filter_zero_variance = filter_zero_variance
        self.load_timeout_s = load_timeout_s
        self.max_engine_restarts = max_engine_restarts
        self.forward_backward_batch = forward_backward_batch
        self.train_rows: dict[str, Sequence[Mapping[str, Any]]] = {}
        self.eval_prompts: list[Prompt] = []

    @override
    def setup(self, stage: str) -> None:
        """Read the prompts, before any engine starts.

        Raises:
            ValueError: no training prompts, fewer than one batch, or no list of them; the message names the fix.
        """
        self.train_rows = {name: rows_of(one, name, "train") for name, one in self.environments.items()}
        self.prompt_stream(seed=0).check_fills_batch(self.batch_size, self.last_batch)
        self.eval_prompts = [
            Prompt(f"eval/{name}/{i}", name, row)
            for name, one in self.environments.items()
            for i, row in enumerate(list(rows_of(one, name, "eval"))[: self.eval_limit])
        ]

    def prompt_stream(self, seed: int) -> PromptStream:
        """The training prompts in the order of a run with this seed."""
        return PromptStream(self.train_rows, epochs=self.epochs, shuffle=self.shuffle, seed=seed, mixture=self.mixture)

    @override
    def train_dataloader(self) -> BatchFeed:
        return BatchFeed(self.trainer)  # type: ignore[arg-type]

    @override
    def val_dataloader(self) -> EvalFeed:
        return EvalFeed(self.trainer)  # type: ignore[arg-type]

    @override
    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        # Batches are plain Python; the policy makes tensors of them, micro-batch by micro-batch.
        return batch
