"""The middleware of a vLLM server: who is answered, and what the routes call."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from async_rl.engines import vllm_server_routes
from async_rl.engines.vllm_server_address import KEY_VARIABLE
from async_rl.engines.vllm_server_lease import LEASE_S, RUN_HEADER, ServerLease
from async_rl.engines.vllm_server_routes import CALLS, ServerRoutes

SECRET = "hunter2-hunter2"
LOCAL, ELSEWHERE = ("127.0.0.1", 5), ("10.0.0.9", 5)


class FakeLLM:
    """Notes what is called on it; the part of AsyncLLM that the routes use."""

    errored = False

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.fails: Exception | None = None
        self.engine_core = SimpleNamespace(
            pause_scheduler_async=self._note("pause"), resume_scheduler_async=self._note("resume")
        )
        self.vllm_config = SimpleNamespace(
            model_config=SimpleNamespace(
                model="m", dtype="torch.float32", logprobs_mode="p", generation_config="vllm", max_model_len=9
            ),
            weight_transfer_config=SimpleNamespace(backend="async_rl_file"),
            parallel_config=SimpleNamespace(worker_extension_cls="x.StagingExtension", world_size_across_dp=2),
        )
        for name in ("init_weight_transfer_engine", "get_supported_tasks", "start_weight_update", "update_weights"):
            setattr(self, name, self._note(name))
        self.finish_weight_update = self._note("finish_weight_update")
        self.collective_rpc = self._note("rpc", [True])
        self.reset_prefix_cache = self._note("reset")

    def _note(self, name: str, result: Any = None):
        async def call(*args: Any, **kwargs: Any) -> Any:
            self.calls.append((name, args, kwargs))
            if self.fails is not None:
                raise self.fails
            return result

        return call

    def names(self) -> list[str]:
        return [name for name, _, _ in self.calls]


def ask(
    routes: ServerRoutes,
    method: str,
    path: str,
    body: Any = None,
    *,
    client: Any = LOCAL,
    key: str = "",
    run: str = "mine",
    llm: Any = None,
    raw: bytes | None = None,
) -> tuple[int, Any]:
    """One request; 418 is what vLLM's own application answers with."""
    data = raw if raw is not None else json.dumps(body).encode() if body is not None else b""
    messages = [{"type": "http.request", "body": data[i : i + 5], "more_body": True} for i in range(0, len(data), 5)]
    messages.append({"type": "http.request", "body": b"", "more_body": False})
    sent: list[dict] = []

    async def receive() -> dict:
        return messages.pop(0)

    async def send(message: dict) -> None:
        sent.append(message)

    headers = [(RUN_HEADER.lower().encode(), run.encode())]
    headers += [(b"authorization", f"Bearer {key}".encode())] if key else []
    app = SimpleNamespace(state=SimpleNamespace(engine_client=llm or FakeLLM()))
    scope = {"type": "http", "method": method, "path": path, "headers": headers, "client": client, "app": app}
    asyncio.run(routes(scope, receive, send))
    return sent[0]["status"], json.loads(sent[1]["body"] or b"null")


async def vllms_own(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 418, "headers": []})
    await send({"type": "http.response.body", "body": b""})


def claim(routes: ServerRoutes, run: str) -> dict[str, Any]:
    status, content = ask(routes, "POST", "/async_rl/claim", {"who": f"run {run}"}, run=run)
    assert status == 200
    return content["result"]


@pytest.fixture
def open_routes(monkeypatch: pytest.MonkeyPatch) -> ServerRoutes:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    routes = ServerRoutes(vllms_own)
    assert claim(routes, "mine")["granted"]
    return routes


@pytest.mark.parametrize("path", ["/async_rl/info", "/inference/v1/generate", "/v1/models", "/metrics", "/anything"])
def test_with_a_key_nothing_but_health_is_answered_without_it(monkeypatch, path):
    monkeypatch.setenv(KEY_VARIABLE, SECRET)
    routes = ServerRoutes(vllms_own)
    for client in (LOCAL, ELSEWHERE):
        for wrong in ("", "hunter2", SECRET + "x"):
            status, content = ask(routes, "GET", path, client=client, key=wrong)
            assert status == 401
            assert KEY_VARIABLE in content["error"]
            assert SECRET not in content["error"]
        assert ask(routes, "GET", path, client=client, key=SECRET)[0] == (200 if path.startswith("/async_rl") else 418)
        assert ask(routes, "GET", "/health", client=client)[0] == 418


def test_without_a_key_only_this_machine_is_answered(open_routes):
    assert ask(open_routes, "GET", "/v1/models")[0] == 418
    assert ask(open_routes, "GET", "/async_rl/info", client=("::1", 1))[0] == 200
    for client in (ELSEWHERE, None):
        for path in ("/v1/models", "/async_rl/info"):
            status, content = ask(open_routes, "GET", path, client=client)
            assert (status, KEY_VARIABLE in content["error"]) == (401, True)


def test_websockets_are_closed(open_routes):
    sent: list[dict] = []

    async def send(message: dict) -> None:
        sent.append(message)

    asyncio.run(open_routes({"type": "websocket", "path": "/v1/realtime"}, None, send))
    assert [m["type"] for m in sent] == ["websocket.close"]


def test_facts(open_routes):
    status, content = ask(open_routes, "GET", "/async_rl/info")
    facts = content["result"]
    assert status == 200
    assert {k: facts[k] for k in ("alive", "dtype", "weight_backend", "stages", "workers", "max_model_len")} == {
        "alive": True, "dtype": "float32", "weight_backend": "async_rl_file", "stages": True, "workers": 2,
        "max_model_len": 9,
    }  # fmt: skip
    assert ask(open_routes, "GET", "/async_rl/info")[1]["result"]["incarnation"] == facts["incarnation"]
    assert ask(ServerRoutes(vllms_own), "GET", "/async_rl/info")[1]["result"]["incarnation"] != facts["incarnation"]


def test_a_link_is_joined_by_every_worker(open_routes):
    llm = FakeLLM()
    info = {"link": "a", "world_size": 3}
    assert ask(open_routes, "POST", "/async_rl/connect", {"info": info}, llm=llm) == (200, {"result": None})
    assert llm.names() == ["init_weight_transfer_engine"]
    assert llm.calls[0][1][0].init_info == info


def test_a_load_is_one_call_and_carries_the_label(open_routes):
    llm = FakeLLM()
    assert ask(open_routes, "POST", "/async_rl/stage", {"info": {"path": "x"}}, llm=llm) == (200, {"result": True})
    assert ask(open_routes, "POST", "/async_rl/pause", {}, llm=llm)[0] == 200
    assert ask(open_routes, "POST", "/async_rl/load", {"info": {"path": "x"}, "label": "t-3"}, llm=llm)[0] == 200
    assert ask(open_routes, "POST", "/async_rl/resume", llm=llm)[0] == 200
    assert llm.names() == [
        "rpc", "pause", "start_weight_update", "update_weights", "finish_weight_update", "resume",
    ]  # fmt: skip
    assert llm.calls[1][2] == {"mode": "keep", "clear_cache": False}
    assert llm.calls[4][2] == {"weight_version": "t-3"}


def test_running_requests_are_made_to_compute_their_keys_anew(open_routes):
    llm = FakeLLM()
    assert ask(open_routes, "POST", "/async_rl/recompute", {}, llm=llm) == (200, {"result": None})
    assert [(name, kwargs) for name, _, kwargs in llm.calls] == [("reset", {"reset_running_requests": True})]


@pytest.mark.parametrize(
    ("method", "path", "raw", "status"),
    [
        ("POST", "/async_rl/collective_rpc", b"{}", 404),
        ("POST", "/async_rl/close", b"{}", 404),
        ("POST", "/async_rl/llm", b"{}", 404),
        ("GET", "/async_rl/pause", b"", 404),
        ("POST", "/async_rl/load", b"{", 400),
        ("POST", "/async_rl/load", b"[]", 400),
        ("POST", "/async_rl/load", b'{"label": "x"}', 400),
        ("POST", "/async_rl/load", b'{"info": {}}', 400),
        ("POST", "/async_rl/stage", b'{"info": 3}', 400),
        ("POST", "/async_rl/connect", b'{"info": "x"}', 400),
        ("POST", "/async_rl/stage", b'{"info": {' + b" " * 100 + b"}}", 400),
    ],
)
def test_what_is_not_a_route_or_not_json_is_refused(open_routes, monkeypatch, method, path, raw, status):
    monkeypatch.setattr(vllm_server_routes, "MOST_BYTES", 100)
    llm = FakeLLM()
    answered, content = ask(open_routes, method, path, raw=raw, llm=llm)
    assert answered == status
    assert content["error"]
    assert llm.calls == []


@pytest.mark.parametrize("name", CALLS)
def test_what_a_run_does_not_have_it_can_not_change(open_routes, name):
    llm, body = FakeLLM(), {"info": {"path": "x"}, "label": "t-3"}
    for run in ("other", ""):
        status, content = ask(open_routes, "POST", f"/async_rl/{name}", body, run=run, llm=llm)
        assert (status, content) == (409, {"error": "it is in use by another run (run mine)"})
    assert llm.calls == []
    assert ask(open_routes, "POST", "/async_rl/release", {})[0] == 200
    assert ask(open_routes, "POST", f"/async_rl/{name}", body, llm=llm)[0] == 409
    assert llm.calls == []


def test_the_question_how_the_server_is_renews_the_lease_of_the_run_that_asks(monkeypatch):
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    now_s = [0.0]
    routes = ServerRoutes(vllms_own, ServerLease(lambda: now_s[0]))

    def info(run: str) -> tuple[bool, str]:
        facts = ask(routes, "GET", "/async_rl/info", run=run)[1]["result"]
        return facts["yours"], facts["holder"]

    assert info("a") == (False, "")
    assert claim(routes, "a")["granted"]
    for _ in range(3):
        now_s[0] += LEASE_S - 1
        assert info("a") == (True, "run a")
    refused = claim(routes, "b")
    assert (refused["granted"], refused["holder"], refused["renewals"]) == (False, "run a", 3)
    now_s[0] += LEASE_S
    assert info("b") == (False, "run a")  # asks, and is no sign of life of the other
    assert claim(routes, "b")["granted"]
    assert info("a") == (False, "run b")


@pytest.mark.parametrize("body", [{}, {"who": 3}, {"who": "x" * 5000}])
def test_a_claim_says_who_wants_the_server(open_routes, body):
    assert ask(open_routes, "POST", "/async_rl/claim", body, run="other")[0] == 400


def test_errors_tell_death_from_failure(open_routes):
    from vllm.v1.engine.exceptions import EngineDeadError

    llm = FakeLLM()
    llm.fails = EngineDeadError()
    assert ask(open_routes, "POST", "/async_rl/pause", llm=llm)[0] == 503
    llm.fails = RuntimeError("torn")
    assert ask(open_routes, "POST", "/async_rl/pause", llm=llm) == (500, {"error": "RuntimeError: torn"})
