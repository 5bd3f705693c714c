"""ResumeVersionRecovery: after a resume, proves that the books start where the checkpoint stopped."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning.pytorch import LightningModule
from typing_extensions import override

from async_rl.callbacks.base import RLCallback

if TYPE_CHECKING:
    from async_rl.trainer import AsyncRLTrainer


class ResumeVersionRecovery(RLCallback):
    """Checks, once the engines serve the restored weights, that trained and served version equal ``global_step``.

    A resumed run whose accepted count started at zero would admit ``version * batch_size`` groups too many and train
    data of any age; the gate must see the recovered version before the first admission.
    """

    @override
    def on_train_start(self, trainer: AsyncRLTrainer, pl_module: LightningModule) -> None:  # type: ignore[override]
        version = trainer.global_step
        if version == 0:
            return
        books = trainer.orchestrator.snapshot()
        for name in ("trained_version", "served_version"):
            if int(books[name]) != version:
                raise RuntimeError(
                    f"resume: the {name.replace('_', ' ')} is {books[name]:g} but the checkpoint is at version "
                    f"{version}; start from the checkpoint before, or without resume"
                )
        trainer.call_rl_hook("on_version_recovered", version)
