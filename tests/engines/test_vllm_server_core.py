"""VLLMServerEngine against a server that tests steer: what is sent, what is believed, and what counts as its death."""

from __future__ import annotations

import asyncio
import json
import math
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest
from aiohttp import web

from async_rl.engines.base import EngineDiedError, EngineError, GenerationRequest, SamplingParams
from async_rl.engines.vllm_server import VLLMServerEngine, vllm_servers
from async_rl.engines.vllm_server_address import KEY_VARIABLE
from async_rl.engines.vllm_server_lease import LEASE_S, RUN_HEADER, NotHeldError, ServerLease

FACTS = {
    "alive": True,
    "model": "tiny",
    "dtype": "float32",
    "weight_backend": "async_rl_file",
    "stages": True,
    "workers": 1,
    "logprobs_mode": "processed_logprobs",
    "max_model_len": 512,
}
PATIENCE_S = 10.0


class FakeServer:
    """The routes of a vLLM server and of ours, in a thread; ``gate`` holds the rest of every stream back."""

    def __init__(self) -> None:
        self.facts = dict(FACTS)
        self.key = ""
        self.label = "default"
        self.calls: list[str] = []
        self.bodies: list[dict] = []
        self.broken_off = 0
        self.gate = threading.Event()
        self.gate.set()
        self.started = threading.Semaphore(0)
        self.answer = lambda body: None
        self.errors_in_stream = False
        self.port = 0
        self.start()

    def start(self) -> None:
        """Serve; again on the same port after :meth:`kill`, as a server that was started again."""
        self.facts["incarnation"] = uuid.uuid4().hex
        self.now_s = 0.0
        self.lease = ServerLease(lambda: self.now_s)
        self.loop = asyncio.new_event_loop()
        ready = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(ready,), daemon=True)
        self._thread.start()
        assert ready.wait(PATIENCE_S)

    def kill(self) -> None:
        """End at once, connections included."""
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self.loop).result(PATIENCE_S)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(PATIENCE_S)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def _run(self, ready: threading.Event) -> None:
        asyncio.set_event_loop(self.loop)
        app = web.Application()
        app.router.add_get("/async_rl/info", self._info)
        app.router.add_post("/async_rl/{name}", self._call)
        app.router.add_post("/inference/v1/generate", self._generate)
        self._runner = web.AppRunner(app, shutdown_timeout=0.01)
        self.loop.run_until_complete(self._runner.setup())
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        self.loop.run_until_complete(site.start())
        self.port = site._server.sockets[0].getsockname()[1]
        ready.set()
        self.loop.run_forever()

    def _refused(self, request: web.Request) -> bool:
        return bool(self.key) and request.headers.get("Authorization") != f"Bearer {self.key}"

    async def _info(self, request: web.Request) -> web.Response:
        if self._refused(request):
            return web.json_response({"error": "key"}, status=401)
        if not self.facts["model"]:
            return web.json_response({"detail": "Not Found"}, status=404)
        yours = self.lease.renew(request.headers[RUN_HEADER])
        return web.json_response({"result": {**self.facts, "yours": yours, "holder": self.lease.holder}})

    async def _call(self, request: web.Request) -> web.Response:
        name, body, run = request.match_info["name"], await request.json(), request.headers[RUN_HEADER]
        if name == "claim":
            return web.json_response({"result": asdict(self.lease.claim(run, body["who"]))})
        if name == "release":
            return web.json_response({"result": self.lease.release(run)})
        try:
            with self.lease.call(run):
                return await self._held_call(name, body)
        except NotHeldError as error:
            return web.json_response({"error": str(error)}, status=409)

    async def _held_call(self, name: str, body: dict) -> web.Response:
        self.calls.append(name)
        if name == "load":
            self.bodies.append(body)
            if body["info"].get("bad"):
                return web.json_response({"error": "WeightLoadError: torn"}, status=500)
            self.label = body["label"]
        return web.json_response({"result": True})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        if (answer := self.answer(body)) is not None:
            error = {"error": {"message": answer[1], "code": answer[0]}}
            if self.errors_in_stream:
                return web.Response(body=f"data: {json.dumps(error)}\n\ndata: [DONE]\n\n".encode())
            return web.json_response(error, status=answer[0])
        if not body["stream"]:
            rows = [None, *({str(t): {"logprob": -0.5}, "0": {"logprob": -9.0}} for t in body["token_ids"][1:])]
            choice = {"token_ids": [1], "finish_reason": "length", "weight_versions": []}
            return web.json_response({"choices": [choice], "prompt_logprobs": rows})
        response = web.StreamResponse()
        await response.prepare(request)
        first = self.label
        self.started.release()
        try:
            if body["token_ids"][0] != 99:  # 99: waits for its first token
                await response.write(_event([11], [-1.0]))
            while not self.gate.is_set():
                await asyncio.sleep(0.005)
                if request.transport is None or request.transport.is_closing():
                    raise ConnectionResetError
            spans = [(first, 0, 1), (self.label, 1, 3)] if first != self.label else [(first, 0, 3)]
            tokens = ([12, 13], [-2.0, -9999.0]) if body["token_ids"][0] != 99 else ([11, 12, 13], [-1.0] * 3)
            last = _event(*tokens, "stop", spans) + b"data: [DONE]\n\n"
            for i in range(0, len(last), 7):  # in pieces that end anywhere
                await response.write(last[i : i + 7])
        except ConnectionError:
            self.broken_off += 1
            raise
        return response


def _event(token_ids, logprobs, finish_reason=None, spans=()) -> bytes:
    choice = {
        "token_ids": token_ids,
        "logprobs": {"content": [{"token_id": t, "logprob": p} for t, p in zip(token_ids, logprobs, strict=True)]},
        "finish_reason": finish_reason,
        "weight_versions": [{"version": v, "start": s, "end": e} for v, s, e in spans] or None,
    }
    return f"data: {json.dumps({'choices': [choice]})}\n\n".encode()


def source(version: int, **info) -> SimpleNamespace:
    return SimpleNamespace(backend="async_rl_file", version=version, update_info=lambda: {"path": "x", **info})


def request(prompt=(5, 6, 7), **sampling) -> GenerationRequest:
    return GenerationRequest("r", prompt, SamplingParams(**{"max_tokens": 8, **sampling}), 3)


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
    deadline_s = time.monotonic() + PATIENCE_S
    while not server.broken_off and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert server.broken_off == 1


def test_a_killed_server_is_a_death_at_once_and_is_found_again(server: FakeServer, engine: VLLMServerEngine):
    server.gate.clear()

    async def run():
        running = [asyncio.ensure_future(engine.generate(request())) for _ in range(3)]
        await asyncio.to_thread(server.started.acquire, timeout=PATIENCE_S)
        killed_s = time.monotonic()
        await asyncio.to_thread(server.kill)
        results = await asyncio.gather(*running, return_exceptions=True)
        assert time.monotonic() - killed_s < 2
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


def wait_for_death(engine: VLLMServerEngine) -> EngineDiedError:
    deadline_s = time.monotonic() + PATIENCE_S
    while engine.died is None and time.monotonic() < deadline_s:
        time.sleep(0.01)
    return engine.died


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


def another(server: FakeServer, patience_s: float = PATIENCE_S, **arguments) -> VLLMServerEngine:
    return VLLMServerEngine(
        server.url, weights_dir="w2", dtype="float32", name="server-1", start_timeout_s=patience_s, **arguments
    )


def test_a_second_run_is_refused_before_it_changes_anything(server: FakeServer, engine: VLLMServerEngine, caplog):
    server.calls.clear()
    newcomer, began_s = another(server), time.monotonic()
    with caplog.at_level("INFO", logger="async_rl"), pytest.raises(EngineError) as error:
        asyncio.run(newcomer.start())
    assert 0.5 < time.monotonic() - began_s < 5  # two signs of life, not a whole lease
    asyncio.run(newcomer.close())
    message = str(error.value)
    assert message.startswith(f"engine server-1: the server at {server.url} is in use by another run (")
    assert f"{Path('w').absolute()}, process {os.getpid()} on {socket.gethostname()}" in message
    assert "stop it; or start a server for this one" in message
    assert engine._run not in message + caplog.text
    assert "looking whether that one still lives" in caplog.text
    assert server.calls == []
    assert engine.died is None
    assert asyncio.run(engine.generate(request())).token_ids == [11, 12, 13]


def test_a_run_that_ended_leaves_the_server_free(server: FakeServer, engine: VLLMServerEngine):
    asyncio.run(engine.close())
    newcomer = another(server, patience_s=0.0, run_dir="runs/one")
    asyncio.run(newcomer.start())
    assert server.lease.holder.startswith(str(Path("runs/one").absolute()))
    asyncio.run(newcomer.close())
    assert server.lease.holder == ""


def test_the_server_of_a_killed_run_is_waited_for_until_its_lease_runs_out(server: FakeServer, caplog):
    assert server.lease.claim("killed", "a killed run").granted
    newcomer = another(server)
    threading.Timer(1.0, lambda: server.lease.renew("killed")).start()  # the question it had under way
    threading.Timer(1.5, lambda: setattr(server, "now_s", LEASE_S)).start()
    with caplog.at_level("INFO", logger="async_rl"):
        asyncio.run(newcomer.start())
    assert "(a killed run)" in caplog.text
    assert server.lease.holder != "a killed run"
    asyncio.run(newcomer.close())


def test_without_the_time_to_wait_a_killed_run_is_named_with_what_is_known_of_it(server: FakeServer):
    server.lease.claim("killed", "a killed run")
    server.now_s = 3.0
    with pytest.raises(EngineError, match=r"\(a killed run, last heard of 3 s ago\).* loses it after 20 s"):
        asyncio.run(another(server, patience_s=0.0).start())


@pytest.mark.parametrize("asked", [False, True])
def test_a_run_that_was_stopped_for_long_learns_that_its_server_has_gone_to_another(
    server: FakeServer, engine: VLLMServerEngine, asked: bool
):
    server.now_s += LEASE_S
    assert server.lease.claim("b", "run B").granted
    if asked:  # before its own question tells it
        with pytest.raises(EngineDiedError, match=r"run B"):
            asyncio.run(engine.load_weights(1, source(1)))
    else:
        assert f"{server.url} has been given to another run (run B)" in str(wait_for_death(engine))
    assert server.calls.count("load") == 1
    server.lease.release("b")
    asyncio.run(engine.close())
    asyncio.run(engine.start())  # as the control plane does, every second
    asyncio.run(engine.load_weights(1, source(1)))


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
    assert "waiting for it up to 10 s" in caplog.text
    asyncio.run(engine.close())
    server.kill()
    began_s = time.monotonic()
    with pytest.raises(EngineError, match="can't be reached"):
        asyncio.run(engine.start())
    assert time.monotonic() - began_s < 1
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
