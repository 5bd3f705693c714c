"""WarmUp: fine-tunes a model on demonstrated conversations, so that RL has something to reinforce."""

from __future__ import annotations

import hashlib
import json
import logging
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from typing_extensions import override

from async_rl.causal_lm import CausalLMScorer, disable_dropout, load_causal_lm
from async_rl.environments.base import Environment
from async_rl.environments.demonstrations import Trace, demonstrate
from async_rl.models import cache_dir, write_once
from async_rl.packing import ScoredSequence
from async_rl.schedules import make_schedule

log = logging.getLogger(__name__)

_TELL_EVERY_S = 10.0


@dataclass(frozen=True, slots=True)
class WarmUp:
    """Supervised training on what environments demonstrate, on the tokens of the model's own turns only.

    A small model makes no tool call by itself, and what never happens can't be reinforced. A few hundred demonstrated
    conversations teach it the form; how to do well is left to RL. An environment demonstrates by a method
    ``demonstrate(prompt, messages)`` that returns a turn's text or a ``ToolCall``
    (:class:`~async_rl.environments.calculator.Calculator` has one).

    The warmed-up model is kept beside the converted models (``$ASYNC_RL_CACHE``) and used again when model, traces and
    settings are the same.

    Attributes:
        traces: Conversations to demonstrate, >= 1.
        epochs: Passes over them, >= 1.
        batch_size: Conversations per optimizer step, >= 1.
        lr: Peak learning rate of AdamW, > 0; it rises over the first tenth of the steps and falls as a cosine.
        seed: Picks the prompts and their order.
    """

    traces: int = 300
    epochs: int = 1
    batch_size: int = 8
    lr: float = 2e-5
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("traces", "epochs", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"model.warm_up.{name}={getattr(self, name)}: must be >= 1")
        if not self.lr > 0:
            raise ValueError(f"model.warm_up.lr={self.lr}: must be > 0")

    def apply(
        self,
        model: str | Path,
        environments: Mapping[str, Environment],
        *,
        micro_batch_tokens: int = 4096,
        **trainer: Any,
    ) -> Path:
        """Make (or find) the warmed-up model.

        Args:
            model: Hugging Face directory of the model to start from.
            environments: Environments by name; those that demonstrate take turns.
            micro_batch_tokens: Most tokens of a forward pass, padding included.
            **trainer: Further arguments of ``lightning.Trainer``: precision, accelerator.

        Returns:
            Hugging Face directory of the warmed-up model.

        Raises:
            ValueError: no environment demonstrates anything, or a demonstration does not get the reward.
            KeyboardInterrupt: SIGINT or SIGTERM came; nothing is kept.
        """
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(model)
        traces = demonstrate(environments, tokenizer, self.traces, seed=self.seed)

        def build(directory: Path) -> None:
            began_s = time.monotonic()
            learner = _Imitation(load_causal_lm(model), self.lr, self._steps, micro_batch_tokens)
            log.info("warming up: %d steps on %d conversations", self._steps, len(traces))
            fitting = pl.Trainer(
                max_epochs=1,
                devices=1,
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                **trainer,
            )
            try:
                fitting.fit(learner, train_dataloaders=_Batches(list(self._batches(traces))))
            except SystemExit as error:  # what Lightning makes of SIGINT and SIGTERM
                raise KeyboardInterrupt from error
            learner.model.save_pretrained(directory)
            tokenizer.save_pretrained(directory)
            log.info(
                "warmed up on %d conversations in %.0f s: loss per token %.2f, at last %.3f",
                *(len(traces), time.monotonic() - began_s, learner.losses[0], learner.losses[-1]),
            )

        return write_once(cache_dir() / f"warm-{self._fingerprint(Path(model), traces, trainer)}", build)

    @property
    def _steps(self) -> int:
        return self.epochs * -(-self.traces // self.batch_size)

    def _batches(self, traces: Sequence[Trace]) -> Iterator[list[ScoredSequence]]:
        order, shuffler = list(traces), random.Random(self.seed)
        for _ in range(self.epochs):
            shuffler.shuffle(order)
            for start in range(0, len(order), self.batch_size):
                yield _sequences(order[start : start + self.batch_size])

    def _fingerprint(self, model: Path, traces: Sequence[Trace], trainer: Mapping[str, Any]) -> str:
        """Of everything the result hangs on; the weights count by name, size and time."""
        weights = sorted(p for p in model.iterdir() if p.suffix in (".safetensors", ".bin"))
        stamps = [(p.name, (s := p.stat()).st_size, s.st_mtime_ns) for p in weights]
        parts = [str(model), stamps, asdict(self), [(t.token_ids, t.loss_mask) for t in traces], dict(trainer)]
        return hashlib.blake2b(json.dumps(parts, default=str).encode(), digest_size=8).hexdigest()


def _sequences(traces: Sequence[Trace]) -> list[ScoredSequence]:
    sequences, first = [], 0
    for trace in traces:
        positions = [i for i, mask in enumerate(trace.loss_mask) if mask]
        sequences.append(ScoredSequence(trace.token_ids, positions, first))
        first += len(positions)
    return sequences


class _Batches:
    """A loader of ready batches; torch's would draw from the global random state."""

    def __init__(self, batches: list[list[ScoredSequence]]) -> None:
        self._batches = batches

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[list[ScoredSequence]]:
        return iter(self._batches)


class _Imitation(pl.LightningModule):
    """Maximum likelihood on the demonstrated tokens."""

    def __init__(self, model: Any, lr: float, steps: int, micro_batch_tokens: int) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.model = model
        disable_dropout(model)
        model.train()
        self._lr = lr
        self._steps = steps
        self._scorer = CausalLMScorer(model, "auto", micro_batch_tokens)
        self.losses: list[float] = []
        self._told_s = time.monotonic()

    @override
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self._lr, weight_decay=0.0)
        scheduler = make_schedule(optimizer, "cosine", max(self._steps // 10, 1), self._steps)
        return {"optimizer": optimizer, "lr_scheduler": scheduler}

    @override
    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        return batch  # micro-batches go there one by one

    @override
    def training_step(self, batch: list[ScoredSequence], batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        schedule: Any = self.lr_schedulers()
        optimizer.zero_grad()
        tokens, total = sum(len(s.positions) for s in batch), 0.0
        for micro_batch in self._scorer.pack(batch):
            logprobs, _ = self._scorer.score(micro_batch.to(self.device), 1.0)
            loss = -logprobs.sum() / tokens
            self.manual_backward(loss)
            total += float(loss.detach())
        nn.utils.clip_grad_norm_(self.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        self.losses.append(total)
        if time.monotonic() - self._told_s > _TELL_EVERY_S:
            self._told_s = time.monotonic()
            log.info("warm-up step %d of %d, loss per token %.2f", len(self.losses), self._steps, total)
