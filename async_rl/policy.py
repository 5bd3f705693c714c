"""PolicyModule: a causal language model that Lightning trains on one batch of rollouts per policy version."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from async_rl.accumulation import Accumulation
from async_rl.algorithms.advantages import GRPO, AdvantageFn
from async_rl.algorithms.losses import DecoupledPPOLoss, PolicyLoss
from async_rl.causal_lm import CausalLMScorer, disable_dropout, load_causal_lm, unique_weights
from async_rl.packing import MicroBatch, ScoredSequence
from async_rl.schedules import SCHEDULES, Schedule, make_schedule
from async_rl.token_table import NO_STAMP, TokenTable
from async_rl.types import Batch, EvalBatch, RunError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

log = logging.getLogger(__name__)

default_optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] = partial(
    torch.optim.AdamW, lr=1e-5, weight_decay=0.0, fused=True
)


class NonFiniteError(RunError):
    """Loss or gradients were not finite too many steps in a row."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What became of a batch.

    Attributes:
        updated: Whether the policy moved on to the next version.
        reason: ``"trained"``, or why there was no update: ``"no_trainable_token"``, ``"frozen"``, ``"nonfinite"``.
        metrics: Figures of the step, as logged.
    """

    updated: bool
    reason: str
    metrics: dict[str, float]


class PolicyModule(pl.LightningModule):
    """A causal LM, its loss and its optimizer; one counted optimizer step per batch, so ``global_step`` is the version.

    Forward passes run in the trainer's precision (``precision="bf16-mixed"`` over the float32 weights is the usual
    choice), in micro-batches, with logits only where a token is trained and common beginnings computed once. Dropout
    is off: the engine that samples has none.

    Args:
        model: A Hugging Face model directory, or a causal LM.
        tokenizer: Its tokenizer; default: the directory's.
        advantage: Rewards nested per group to advantages nested the same way.
        loss: The policy loss.
        optimizer: Trainable parameters to an optimizer; default AdamW, learning rate 1e-5, no weight decay.
        lr_schedule: ``"constant"``, ``"linear"``, ``"cosine"``, or a function of the optimizer to a scheduler that is
            stepped once per version.
        warmup_steps: Steps over which the learning rate rises first, >= 0.
        micro_batch_tokens: Most tokens of a forward pass, padding included, >= 1.
        gradient_clip_val: Largest 2-norm of the gradient; 0: no clipping.
        gradient_checkpointing: Recompute activations in the backward pass.
        share_prefix: Compute common beginnings of sequences once: ``"auto"``, where the architecture allows it.
        temperature: The sampling temperature, > 0; log-probabilities are those of the tempered distribution.
        max_nonfinite_steps: Batches in a row with a loss or gradient that is not finite that end the run, >= 1.

    Raises:
        ValueError: a value is out of range; the message names it.

    Example:
        >>> policy = PolicyModule("path/to/model", loss=DecoupledPPOLoss(cap=2.0), lr_schedule="cosine")
    """

    def __init__(
        self,
        model: str | Path | PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        advantage: AdvantageFn | None = None,
        loss: PolicyLoss | None = None,
        optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] = default_optimizer,
        lr_schedule: Schedule | Callable[[Optimizer], Any] = "constant",
        warmup_steps: int = 0,
        micro_batch_tokens: int = 4096,
        gradient_clip_val: float = 1.0,
        gradient_checkpointing: bool = False,
        share_prefix: Literal["auto"] | bool = "auto",
        temperature: float = 1.0,
        max_nonfinite_steps: int = 3,
    ) -> None:
        super().__init__()
        for name, value, least in (
            ("warmup_steps", warmup_steps, 0),
            ("micro_batch_tokens", micro_batch_tokens, 1),
            ("gradient_clip_val", gradient_clip_val, 0),
            ("max_nonfinite_steps", max_nonfinite_steps, 1),
        ):
            if not value >= least:
                raise ValueError(f"PolicyModule: {name}={value!r} must be >= {least}")
        if not temperature > 0:
            raise ValueError(f"PolicyModule: temperature={temperature!r} must be > 0, as the sampling's")
        if isinstance(lr_schedule, str) and lr_schedule not in SCHEDULES:
            raise ValueError(f"PolicyModule: lr_schedule={lr_schedule!r}; give one of {', '.join(SCHEDULES)}")
        if callable(lr_schedule) and warmup_steps:
            raise ValueError(f"PolicyModule: warmup_steps={warmup_steps} is not used with an lr_schedule of your own")
        if share_prefix not in ("auto", True, False):
            raise ValueError(f'PolicyModule: share_prefix={share_prefix!r}; give "auto", true or false')
        self.automatic_optimization = False
        self.model: Any = load_causal_lm(model) if isinstance(model, str | Path) else model
        self.tokenizer = tokenizer or _load_tokenizer(model)
        self.advantage: AdvantageFn = advantage or GRPO()
        self.loss: PolicyLoss = loss or DecoupledPPOLoss()
        self.optimizer = optimizer
        self.lr_schedule = lr_schedule
        self.warmup_steps = warmup_steps
        self.gradient_clip_val = gradient_clip_val
        self.temperature = temperature
        self.max_nonfinite_steps = max_nonfinite_steps
        self.last_step = StepResult(updated=False, reason="no batch yet", metrics={})
        self._nonfinite_in_a_row = 0
        self._done = Accumulation()
        disable_dropout(self.model)
        self.model.train()  # Hugging Face models checkpoint activations in training mode only
        self.scorer = CausalLMScorer(self.model, share_prefix, micro_batch_tokens)
        if gradient_checkpointing:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})

    # training

    @override
    def configure_optimizers(self) -> Any:
        parameters = self._trainable()
        if not parameters:
            return None
        optimizer = self.optimizer(parameters)
        if callable(self.lr_schedule):
            scheduler = self.lr_schedule(optimizer)
        else:
            if self.lr_schedule != "constant" and self.trainer.max_steps < 1:
                raise ValueError(f"PolicyModule: lr_schedule={self.lr_schedule} needs the trainer's max_steps")
            scheduler = make_schedule(optimizer, self.lr_schedule, self.warmup_steps, self.trainer.max_steps)
        return {"optimizer": optimizer, "lr_scheduler": scheduler}

    @override
    def on_fit_start(self) -> None:
        if self.trainer.precision not in ("bf16-mixed", "32-true"):
            raise ValueError(
                f"precision={self.trainer.precision} is not supported: updates as small as RL's are lost in 16-bit "
                "weights, and scaled gradients hide their norm from the non-finite guard; use bf16-mixed or 32-true"
            )

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> None:
        """Train on a batch: one optimizer step, or none with the reason in :attr:`last_step`.

        Raises:
            StalenessError: a token is older than the batch's bound.
            NonFiniteError: too many batches in a row without a finite loss and gradient.
        """
        try:
            self.last_step = self._train(batch)
        finally:
            self.discard()
        self.log_dict(self.last_step.metrics, batch_size=max(len(batch.groups), 1))

    def train_ahead(self, part: Batch) -> None:
        """Run forward and backward on groups of the next batch while its others are still being generated.

        ``training_step`` adds the rest of that batch and makes its one update; :meth:`discard` undoes this instead.

        Args:
            part: Whole groups, with advantages that don't depend on the rest, certain to be in the next batch.
        """
        began_s = time.monotonic()
        if self._trainable():
            with self._precision_context():
                self._accumulate(TokenTable.of(part), part)
            self._done.ahead += len(part.trajectories)
        self._done.ahead_s += time.monotonic() - began_s

    def discard(self) -> None:
        """Drop all gradients and what is known of them: the batch ended, or will never be complete."""
        self._done = Accumulation()
        self.zero_grad()

    def _train(self, batch: Batch) -> StepResult:
        began_s = time.monotonic()
        done, table = self._done, TokenTable.of(batch)
        metrics = _batch_metrics(batch, table)
        if strangers := done.groups - {group.id for group in batch.groups}:
            raise RuntimeError(
                f"training version {batch.version}: group {min(strangers)} was trained ahead, but is not in the batch; "
                "batch formation has a bug, nothing was updated"
            )
        if not len(table):
            return StepResult(False, "no_trainable_token", metrics)
        if not self._trainable():
            return StepResult(False, "frozen", metrics)
        rest = batch.without(done.groups)
        self._accumulate(TokenTable.of(rest) if done.groups else table, rest)
        loss, norm = self._normalise(self.loss.normaliser(table.lengths))
        metrics |= {"train/loss": loss, "train/grad_norm": norm}
        if not (math.isfinite(loss) and math.isfinite(norm)):
            return StepResult(False, "nonfinite", metrics | self._count_nonfinite(loss, norm, table))
        self._nonfinite_in_a_row = 0
        if batch.max_staleness is not None:
            table.check_ages(batch.max_staleness)
        optimizer: Any = self.optimizers()
        metrics["train/lr"] = float(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule: Any = self.lr_schedulers()
        schedule.step()
        metrics |= done.metrics(self.loss.cap) | {"train/step_s": done.ahead_s + time.monotonic() - began_s}
        if done.ahead:
            metrics |= {"train/ahead_share": done.ahead / len(batch.trajectories), "train/ahead_s": done.ahead_s}
        return StepResult(True, "trained", metrics)

    def _accumulate(self, table: TokenTable, part: Batch) -> None:
        """Add the gradient of the sum of some groups' losses, micro-batch by micro-batch."""
        done = self._done
        if not done.groups:
            self.zero_grad()
        done.groups.update(group.id for group in part.groups)
        weights = self.loss.token_weights(table.lengths)[table.sequence].to(self.device)
        behaviour, advantages = table.behaviour.to(self.device), table.advantages.to(self.device)
        ages = table.ages.to(self.device)
        for micro_batch in self.scorer.pack(_sequences(table, self.loss.skips_zero_advantage)):
            if not done.finite:
                return
            tokens = micro_batch.to(self.device)
            current, entropy = self.scorer.score(tokens, self.temperature)
            at = tokens.tokens
            loss = self.loss(current, current.detach(), behaviour[at], advantages[at], weights[at])
            done.add(loss, current, entropy, behaviour[at], ages[at])
            if done.finite:
                self.manual_backward(loss)
            else:
                done.suspects = _suspects(table, micro_batch, current.detach().cpu())

    @torch.no_grad()
    def _normalise(self, normaliser: float) -> tuple[float, float]:
        """Make the sums those of the batch's loss and clip the gradient; returns the loss and the norm before that."""
        if not self._done.finite:
            return self._done.loss, math.nan
        for parameter in self._trainable():
            if parameter.grad is not None:
                parameter.grad /= normaliser
        norm = nn.utils.clip_grad_norm_(self._trainable(), self.gradient_clip_val or math.inf)
        return self._done.loss / normaliser, float(norm)

    def _count_nonfinite(self, loss: float, norm: float, table: TokenTable) -> dict[str, float]:
        self._nonfinite_in_a_row += 1
        suspects = self._done.suspects or table.names
        names = ", ".join(suspects[:8]) + (", ..." if len(suspects) > 8 else "")
        message = (
            f"training version {table.version}: loss {loss:g}, gradient norm {norm:g}; no update, batch "
            f"dropped ({self._nonfinite_in_a_row} in a row). Samples: {names}"
        )
        log.warning(message)
        if self._nonfinite_in_a_row >= self.max_nonfinite_steps:
            raise NonFiniteError(
                f"{message}. max_nonfinite_steps={self.max_nonfinite_steps} reached: lower the learning rate, or look "
                "at the rewards and log-probabilities of these samples"
            )
        return {"train/nonfinite_in_a_row": float(self._nonfinite_in_a_row)}

    def _trainable(self) -> list[nn.Parameter]:
        return [p for p in self.parameters() if p.requires_grad]

    # evaluation, weights

    @override
    def validation_step(self, batch: EvalBatch, batch_idx: int) -> None:
        """Log a finished evaluation under ``eval/``, with the version it measured."""
        self.log_dict({f"eval/{k}": float(v) for k, v in batch.summary().items()}, batch_size=1)

    @torch.no_grad()
    def logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probabilities of ``token_ids[1:]`` at temperature 1, in the precision of training.

        Args:
            token_ids: A sequence, ``[seq]`` with seq >= 2.

        Returns:
            ``[seq - 1]`` values.
        """
        sequence = ScoredSequence(list(token_ids), range(1, len(token_ids)), 0)
        (micro_batch,) = self.scorer.pack([sequence])
        with self._precision_context():
            values, _ = self.scorer.score(micro_batch.to(self.device), temperature=1.0)
        return [float(v) for v in values.cpu()]

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Weights under their Hugging Face names, tied ones once; they change at the next step."""
        return unique_weights(self.model)

    def save_pretrained(self, directory: str | Path) -> None:
        """Write model and tokenizer as a Hugging Face directory."""
        self.model.save_pretrained(directory)
        self.tokenizer.save_pretrained(directory)

    def _precision_context(self) -> AbstractContextManager[Any]:
        attached = self._trainer is not None
        return self.trainer.precision_plugin.forward_context() if attached else nullcontext()


def _load_tokenizer(model: str | Path | nn.Module) -> PreTrainedTokenizerBase:
    if not isinstance(model, str | Path):
        raise ValueError("PolicyModule: tokenizer is needed beside a model that is no directory; give tokenizer=...")
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model)


def _sequences(table: TokenTable, skip_zero_advantage: bool) -> list[ScoredSequence]:
    """What to run through the model: all contexts, or those whose advantage isn't 0 (one of them at least)."""
    first = accumulate(map(len, table.positions), initial=0)
    sequences = [
        ScoredSequence(ids, positions, start)
        for ids, positions, start in zip(table.token_ids, table.positions, first, strict=False)
        if len(positions)
    ]
    if not skip_zero_advantage:
        return sequences
    return [s for s in sequences if table.advantages[s.first_token] != 0] or sequences[:1]


def _suspects(table: TokenTable, part: MicroBatch, current: Tensor) -> tuple[str, ...]:
    bad = ~(torch.isfinite(current) & torch.isfinite(table.advantages[part.tokens]))
    chosen = part.tokens[bad] if bool(bad.any()) else part.tokens
    return tuple(table.names[i] for i in table.sequence[chosen].unique().tolist())


def _batch_metrics(batch: Batch, table: TokenTable) -> dict[str, float]:
    rewards = torch.tensor([t.reward for t in batch.trajectories], dtype=torch.float64)
    metrics = {
        "train/reward_mean": float(rewards.mean()) if len(rewards) else math.nan,
        "train/reward_std": float(rewards.std(correction=0)) if len(rewards) else math.nan,
        "train/tokens": float(len(table)),
        "train/tokens_per_trajectory": len(table) / max(len(rewards), 1),
    }
    ages = table.ages[table.ages != NO_STAMP].double()
    if len(ages):
        metrics |= {
            "age/mean": float(ages.mean()),
            "age/p99": float(ages.quantile(0.99, interpolation="higher")),
            "age/max": float(ages.max()),
        }
    return metrics
