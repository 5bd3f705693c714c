"""VLLMServerEngine against a server that tests steer: what is sent, what is believed, and what counts as its death."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Iterator

import pytest
from server_kit import FACTS, PATIENCE_S, FakeServer, request, source, wait_for_death

from async_rl.engines.base import EngineDiedError, EngineError
from async_rl.engines.vllm_server import VLLMServerEngine, vllm_servers
from async_rl.engines.vllm_server_address import KEY_VARIABLE
from async_rl.engines.vllm_server_core import ANSWER_TIMEOUT_S


@pytest.fixture
def server() -> Iterator[FakeServer]:
    server = FakeServer()
    yield server
    server.gate.set()
    server.kill()


@pytest.fixture
def engine(server: FakeServer) -> Iterator[VLLMServerEngine]:
    engine = VLLMServerEngine(server.url, weights_dir="w", dtype="float32", start_timeout_s=0.0)
    asyncio.run(engine.start())
    asyncio.run(engine.load_weights(0, source(0)))
    yield engine
    asyncio.run(engine.close())


def test_tokens_go_in_and_come_out_with_the_servers_stamps(server: FakeServer, engine: VLLMServerEngine):
    generation = asyncio.run(engine.generate(request(stop=("x",), temperature=0.7)))
    assert generation.token_ids == [11, 12, 13]
    assert generation.logprobs[:2] == [-1.0, -2.0]
    assert math.isnan(generation.logprobs[2])
    assert [(s.version, s.start, s.end) for s in generation.segments] == [(0, 0, 3)]
    assert generation.finish_reason == "stop"
    sent = server.bodies[-1]
    assert sent["token_ids"] == [5, 6, 7]
    assert sent["sampling_params"] == {
        "max_tokens": 8, "temperature": 0.7, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "stop": ["x"], "seed": 3,
        "logprobs": 0, "detokenize": True, "stream_interval": 1 << 30,
    }  # fmt: skip
    assert engine.stats().generated_tokens == 3
    assert engine.max_context == FACTS["max_model_len"]
    assert asyncio.run(engine.score((5, 6, 7))) == [-0.5, -0.5]


def test_a_load_pauses_loads_resumes_and_what_spans_it_has_both_stamps(server: FakeServer, engine: VLLMServerEngine):
    server.calls.clear()
    server.gate.clear()

    async def run():
        running = asyncio.ensure_future(engine.generate(request()))
        await asyncio.to_thread(server.started.acquire, timeout=PATIENCE_S)
        client = engine._session.client
        while not any(r.started for r in list(client._requests.values())):
            await asyncio.sleep(0.005)
        await engine.load_weights(1, source(1))
        server.gate.set()
        return await running

    generation = asyncio.run(run())
    assert [(s.version, s.start, s.end) for s in generation.segments] == [(0, 0, 1), (1, 1, 3)]
    assert server.calls == ["stage", "staged", "pause", "load", "resume"]
    assert server.broken_off == 0
    salts = {body["cache_salt"] for body in server.bodies if "cache_salt" in body}
    asyncio.run(engine.generate(request()))
    assert server.bodies[-1]["cache_salt"] not in salts


@pytest.mark.parametrize(("kv_max_age", "recomputed_at"), [(0, [1, 2]), (1, [2]), (None, [])])
def test_kv_max_age_has_the_server_compute_old_keys_anew_before_it_goes_on(
    server: FakeServer, kv_max_age: int | None, recomputed_at: list[int]
):
    engine = VLLMServerEngine(
        server.url, weights_dir="w", dtype="float32", start_timeout_s=0.0, kv_max_age=kv_max_age
    )  # fmt: skip
    server.gate.clear()
    seen, ages = [], []

    async def run():
        await engine.start()
        await engine.load_weights(0, source(0))
        running = asyncio.ensure_future(engine.generate(request()))
        await asyncio.to_thread(server.started.acquire, timeout=PATIENCE_S)
        client = engine._session.client
        while not any(r.started for r in list(client._requests.values())):
            await asyncio.sleep(0.005)
        for version in (1, 2):
            server.calls.clear()
            await engine.load_weights(version, source(version))
            ages.append(engine.stats().kv_age)
            if "recompute" in server.calls:
                seen.append(version)
                assert server.calls[-3:] == ["load", "recompute", "resume"]
        server.gate.set()
        await running
        return engine.stats().recomputes

    try:
        assert asyncio.run(run()) == len(recomputed_at)
    finally:
        asyncio.run(engine.close())
    assert seen == recomputed_at
    assert ages == {0: [0, 0], 1: [1, 0], None: [1, 2]}[kv_max_age]


def test_a_request_without_a_token_is_sent_again_under_the_new_salt(server: FakeServer, engine: VLLMServerEngine):
    server.gate.clear()

    async def run():
        waiting = asyncio.ensure_future(engine.generate(request(prompt=(99,))))
        await asyncio.to_thread(server.started.acquire, timeout=PATIENCE_S)
        await engine.load_weights(1, source(1))
        await asyncio.to_thread(server.started.acquire, timeout=PATIENCE_S)
        server.gate.set()
        return await waiting

    generation = asyncio.run(run())
    assert [(s.version, s.start, s.end) for s in generation.segments] == [(1, 0, 3)]
    first, second = (b["cache_salt"] for b in server.bodies if b.get("token_ids") == [99])
    assert first != second


def test_cancelling_closes_the_connection(server: FakeServer, engine: VLLMServerEngine):
    server.gate.clear()

    async def run():
        running = asyncio.ensure_future(engine.generate(request()))
        await asyncio.to_thread(server.started.acquire, timeout=PATIENCE_S)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(run())
    assert server.breaks_off.acquire(timeout=PATIENCE_S)
    assert server.broken_off == 1


def test_a_killed_server_is_a_death_at_once_and_is_found_again(server: FakeServer, engine: VLLMServerEngine):
    server.gate.clear()

    async def run():
        running = [asyncio.ensure_future(engine.generate(request())) for _ in range(3)]
        await asyncio.to_thread(server.started.acquire, timeout=PATIENCE_S)
        await asyncio.to_thread(server.kill)
        results = await asyncio.wait_for(asyncio.gather(*running, return_exceptions=True), ANSWER_TIMEOUT_S / 2)
        assert all(isinstance(r, EngineDiedError) for r in results)
        assert isinstance(engine.died, EngineDiedError)
        assert "served version 0" in str(engine.died)
        with pytest.raises(EngineDiedError):
            await engine.load_weights(1, source(1))
        await engine.close()
        assert engine.died is None
        with pytest.raises(EngineError, match=r"server-0.*can't be reached"):
            await engine.start()
        server.gate.set()
        server.start()
        await engine.start()
        with pytest.raises(EngineError, match="no policy version yet"):
            await engine.generate(request())
        await engine.load_weights(5, source(5))
        return await engine.generate(request())

    tokens = engine.stats().generated_tokens
    assert [s.version for s in asyncio.run(run()).segments] == [5]
    assert engine.stats().generated_tokens == tokens + 3
    assert engine.stats().loads == 2  # counters go on


@pytest.mark.parametrize(
    ("change", "message"),
    [({"incarnation": "another"}, "lost its weights"), ({"alive": False}, "engine core"), (None, "can't be reached")],
)
def test_an_idle_engine_notices_its_servers_death(server: FakeServer, engine: VLLMServerEngine, change, message: str):
    if change is None:
        server.kill()
    else:
        server.facts.update(change)
    assert message in str(wait_for_death(engine))
    if change is None:
        server.start()


def test_a_server_that_came_back_between_two_requests_is_told_by_its_stamp(
    server: FakeServer, engine: VLLMServerEngine
):
    server.label = "default"
    with pytest.raises(EngineDiedError, match="lost its weights"):
        asyncio.run(engine.generate(request()))


def test_tokens_of_another_runs_weights_are_an_error_whatever_the_lease_says(
    server: FakeServer, engine: VLLMServerEngine
):
    server.label = "deadbeef-0"
    with pytest.raises(EngineError, match="another run loads its weights") as error:
        asyncio.run(engine.generate(request()))
    assert not isinstance(error.value, EngineDiedError)


@pytest.mark.parametrize("in_stream", [False, True])
def test_a_refused_request_is_not_a_death_and_a_dying_answer_is(
    server: FakeServer, engine: VLLMServerEngine, in_stream: bool
):
    server.errors_in_stream = in_stream
    server.answer = lambda body: (400, "too long")
    with pytest.raises(ValueError, match=r"server-0.*too long"):
        asyncio.run(engine.generate(request()))
    server.answer = lambda body: (500, "odd")
    with pytest.raises(RuntimeError, match="answered 500: odd") as error:
        asyncio.run(engine.generate(request()))
    assert not isinstance(error.value, EngineError)
    server.answer = lambda body: None
    assert asyncio.run(engine.generate(request())).token_ids == [11, 12, 13]
    server.facts["alive"] = False
    server.answer = lambda body: (500, "EngineDead")
    with pytest.raises(EngineDiedError):
        asyncio.run(engine.generate(request()))


def test_a_failed_load_ends_the_engine(server: FakeServer, engine: VLLMServerEngine):
    with pytest.raises(EngineError, match=r"version 1 failed: .*torn") as error:
        asyncio.run(engine.load_weights(1, source(1, bad=True)))
    assert not isinstance(error.value, EngineDiedError)
    with pytest.raises(EngineError, match="version 1 failed"):
        asyncio.run(engine.generate(request()))


def test_weights_travel_as_the_server_was_started_for(server: FakeServer):
    def start(weight_transfer: str) -> str:
        engine = VLLMServerEngine(
            server.url, weights_dir="w", weight_transfer=weight_transfer, dtype="float32", start_timeout_s=0.0
        )
        try:
            asyncio.run(engine.start())
            return engine.weight_backend
        finally:
            asyncio.run(engine.close())

    assert start("auto") == start("file") == "async_rl_file"
    with pytest.raises(EngineError, match=r"not NCCL: .*serve --weight-transfer nccl`.*engine\.weight_transfer=file"):
        start("nccl")
    server.facts["weight_backend"] = "async_rl_nccl"
    assert start("auto") == start("nccl") == "async_rl_nccl"
    with pytest.raises(EngineError, match=r"not files: .*serve --weight-transfer file`.*engine\.weight_transfer=nccl"):
        start("file")
    with pytest.raises(ValueError, match="auto, file or nccl, not 'ipc'"):
        start("ipc")


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"weight_backend": "nccl"}, r"'nccl', not files: .*async_rl\.serve"),
        ({"weight_backend": ""}, "'nothing', not files"),
        ({"logprobs_mode": "raw_logprobs"}, "--logprobs-mode processed_logprobs"),
        ({"dtype": "bfloat16"}, r"computes in bfloat16, but engine\.dtype=float32"),
        ({"model": ""}, r"not started for training: .*--middleware async_rl"),
        ({"alive": False}, "engine core"),
    ],
)
def test_a_server_that_was_not_started_for_training_is_refused(server: FakeServer, facts: dict, message: str):
    server.facts.update(facts)
    engine = VLLMServerEngine(server.url, weights_dir="w", dtype="float32", start_timeout_s=0.0)
    with pytest.raises(EngineError, match=message):
        asyncio.run(engine.start())
    asyncio.run(engine.close())


def test_the_first_start_waits_for_the_server_and_later_ones_do_not(server: FakeServer, caplog):
    server.kill()
    engine = VLLMServerEngine(server.url, weights_dir="w", dtype="float32", start_timeout_s=PATIENCE_S)
    threading.Timer(0.3, server.start).start()
    with caplog.at_level("INFO", logger="async_rl"):
        asyncio.run(engine.start())
    (told,) = [record for record in caplog.records if "waiting for it" in record.message]
    assert told.levelname == "INFO"
    assert f"the server at {server.url} can't be reached" in told.message
    assert "waiting for it up to 10 s (engine.start_timeout_s)" in told.message
    assert f"`python -m async_rl.serve MODEL --port {server.url.rpartition(':')[2]}`" in told.message
    assert "engine.urls=[http://HOST:PORT,...]" in told.message
    asyncio.run(engine.close())
    server.kill()
    began_s = time.monotonic()
    with pytest.raises(EngineError, match="can't be reached"):
        asyncio.run(engine.start())
    assert time.monotonic() - began_s < PATIENCE_S / 2
    server.start()


def test_the_key_is_sent_from_the_environment_and_shown_nowhere(server: FakeServer, monkeypatch, caplog):
    server.key = secret = "hunter2-hunter2"
    made = vllm_servers([server.url], weights_dir="w", dtype="float32", start_timeout_s=0.0)[0]
    with pytest.raises(EngineError, match=f"refuses the key: set {KEY_VARIABLE}"):
        asyncio.run(made.start())
    monkeypatch.setenv(KEY_VARIABLE, secret)
    with caplog.at_level("DEBUG"):
        asyncio.run(made.start())
        server.kill()
        error = wait_for_death(made)
    asyncio.run(made.close())
    server.start()
    assert secret not in caplog.text + str(error) + repr(vars(made))


def test_impossible_servers_are_refused():
    with pytest.raises(ValueError, match="is empty"):
        vllm_servers([], weights_dir="w")
    with pytest.raises(ValueError, match="twice"):
        vllm_servers(["http://127.0.0.1:1", "http://127.0.0.1:1/"], weights_dir="w")
    with pytest.raises(ValueError, match="kv_max_age"):
        VLLMServerEngine("http://127.0.0.1:1", weights_dir="w", kv_max_age=-1)
    assert [e.name for e in vllm_servers(["http://127.0.0.1:1", "http://[::1]:2"], weights_dir="w")] == [
        "server-0",
        "server-1",
    ]
