"""A server is one run's at a time: who is refused, who is waited for, and who learns that it has lost it."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from server_kit import PATIENCE_S, FakeServer, request, source, wait_for_death

from async_rl.engines.base import EngineDiedError, EngineError
from async_rl.engines.vllm_server import VLLMServerEngine
from async_rl.engines.vllm_server_lease import LEASE_S


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


def another(server: FakeServer, patience_s: float = PATIENCE_S, **arguments) -> VLLMServerEngine:
    return VLLMServerEngine(
        server.url, weights_dir="w2", dtype="float32", name="server-1", start_timeout_s=patience_s, **arguments
    )


def test_a_second_run_is_refused_before_it_changes_anything(server: FakeServer, engine: VLLMServerEngine, caplog):
    server.calls.clear()
    newcomer, began_s = another(server), time.monotonic()
    with caplog.at_level("INFO", logger="async_rl"), pytest.raises(EngineError) as error:
        asyncio.run(newcomer.start())
    assert 0.5 < time.monotonic() - began_s < 15  # two signs of life, not a whole lease
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
    assert "that run is gone" in caplog.text
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
