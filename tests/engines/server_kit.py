"""A vLLM server that tests steer, and what they ask of it."""

from __future__ import annotations

import asyncio
import json
import threading
import time
import uuid
from dataclasses import asdict
from types import SimpleNamespace

from aiohttp import web

from async_rl.engines.base import EngineDiedError, GenerationRequest, SamplingParams
from async_rl.engines.vllm_server import VLLMServerEngine
from async_rl.engines.vllm_server_lease import RUN_HEADER, NotHeldError, ServerLease

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
        self.breaks_off = threading.Semaphore(0)
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
            self.breaks_off.release()
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


def wait_for_death(engine: VLLMServerEngine) -> EngineDiedError:
    deadline_s = time.monotonic() + PATIENCE_S
    while engine.died is None and time.monotonic() < deadline_s:
        time.sleep(0.01)
    return engine.died
