"""Two real vLLM servers on loopback: as engines, with the documented command, one for evaluations, one killed."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import psutil
import pyarrow.parquet
import pytest
import torch
from fit_kit import Recorder, make_data, make_policy, make_trainer, outcomes
from noted_engine import Finished, Noted

from async_rl.engines.base import EngineError, GenerationRequest, SamplingParams
from async_rl.engines.vllm_server import VLLMServerEngine, vllm_servers
from async_rl.engines.vllm_server_address import KEY_VARIABLE
from async_rl.weights.file import FilePublisher

pytestmark = pytest.mark.vllm
SMALL = {"dtype": "float32", "max_model_len": 256, "max_num_seqs": 8, "kv_cache_gib": 0.125}
START_TIMEOUT_S = 120.0
SECRET = "a key that only this test knows"
ROOT = Path(__file__).resolve().parents[2]


class Server:
    """A ``python -m async_rl.serve`` process that can be killed and started again on its port."""

    def __init__(self, model_dir: Path, directory: Path, number: int) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = directory / f"server-{number}.log"
        options = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]
        self.command = [
            *(sys.executable, "-m", "async_rl.serve", str(model_dir), "--port", str(self.port)),
            *(*options, "--cpu-cores", str(number % os.cpu_count()), "--log-file", str(self.log)),
        ]
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(
            self.command,
            env={**os.environ, KEY_VARIABLE: SECRET},
            stdout=self.log.open("a"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def wait_up(self) -> None:
        """Wait until it answers; the one path that needs no key says so."""
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while True:
            assert self.process.poll() is None, self.log.read_text()[-2000:]
            assert time.monotonic() < deadline_s, f"not up after {START_TIMEOUT_S} s"
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                    assert answer.status == 200
                    return
            except OSError:
                time.sleep(0.1)

    def post(self, call: str, body: dict) -> None:
        """Call one of our routes with the key alone."""
        headers = {"Authorization": f"Bearer {SECRET}", "Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.url}/async_rl/{call}", json.dumps(body).encode(), headers)
        urllib.request.urlopen(request, timeout=20).close()

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        """End it; its engine core must not outlive it."""
        children = psutil.Process(self.process.pid).children(recursive=True) if self.process.poll() is None else []
        self.process.send_signal(number)
        self.process.wait(60)
        _, alive = psutil.wait_procs(children, timeout=60)
        assert not alive


@pytest.fixture(scope="module")
def servers(tiny_model_dir, tmp_path_factory):
    pytest.importorskip("vllm")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(KEY_VARIABLE, SECRET)
        directory = tmp_path_factory.mktemp("servers")
        started = [Server(tiny_model_dir, directory, number) for number in range(2)]
        try:
            for server in started:
                server.wait_up()
            yield started
        finally:
            for server in started:
                server.kill(signal.SIGTERM)
                assert SECRET not in server.log.read_text()


def test_a_server_is_an_engine(servers, tiny_model_dir, tmp_path, monkeypatch):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32)
    publisher = FilePublisher(tmp_path, torch.float32)
    engine = VLLMServerEngine(
        servers[1].url, weights_dir=str(tmp_path), dtype="float32", start_timeout_s=START_TIMEOUT_S, kv_max_age=0
    )

    def request(seed: int, tokens: int, prompt=(5, 6, 7)) -> GenerationRequest:
        return GenerationRequest(f"r{seed}", prompt, SamplingParams(max_tokens=tokens, temperature=0.8), seed)

    async def load(version: int) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.02)
        source = publisher.publish(model.named_parameters(), version)
        await engine.load_weights(version, source)
        source.release()

    def reference(token_ids: list[int], temperature: float = 1.0) -> torch.Tensor:
        with torch.no_grad():
            logprobs = (model(torch.tensor([token_ids])).logits[0] / temperature).log_softmax(-1)
        return logprobs[:-1].gather(1, torch.tensor(token_ids)[1:, None])[:, 0]

    async def run() -> None:
        await engine.start()
        with pytest.raises(EngineError, match="no policy version yet"):
            await engine.generate(request(0, 4))
        for version in range(3):  # the first is loaded while paused, the others are staged
            await load(version)
            text = tuple(range(3, 40))
            scored = torch.tensor(await engine.score(text))
            assert float((scored - reference(list(text))).abs().max()) < 1e-4
            one, again = await asyncio.gather(*(engine.generate(request(7, 20)) for _ in range(2)))
            assert one == again
            assert {s.version for s in one.segments} == {version}
            told = reference([5, 6, 7, *one.token_ids], temperature=0.8)[2:]
            assert float((told - torch.tensor(one.logprobs)).abs().max()) < 1e-4
        jobs = [asyncio.ensure_future(engine.generate(request(s, 240, (5 + s,)))) for s in range(6)]
        client = engine._session.client
        while sum(r.started for r in list(client._requests.values())) < 2:
            await asyncio.sleep(0.002)
        await load(3)
        generations = [await job for job in jobs]
        spans = [tuple(s.version for s in generation.segments) for generation in generations]
        assert (2, 3) in spans
        assert set(spans) <= {(2,), (2, 3), (3,)}
        assert engine.stats().recomputes == 1
        for seed, generation in enumerate(generations):  # by the new weights alone: no keys of the old ones were left
            if spans[seed] == (2, 3):
                told = reference([5 + seed, *generation.token_ids], temperature=0.8)
                gaps = (told - torch.tensor(generation.logprobs)).abs()
                assert float(gaps[generation.segments[1].start :].max()) < 1e-3
        with pytest.raises(ValueError, match="refused a request"):
            await engine.generate(request(0, 4, tuple(range(5, 45)) * 10))
        cancelled = asyncio.ensure_future(engine.generate(request(1, 200)))
        await asyncio.sleep(0.05)
        cancelled.cancel()
        await asyncio.gather(cancelled, return_exceptions=True)
        assert (await engine.generate(request(1, 4))).segments[0].version == 3

    newcomer = VLLMServerEngine(
        servers[1].url, weights_dir=str(tmp_path / "other"), dtype="float32", start_timeout_s=START_TIMEOUT_S
    )
    try:
        asyncio.run(run())
        assert engine.max_context == SMALL["max_model_len"]
        with pytest.raises(EngineError, match=rf"in use by another run \({tmp_path}, process {os.getpid()} on "):
            asyncio.run(newcomer.start())
        for call in ("pause", "load"):
            with pytest.raises(urllib.error.HTTPError, match="409"):
                servers[1].post(call, {"info": {"path": "x"}, "label": "x"})
        assert len(asyncio.run(engine.generate(request(1, 4))).token_ids) == 4
        monkeypatch.setenv(KEY_VARIABLE, "a wrong key")
        stranger = VLLMServerEngine(servers[1].url, weights_dir="x", dtype="float32", start_timeout_s=0.0)
        with pytest.raises(EngineError, match="refuses the key"):
            asyncio.run(stranger.start())
    finally:
        asyncio.run(engine.close())
        publisher.close()
    monkeypatch.setenv(KEY_VARIABLE, SECRET)
    asyncio.run(newcomer.start())  # it was given back
    asyncio.run(newcomer.close())


def holding(directory: Path, secret: str) -> list[str]:
    """The files that hold a text, plain or (Parquet) compressed."""
    found = []
    for path in (p for p in directory.rglob("*") if p.is_file()):
        content = path.read_bytes()
        if path.suffix == ".parquet":
            content += str(pyarrow.parquet.read_table(path).to_pylist()).encode()
        if secret.encode() in content:
            found.append(path.name)
    return found


def test_the_documented_command_trains_on_them_and_leaves_the_key_nowhere(servers, tiny_model_dir, tmp_path):
    run_dir = tmp_path / "run"
    done = subprocess.run(
        [
            *(sys.executable, "train.py", "engine=vllm_server", f"engine.urls=[{servers[0].url}]"),
            *("+engine@run.evaluation.engine=vllm_server", f"run.evaluation.engine.urls=[{servers[1].url}]"),
            *("engine.dtype=float32", "run.evaluation.engine.dtype=float32", f"model.name_or_path={tiny_model_dir}"),
            *(f"run_dir={run_dir}", "max_steps=2", "batch_size=2", "group_size=2", "run.evaluation.limit=2"),
        ],
        cwd=ROOT, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    record = json.loads((run_dir / "run.json").read_text())
    assert record["exit_code"] == 0
    assert record["facts"]["engine"] == (
        f"vllm_servers at {servers[0].url}; vllm_servers for evaluations, float32"
    )  # fmt: skip
    assert [e["version"] for e in record["evaluations"]] == [0, 2]
    steps = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    (first,) = [row for row in steps if row.get("train/loss") is not None and row["step"] == 1]
    assert first["ratio/mismatch_age0"] < 0.05  # the server samples with our weights
    assert outcomes(run_dir) == {"trained": 4}
    assert not (run_dir / "weights").exists()
    assert holding(run_dir, SECRET) == []
    assert SECRET not in done.stdout + done.stderr
    assert {"config.yaml", "run.json"} <= set(holding(run_dir, servers[0].url))  # what is looked for is found


class NotedServer(Noted, VLLMServerEngine):
    pass


def test_trajectory_on_one_server_and_evaluations_on_the_other(servers, tiny_model_dir, tmp_path):
    training, evaluating = (
        NotedServer(server.url, weights_dir=str(tmp_path / "weights"), dtype="float32", name=name)
        for server, name in zip(servers, ("training", "evaluating"), strict=True)
    )
    callback = Finished()
    trainer = make_trainer(
        tmp_path / "run", max_steps=6, sampling_policy="trajectory", eval_every=2, evaluate_at="ends",
        parity_check=True, stall_timeout_s=60.0, callbacks=[callback],
    )  # fmt: skip
    data = make_data(
        with_engine=training, eval_engine=evaluating, batch_size=4, sampling=SamplingParams(max_tokens=96),
        eval_sampling=SamplingParams(max_tokens=64), eval_limit=6, eval_samples=2,
    )  # fmt: skip
    trainer.fit(make_policy(tiny_model_dir), data)
    assert trainer.end.exit_code == 0
    versions = [{s.version for s in t.segments} for group in callback.groups for t in group.trajectories]
    assert {len(several) for several in versions} == {1}
    assert len(set.union(*versions)) > 2
    assert max(callback.ages) <= 2
    assert outcomes(tmp_path / "run") == {"trained": 24}
    assert [e["version"] for e in trainer.evaluations] == [load[0] for load in evaluating.loaded] == [0, 2, 4, 6]
    assert [e["samples"] for e in trainer.evaluations] == [12] * 4
    assert len(evaluating.asked) == 4 * 12
    assert all(request.name.startswith("g-") for request in evaluating.asked)
    assert not any(request.name.startswith("g-") for request in training.asked)
    for evaluation in (evaluating.asked[:12], evaluating.asked[12:24]):  # later ones may find no rollout left
        began_s, ended_s = min(r.began_s for r in evaluation), max(r.ended_s for r in evaluation)
        assert any(r.began_s < ended_s and r.ended_s > began_s for r in training.asked)


class StampsByEngine(Recorder):
    """Which engine served each planned group, and from which version on."""

    def __init__(self):
        super().__init__()
        self.heads = {0: [], 1: []}

    def on_batch_planned(self, trainer, policy, batch):
        super().on_batch_planned(trainer, policy, batch)
        for group in batch.groups:
            self.heads[group.engine].append(group.head)


class KillOne(StampsByEngine):
    """Kills the first server while it generates, starts it again, and ends the run once it serves newer weights."""

    def __init__(self, server, engine):
        super().__init__()
        self.server, self.engine = server, engine
        self.killed_at, self.restarts = 0, 0.0

    def on_batch_planned(self, trainer, policy, batch):
        super().on_batch_planned(trainer, policy, batch)
        if self.killed_at:
            self.restarts = trainer.orchestrator.snapshot()["engine_restarts"]
            trainer.should_stop = any(head > self.killed_at for head in self.heads[0])
            time.sleep(0.1)  # leaves the cores to the server that starts
        elif batch.version >= 2 and self.heads[0]:
            deadline_s = time.monotonic() + 20
            while not self.engine._session.client._requests:
                assert time.monotonic() < deadline_s
                time.sleep(0.001)
            self.killed_at = batch.version
            self.server.kill()
            self.server.start()


def test_a_killed_server_is_taken_out_and_taken_back_and_nothing_is_lost(servers, tiny_model_dir, tmp_path):
    weights = tmp_path / "weights"
    engines = vllm_servers(
        [server.url for server in servers],
        weights_dir=str(weights),
        dtype="float32",
        start_timeout_s=START_TIMEOUT_S,
    )
    callback = KillOne(servers[0], engines[0])
    trainer = make_trainer(tmp_path / "run", max_steps=2000, parity_check=True, callbacks=[callback])
    sampling = SamplingParams(max_tokens=48)
    data = make_data(with_engine=engines, batch_size=4, sampling=sampling, max_engine_restarts=0, max_retries=0)
    trainer.fit(make_policy(tiny_model_dir), data)
    assert callback.killed_at
    assert callback.restarts == 1
    assert max(callback.heads[0]) > callback.killed_at  # taken back, with newer weights
    assert max(callback.heads[1]) > callback.killed_at  # the other one went on meanwhile
    assert max(callback.ages) <= 2
    ended = outcomes(tmp_path / "run")
    assert set(ended) <= {"trained", "saved"}  # re-admitted, not failed; with max_retries=0 nothing was tried again
    assert ended["trained"] == 4 * trainer.global_step
    assert not weights.exists()
