"""CUDA IPC: what can be checked without a GPU, against vLLM's own definition of the message."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from async_rl.weights import ipc
from async_rl.weights.publishers import make_publisher


def test_publishes_into_one_block_and_keeps_values():
    publisher = ipc.IPCPublisher(torch.bfloat16, device="cpu")
    tied = torch.randn(6, 4)
    source = publisher.publish([("embed", tied), ("norm", torch.ones(3)), ("head", tied)], version=2)
    read = dict(source.tensors())
    assert torch.equal(read["head"], tied.bfloat16())
    assert torch.equal(read["norm"], torch.ones(3).bfloat16())
    assert len({t.untyped_storage().data_ptr() for t in read.values()}) == 1
    publisher.close()


def test_the_message_is_the_one_vllm_takes(monkeypatch: pytest.MonkeyPatch):
    engine = pytest.importorskip("vllm.distributed.weight_transfer.ipc_engine")
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="GPU-1"))
    monkeypatch.setattr(ipc.reductions, "reduce_tensor", lambda t: (None, (tuple(t.shape), t.storage_offset())))
    publisher = make_publisher("ipc", torch.bfloat16, device="cpu")
    source = publisher.publish([("a", torch.ones(2, 3)), ("b", torch.ones(5))], version=0)
    info = engine.IPCWeightTransferUpdateInfo(**source.update_info())
    assert (info.names, info.dtype_names, info.shapes) == (["a", "b"], ["bfloat16", "bfloat16"], [[2, 3], [5]])
    assert [list(handle) for handle in info.ipc_handles] == [["GPU-1"], ["GPU-1"]]
    assert info.ipc_handles[0]["GPU-1"][0] == (2, 3)
    assert info.ipc_handles[0]["GPU-1"][1] != info.ipc_handles[1]["GPU-1"][1]
    publisher.close()
