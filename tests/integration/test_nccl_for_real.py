"""Weights sent to a real vLLM server: all of it as it is but the communicator, for which there is no GPU here."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import threading
import time
from functools import partial
from pathlib import Path

import nccl_stand_in
import pytest
import torch
from fit_kit import Recorder, make_data, make_policy, make_trainer, outcomes
from test_several_engines_for_real import SECRET, START_TIMEOUT_S, Server

from async_rl import serve
from async_rl.engines.base import EngineDiedError, EngineError, GenerationRequest, SamplingParams
from async_rl.engines.vllm_server import VLLMServerEngine
from async_rl.engines.vllm_server_address import KEY_VARIABLE
from async_rl.weights import nccl

pytestmark = pytest.mark.vllm
PATIENCE_S, LONG_S = 2.0, 20.0
KWARGS = {
    "weight_transfer_config": {"backend": nccl.BACKEND},
    "worker_extension_cls": "nccl_stand_in_worker.StandInStagingExtension",
}


class StandInServer(Server):
    """Started as ``--weight-transfer nccl`` does on a GPU, with the stand-in for NCCL in its worker."""

    def start(self) -> None:
        self.process = subprocess.Popen(
            [*self.command, "--engine-kwargs", json.dumps(KWARGS)],
            env={**os.environ, KEY_VARIABLE: SECRET, "PYTHONPATH": str(Path(nccl_stand_in.__file__).parent)},
            stdout=self.log.open("a"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


@pytest.fixture(scope="module")
def server(tiny_model_dir, tmp_path_factory):
    pytest.importorskip("vllm")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(KEY_VARIABLE, SECRET)
        server = StandInServer(tiny_model_dir, tmp_path_factory.mktemp("server"), 0)
        try:
            server.wait_up()
            yield server
        finally:
            server.kill(signal.SIGTERM)


@pytest.fixture(autouse=True)
def stand_in(monkeypatch):
    nccl_stand_in.install_in_trainer(monkeypatch.setattr, chunk_bytes=256 * 2**10, patience_s=PATIENCE_S)


def sent_engine(server: Server, weights_dir: Path) -> VLLMServerEngine:
    return VLLMServerEngine(
        server.url,
        weights_dir=str(weights_dir),
        weight_transfer="nccl",
        dtype="float32",
        start_timeout_s=START_TIMEOUT_S,
    )


class KilledInTheMiddle(Recorder):
    """Kills the server while it receives a version, and has every batch's version compared with what is served."""

    def __init__(self, server, engine, monkeypatch):
        super().__init__()
        self.server, self.engine = server, engine
        self.killed, self.back = threading.Event(), threading.Event()
        self.checked, self.restarts = [], 0
        tensors = nccl.NcclSource.tensors

        def tensors_until_the_kill(source):
            for number, pair in enumerate(tensors(source)):
                if number == 20 and source.version == 2 and not self.killed.is_set():
                    self.killed.set()
                    server.kill()
                    server.start()
                    self.back.set()
                yield pair

        monkeypatch.setattr(nccl.NcclSource, "tensors", tensors_until_the_kill)

    def on_batch_planned(self, trainer, policy, batch):
        super().on_batch_planned(trainer, policy, batch)
        trainer.session.check_parity([self.engine], policy, "32", batch.version, trainer.poll)
        self.checked.append(batch.version)
        self.restarts = trainer.orchestrator.snapshot()["engine_restarts"]


@pytest.mark.slow
def test_a_server_that_dies_while_it_receives_comes_back_into_a_group_of_its_own(
    server, tiny_model_dir, tmp_path, monkeypatch
):
    engine = sent_engine(server, tmp_path / "weights")
    callback = KilledInTheMiddle(server, engine, monkeypatch)
    trainer = make_trainer(tmp_path / "run", max_steps=5, max_staleness=0, parity_check=True, callbacks=[callback])
    data = make_data(with_engine=[engine], max_engine_restarts=1, max_retries=0)
    try:
        trainer.fit(make_policy(tiny_model_dir), data)
    finally:  # or the server could be started after the one before it has been cleaned up
        assert not callback.killed.is_set() or callback.back.wait(LONG_S)
    assert callback.killed.is_set()
    assert callback.restarts == 1
    assert callback.checked == [0, 1, 2, 3, 4]  # the one that was broken off was sent again
    assert outcomes(tmp_path / "run") == {"trained": 10}
    assert not (tmp_path / "weights").exists()


def test_a_load_that_breaks_off_leaves_the_server_to_the_next_run_and_a_kill_is_a_death(
    server, tiny_model_dir, tmp_path, monkeypatch
):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32)
    publisher = nccl.NcclPublisher(torch.float32, "cpu")

    def reference(token_ids, temperature=1.0):
        with torch.no_grad():
            logprobs = (model(torch.tensor([token_ids])).logits[0] / temperature).log_softmax(-1)
        return logprobs[:-1].gather(1, torch.tensor(token_ids)[1:, None])[:, 0]

    def request(seed, tokens):
        return GenerationRequest(f"r{seed}", (5 + seed,), SamplingParams(max_tokens=tokens, temperature=0.8), seed)

    def stopped(tensors, stop):
        yield from tensors[:20]
        stop()
        yield from tensors[20:]

    async def load(engine, version, stop=None):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.02)
        source = publisher.publish(model.named_parameters(), version)
        if stop is not None:
            source.tensors = partial(stopped, list(source.tensors()), stop)
        try:
            await engine.load_weights(version, source)
        finally:
            source.release()
        text = list(range(3, 40))
        scored = torch.tensor(await engine.score(tuple(text)))
        assert float((scored - reference(text)).abs().max()) < 1e-4

    async def run():
        first, second = sent_engine(server, tmp_path), sent_engine(server, tmp_path)
        await first.start()
        await load(first, 0)
        jobs = [asyncio.ensure_future(first.generate(request(seed, 200))) for seed in range(4)]
        client = first._session.client
        while sum(r.started for r in list(client._requests.values())) < 2:
            await asyncio.sleep(0.002)
        await load(first, 1)
        assert (0, 1) in [tuple(s.version for s in (await job).segments) for job in jobs]
        with pytest.raises(EngineError, match="loading policy version 2 failed") as failed:
            await load(first, 2, stop=lambda: 1 / 0)
        assert not isinstance(failed.value, EngineDiedError)
        await first.close()
        await second.start()  # once the server has given up waiting for the rest
        monkeypatch.setattr(nccl, "PATIENCE_S", 10 * LONG_S)
        await load(second, 3)
        began_s = time.monotonic()
        with pytest.raises(EngineDiedError, match="it served version 3"):
            await load(second, 4, stop=server.kill)
        assert time.monotonic() - began_s < LONG_S  # not when patience ends, but when the death is known
        await second.close()

    with contextlib.closing(publisher):
        asyncio.run(run())


def test_without_a_gpu_server_and_run_say_so_before_anything_starts(tiny_model_dir, tmp_path, monkeypatch, capsys):
    monkeypatch.undo()
    with pytest.raises(SystemExit) as ended:
        serve.main([str(tiny_model_dir), "--weight-transfer", "nccl"])
    assert ended.value.code == 2
    assert "--weight-transfer nccl needs a GPU" in capsys.readouterr().err
    nowhere = VLLMServerEngine("http://127.0.0.1:1", weights_dir="w", weight_transfer="nccl", start_timeout_s=0.0)
    with pytest.raises(ValueError, match=r"on a GPU, they are on cpu: .*engine\.weight_transfer=file"):
        make_trainer(tmp_path).fit(make_policy(tiny_model_dir), make_data(with_engine=[nowhere]))
