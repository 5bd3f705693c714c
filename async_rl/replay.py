"""Replay: the batches a run recorded, trained again without engine and environment, on the code path a resume takes."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch import LightningDataModule
from typing_extensions import override

from async_rl.archive import BatchArchive
from async_rl.datamodule import BatchFeed
from async_rl.fingerprint import vocabulary
from async_rl.orchestrator.batches import without_tokens_before
from async_rl.orchestrator.ledger_null import NullLedger
from async_rl.orchestrator.ledger_reader import read_meta, read_run
from async_rl.orchestrator.orchestrator import Orchestrator
from async_rl.orchestrator.prompts import PromptStream
from async_rl.orchestrator.records import RecordedBatch, Recovery
from async_rl.orchestrator.settings import OrchestratorSettings
from async_rl.record_bounds import RecordedBounds
from async_rl.resume_rules import DATABASE
from async_rl.session import RolloutSession
from async_rl.types import Group, RolloutTask, SettingError, Trajectory
from async_rl.weights.publishers import make_publisher
from async_rl.weights.shared_memory import BACKEND
from async_rl.wiring import BATCHES

if TYPE_CHECKING:
    from async_rl.engines.base import Engine
    from async_rl.policy import PolicyModule
    from async_rl.trainer import AsyncRLTrainer

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunToReplay:
    """What a run recorded, as far as it is trained again.

    Attributes:
        recovery: Its trained batches, each read when it is due, from version 0 on.
        meaning: What gives the data its meaning, by key (see :mod:`async_rl.fingerprint`).
        bounds: How old the data was allowed to be.
    """

    recovery: Recovery
    meaning: Mapping[str, Any]
    bounds: RecordedBounds

    @classmethod
    def read(cls, run_dir: str | os.PathLike[str]) -> RunToReplay:
        """Read the record of a run, ended or still going on.

        Raises:
            SettingError: there is no record, or it does not begin at version 0.
            LedgerError: it can't be read, or holds no trained batch.
        """
        database = Path(run_dir) / DATABASE
        if not database.is_file():
            raise SettingError(
                f"replay: there is no run's record ({DATABASE}) in {run_dir}; give the directory of a run"
            )
        recovery, meta = read_run(database, BatchArchive(Path(run_dir) / BATCHES)), read_meta(database)
        if recovery.version != 0:
            raise SettingError(
                f"replay: the first batch {run_dir} recorded is that of version {recovery.version}, and the "
                "weights of that version are not in the record"
            )
        bounds = RecordedBounds.from_meta(meta)
        batches = tuple(
            RecordedBatch(batch.group_ids, partial(_as_trained, batch, bounds.masked_below(version)))
            for version, batch in enumerate(recovery.batches)
        )
        return cls(replace(recovery, batches=batches), meta.get("meaning", {}), bounds)

    def described(self, max_steps: int) -> str:
        """For people: ``5 of 5 recorded batches of 8 x 8 rollouts, max_staleness 2``."""
        batches = self.recovery.batches
        sizes = sorted(set(map(len, batches)))
        size = f"{sizes[0]} to {sizes[-1]}" if len(sizes) > 1 else f"{sizes[0]}"
        return (
            f"{min(max_steps, len(batches))} of {len(batches)} recorded batches of {size} x "
            f"{self.meaning.get('group_size', '?')} rollouts, {self.bounds.described()}"
        )


def _as_trained(batch: RecordedBatch, oldest: int | None) -> tuple[Group, ...]:
    """The groups of a batch, less the tokens that the run masked for their age."""
    return tuple(batch) if oldest is None else tuple(without_tokens_before(oldest, group) for group in batch)


class ReplayDataModule(LightningDataModule):
    """Feeds the recorded batches of a run to the trainer, one per policy version; each is read when it is due.

    Args:
        run_dir: The run, ended or still going on; only read.
        policy: What is trained.

    Raises:
        SettingError: there is no record of a trained batch, or what it holds means something else to this policy.
    """

    def __init__(self, run_dir: str | os.PathLike[str], policy: PolicyModule) -> None:
        super().__init__()
        self.engines: list[Engine] = []
        self.eval_engines: list[Engine] = []
        self.run = RunToReplay.read(run_dir)
        meaning = self.run.meaning
        if meaning.get("model.vocabulary", vocabulary(policy)) != vocabulary(policy):
            raise SettingError(f"replay: {run_dir} was recorded with another vocabulary than that of the model given")
        temperature = meaning.get("rollout.sampling.temperature", policy.temperature)
        if temperature != policy.temperature:
            raise SettingError(
                f"replay: {run_dir} was sampled at temperature={temperature}, and the policy takes log-probabilities "
                f"at temperature={policy.temperature}; give it that of the record"
            )

    @override
    def train_dataloader(self) -> BatchFeed:
        return BatchFeed(self.trainer)  # type: ignore[arg-type]

    @override
    def val_dataloader(self) -> Iterator[Any]:
        return iter(())

    @override
    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        return batch  # plain Python; the policy makes tensors of it


def open_replay(trainer: AsyncRLTrainer, policy: PolicyModule, data: ReplayDataModule) -> RolloutSession:
    """Build the session of a replay: the control plane with recorded batches and nothing that could sample.

    How old its data is is a fact by now: the bound is that of the record, whatever the trainer's is.
    """
    recovery, bound = data.run.recovery, data.run.bounds.exact
    log.info("replaying %s", data.run.described(trainer.max_steps))
    settings = OrchestratorSettings(
        max_steps=trainer.max_steps,
        max_staleness=bound,
        admit_ahead=0,
        batch_size=max(map(len, recovery.batches)),
        group_size=1,
        max_concurrent=1,
        stale_policy="allow" if bound is None else "wait",
        seed=trainer.seed,
        rollout_threads=1,
    )
    orchestrator = Orchestrator(
        settings,
        engines=[],
        prompts=PromptStream({"replay": [{}]}, epochs=1, shuffle=False, seed=0),
        rollout=_generate_nothing,
        advantages=policy.advantage,
        ledger=(ledger := NullLedger()),
        start_version=recovery.version,
        recovered=recovery,
    )
    orchestrator.stop_admission()
    return RolloutSession(
        engines=[],
        orchestrator=orchestrator,
        publisher=make_publisher(BACKEND, next(policy.parameters()).dtype),
        ledger=ledger,
        version=recovery.version,
        eval_prompts=[],
        eval_rollout=_generate_nothing,
    )


async def _generate_nothing(task: RolloutTask, engine: Any) -> Trajectory:
    raise RuntimeError(f"a replay generates nothing, but group {task.group_id} was started")
