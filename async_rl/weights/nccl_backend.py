"""The engine side of weights by NCCL: a vLLM weight-transfer back end that loads what the trainer broadcasts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.weight_transfer import nccl_common
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_consumer
from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check

from async_rl.weights.nccl import IN_FLIGHT
from async_rl.weights.vllm_reload import ReloadingEngine, WeightLoadError
from async_rl.weights.watched_group import TransferError, WatchedGroup


@dataclass
class NcclInitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """What :meth:`async_rl.weights.nccl.NcclLink.init_info` sends; without a link: no group from now on."""

    link: str = ""
    world_size: int = 0
    nccl_unique_id_b64: str = field(default="", repr=False)
    chunk_bytes: int = 0
    patience_s: float = 0.0


@dataclass
class NcclUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """What :meth:`async_rl.weights.nccl.NcclSource.update_info` sends, and the link it is sent over."""

    link: str
    version: int
    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]


class NcclWeightTransferEngine(ReloadingEngine):
    """Loads a whole model from the chunks that the trainer broadcasts, while generation is paused.

    Only while it is paused: receiving beside a running model would need its memory a second time on every GPU, and put
    two NCCL groups of one GPU to work at once, which may wait for each other for ever.
    """

    init_info_cls = NcclInitInfo
    update_info_cls = NcclUpdateInfo

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._joined: tuple[NcclInitInfo, WatchedGroup] | None = None

    def init_transfer_engine(self, init_info: NcclInitInfo) -> None:
        """Leave the group of an earlier trainer, or of this one before it lost its connection, and join a new one."""
        self.shutdown()
        if init_info.link:
            rendezvous = nccl_common.NCCLWeightTransferInitInfo(
                rank_offset=1, world_size=init_info.world_size, nccl_unique_id_b64=init_info.nccl_unique_id_b64
            )
            group = nccl_common.worker_init_process_group(rendezvous, self.parallel_config)
            self._joined = init_info, WatchedGroup(group, init_info.patience_s)

    def stage(self, update_info: Any) -> bool:
        """Nothing can be prepared while the model generates."""
        return False

    def receive_weights(self, update_info: NcclUpdateInfo) -> None:
        """Take one version from the trainer.

        Raises:
            WeightLoadError: it did not arrive whole, or parameters of the model are missing from it.
        """
        if self._joined is None or self._joined[0].link != update_info.link:
            raise WeightLoadError(
                f"version {update_info.version} is sent to a group that this engine is not in: another run has "
                "connected to it since"
            )
        init_info, group = self._joined

        def receive() -> None:
            try:
                with group.transfer(), disable_mtp_completeness_check():
                    packed_nccl_broadcast_consumer(
                        iterator=_expected(update_info),
                        group=group,
                        src=0,
                        post_unpack_func=self.model.load_weights,
                        buffer_size_bytes=init_info.chunk_bytes,
                        num_buffers=IN_FLIGHT,
                        device=self.device,
                    )
            except TransferError as error:
                raise WeightLoadError(f"version {update_info.version} did not arrive whole: {error}") from error

        self.reload(receive)

    def shutdown(self) -> None:
        """Leave the group."""
        if self._joined is not None:
            self._joined[1].close()
            self._joined = None


def _expected(info: NcclUpdateInfo) -> Iterator[tuple[str, tuple[list[int], torch.dtype]]]:
    for name, dtype, shape in zip(info.names, info.dtype_names, info.shapes, strict=True):
        yield name, (shape, getattr(torch, dtype))
