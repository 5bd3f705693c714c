"""Weights by NCCL: both ends as they are, vLLM's packed transfer between them, and a stand-in for the communicator."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm")

import nccl_stand_in

from async_rl.weights import nccl
from async_rl.weights.base import SentSource, WeightPublisher
from async_rl.weights.nccl_backend import NcclWeightTransferEngine
from async_rl.weights.publishers import make_publisher
from async_rl.weights.vllm_reload import WeightLoadError
from async_rl.weights.watched_group import TransferError

CPU = torch.device("cpu")
TIED = torch.arange(12.0).view(4, 3)
WEIGHTS = [("embed", TIED), ("norm", torch.ones(5)), ("big", torch.randn(40, 10)), ("head", TIED)]


@pytest.fixture(autouse=True)
def stand_in(monkeypatch):
    nccl_stand_in.install_in_trainer(monkeypatch.setattr, chunk_bytes=64, patience_s=0.5)


class Worker(NcclWeightTransferEngine):
    """The engine side in one worker process of ``workers``, its model a dictionary."""

    def __init__(self, rank: int, workers: int):
        self.loaded = {}
        self.loads = 0
        config = SimpleNamespace(
            parallel_config=SimpleNamespace(data_parallel_index=0, world_size=workers, rank=rank), model_config=None
        )
        super().__init__(None, config, CPU, SimpleNamespace(load_weights=self._load))

    def reload(self, load):
        load()

    def _load(self, weights):
        self.loads += 1
        self.loaded.update({name: tensor.clone() for name, tensor in weights})

    def connect(self, info):
        self.init_transfer_engine(self.parse_init_info(dict(info)))

    def take(self, info):
        self.receive_weights(self.parse_update_info(dict(info)))


def at_once(*works):
    """Run all of them at the same time, as the engine's workers and the trainer do; what each returned or raised."""
    with ThreadPoolExecutor(len(works)) as pool:
        futures = [pool.submit(work) for work in works]
        return [future.exception(20) or future.result() for future in futures]


def connected(source: SentSource, workers: int = 1):
    crew = [Worker(rank, workers) for rank in range(workers)]
    link = source.link(workers)
    info = link.init_info()
    assert at_once(link.open, *(lambda w=w: w.connect(info) for w in crew)) == [None] * (workers + 1)
    return link, crew


def sent(link, source: SentSource, crew):
    info = {**source.update_info(), "link": link.name}
    return at_once(lambda: link.send(source), *(lambda w=w: w.take(info) for w in crew))


@pytest.fixture
def publisher():
    publisher = make_publisher(nccl.BACKEND, torch.bfloat16, device="cpu")
    yield publisher
    publisher.close()


def test_every_worker_gets_every_version_whole(publisher: WeightPublisher):
    source = publisher.publish(WEIGHTS, 0)
    assert isinstance(source, SentSource)
    link, crew = connected(source, workers=2)
    for version in range(3):
        weights = [(name, tensor + version) for name, tensor in WEIGHTS[:3]] + [("head", TIED - version)]
        if version:
            source = publisher.publish(weights if version == 2 else WEIGHTS, version)
        assert sent(link, source, crew) == [None, None, None]
        for worker in crew:
            assert list(worker.loaded) == [name for name, _ in WEIGHTS]
            for name, tensor in source.tensors():
                assert torch.equal(worker.loaded[name], tensor), (version, name)
        source.release()
    assert crew[0].loads >= 6  # in several chunks each
    link.close()


def test_a_worker_that_comes_back_gets_a_group_of_its_own_and_the_others_keep_theirs(publisher: WeightPublisher):
    source = publisher.publish(WEIGHTS, 0)
    (first, [one]), (second, [other]) = connected(source), connected(source)
    first.close()  # its engine died
    again, [back] = connected(source)
    assert sent(second, source, [other]) == sent(again, source, [back]) == [None, None]
    assert torch.equal(back.loaded["norm"], torch.ones(5).bfloat16())
    assert one.loaded == {}
    failed = sent(first, source, [one])
    assert isinstance(failed[0], TransferError)
    assert isinstance(failed[1], WeightLoadError)


def test_a_peer_that_is_gone_is_given_up_on_either_side(publisher: WeightPublisher):
    source = publisher.publish(WEIGHTS, 3)
    link, [worker] = connected(source)
    with pytest.raises(TransferError, match=r"nothing arrived for 0\.5 s"):
        link.send(source)
    with pytest.raises(WeightLoadError, match=r"version 3 did not arrive whole: .*0\.5 s"):
        worker.take({**source.update_info(), "link": link.name})


def test_closing_the_link_ends_a_transfer_that_waits(publisher: WeightPublisher, monkeypatch):
    monkeypatch.setattr(nccl, "PATIENCE_S", 60.0)
    source = publisher.publish(WEIGHTS, 0)
    link, _ = connected(source)
    threading.Timer(0.1, link.close).start()
    began_s = time.monotonic()
    with pytest.raises(TransferError, match="closed"):
        link.send(source)
    assert time.monotonic() - began_s < 20


def test_a_link_that_was_closed_before_it_was_open_is_left_at_once(publisher: WeightPublisher):
    source = publisher.publish(WEIGHTS, 0)
    link, worker = source.link(1), Worker(0, 1)
    info = link.init_info()
    with pytest.raises(TransferError, match="not open"):
        link.send(source)
    link.close()
    at_once(link.open, lambda: worker.connect(info))
    with pytest.raises(TransferError, match="closed"):
        link.send(source)


def test_a_worker_takes_no_link_for_another(publisher: WeightPublisher):
    source = publisher.publish(WEIGHTS, 0)
    link, [worker] = connected(source)
    for stranger in ("", "another run's"):
        with pytest.raises(WeightLoadError, match="another run has connected"):
            worker.take({**source.update_info(), "link": stranger})
    worker.connect({})  # a new run introduces itself: the group of the old one is left
    with pytest.raises(WeightLoadError, match="another run has connected"):
        worker.take({**source.update_info(), "link": link.name})
    assert worker.loaded == {}


def test_nothing_can_be_staged():
    assert Worker(0, 1).stage(object()) is False


def test_the_groups_id_is_vllms_way_in_that_unpickles_nothing(publisher: WeightPublisher):
    from vllm.distributed.weight_transfer.nccl_common import NCCLWeightTransferInitInfo

    info = publisher.publish(WEIGHTS, 0).link(4).init_info()
    vllms = NCCLWeightTransferInitInfo(
        rank_offset=1, world_size=info["world_size"], nccl_unique_id_b64=info["nccl_unique_id_b64"]
    )
    assert vllms.world_size == 5
    assert len(vllms.nccl_unique_id_bytes) == 128
    assert vllms.master_address is vllms.master_port is None  # those would make a store whose readers unpickle
    engine_side = NcclWeightTransferEngine.init_info_cls(**info)
    assert info["nccl_unique_id_b64"] not in repr(engine_side) + repr(vllms)


def test_a_trainer_on_the_cpu_is_refused(monkeypatch):
    monkeypatch.undo()
    with pytest.raises(
        ValueError, match=r"needs the trainer's weights on a GPU, they are on cpu: .*weight_transfer=file"
    ):
        make_publisher(nccl.BACKEND, torch.bfloat16, device="cpu")
