"""ReloadingEngine: a model is loaded whole or not at all, whatever became of the load before."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm")

from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

from async_rl.weights.vllm_reload import ReloadingEngine, WeightLoadError

ONES = torch.ones(2, 3)


class Packing(QuantizeMethodBase):
    """What the engine computes with is not what was loaded: here ten times as much."""

    def create_weights(self, layer, *args, **kwargs): ...

    def apply(self, layer, *args, **kwargs): ...

    def process_weights_after_loading(self, layer):
        layer.weight.data.mul_(10)


class Half(torch.nn.Module):
    """A layer with one matrix that is published as two, as vLLM's fused projections."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(4, 3), requires_grad=False)
        self.weight.weight_loader = self._load
        self.quant_method = Packing()

    @staticmethod
    def _load(param, loaded, place):
        param.data[2 * place : 2 * place + 2].copy_(loaded)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([Half(), Half()])

    def load_weights(self, weights):
        for name, tensor in weights:
            layer, place = map(int, name.split("."))
            parameter = self.layers[layer].weight
            parameter.weight_loader(parameter, tensor, place)


class Engine(ReloadingEngine):
    def init_transfer_engine(self, init_info): ...

    def receive_weights(self, update_info): ...

    def shutdown(self): ...


@pytest.fixture
def engine():
    model = Model()
    record_metadata_for_reloading(model)
    config = SimpleNamespace(parallel_config=None, model_config=SimpleNamespace(dtype=torch.float32))
    return Engine(None, config, torch.device("cpu"), model)


def weights(value, *names):
    return [(name, ONES * value) for name in names or ("0.0", "0.1", "1.0", "1.1")]


def load(engine, *chunks):
    def chunk_by_chunk():
        for chunk in chunks:
            if chunk is None:
                raise OSError("the trainer is gone")
            engine.model.load_weights(chunk)

    engine.reload(chunk_by_chunk)
    engine.finish_weight_update()


def values(engine):
    return [layer.weight[place].tolist() for layer in engine.model.layers for place in (0, 2)]


def test_a_load_in_chunks_is_whole(engine):
    load(engine, weights(1.0))
    kept = [layer.weight.data_ptr() for layer in engine.model.layers]
    load(engine, weights(2.0, "0.0"), weights(2.0, "0.1", "1.0"), weights(2.0, "1.1"))
    assert values(engine) == [[20.0] * 3] * 4
    assert [layer.weight.data_ptr() for layer in engine.model.layers] == kept  # a CUDA graph reads from there


@pytest.mark.parametrize("before", [("0.0",), ("0.0", "0.1"), ("0.1", "1.1"), ("0.0", "0.1", "1.0")])
def test_a_load_that_broke_off_is_not_counted_for_the_next_one(engine, before):
    load(engine, weights(1.0))
    with pytest.raises(OSError, match="gone"):
        load(engine, weights(7.0, *before), None)
    load(engine, weights(2.0))
    assert values(engine) == [[20.0] * 3] * 4


def test_a_load_that_leaves_out_a_part_is_refused_and_not_counted_either(engine):
    load(engine, weights(1.0))
    with pytest.raises(WeightLoadError, match=r"only partly.*'layers\.1\.weight'"):
        load(engine, weights(7.0, "0.0", "0.1", "1.0"))
    load(engine, weights(2.0))
    assert values(engine) == [[20.0] * 3] * 4
