"""Replay: the batches a run recorded, trained again without engine and environment, on the code path a resume takes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch import LightningDataModule
from typing_extensions import override

from async_rl.archive import BatchArchive
from async_rl.datamodule import BatchFeed
from async_rl.fingerprint import vocabulary
from async_rl.orchestrator.ledger_null import NullLedger
from async_rl.orchestrator.ledger_reader import read_meta, read_run
from async_rl.orchestrator.orchestrator import Orchestrator
from async_rl.orchestrator.prompts import PromptStream
from async_rl.orchestrator.settings import OrchestratorSettings
from async_rl.run_record import DATABASE
from async_rl.session import RolloutSession
from async_rl.types import RolloutTask, SettingError, Trajectory
from async_rl.weights.publishers import make_publisher
from async_rl.weights.shared_memory import BACKEND
from async_rl.wiring import BATCHES

if TYPE_CHECKING:
    from async_rl.engines.base import Engine
    from async_rl.policy import PolicyModule
    from async_rl.trainer import AsyncRLTrainer


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
        database = Path(run_dir) / DATABASE
        if not database.is_file():
            raise SettingError(
                f"replay: there is no run's record ({DATABASE}) in {run_dir}; give the directory of a run"
            )
        self.recovery = read_run(database, BatchArchive(Path(run_dir) / BATCHES))
        meaning = read_meta(database).get("meaning", {})
        if self.recovery.version != 0:
            raise SettingError(
                f"replay: the first batch {run_dir} recorded is that of version {self.recovery.version}, and the "
                "weights of that version are not in the record"
            )
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
    """Build the session of a replay: the control plane with recorded batches and nothing that could sample."""
    batch_size = max(map(len, data.recovery.batches))
    settings = OrchestratorSettings(
        max_steps=trainer.max_steps,
        max_staleness=trainer.staleness.max_staleness,
        admit_ahead=0,
        batch_size=batch_size,
        group_size=1,
        max_concurrent=1,
        stale_policy=trainer.staleness.stale_policy,
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
        start_version=data.recovery.version,
        recovered=data.recovery,
    )
    orchestrator.stop_admission()
    return RolloutSession(
        engines=[],
        orchestrator=orchestrator,
        publisher=make_publisher(BACKEND, next(policy.parameters()).dtype),
        ledger=ledger,
        version=data.recovery.version,
        eval_prompts=[],
        eval_rollout=_generate_nothing,
    )


async def _generate_nothing(task: RolloutTask, engine: Any) -> Trajectory:
    raise RuntimeError(f"a replay generates nothing, but group {task.group_id} was started")
