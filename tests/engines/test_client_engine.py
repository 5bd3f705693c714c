"""ClientEngine: an engine that is closed while it starts."""

from __future__ import annotations

import asyncio
import threading

import pytest

from async_rl.engines.client_engine import ClientEngine


class NeverUp(ClientEngine):
    """Starts until it is told not to."""

    def __init__(self):
        super().__init__("never-up", "float32", start_timeout_s=60.0)
        self.opening, self.given_up = threading.Event(), threading.Event()

    async def _open(self):
        self.opening.set()
        try:
            await asyncio.sleep(600)
        finally:
            self.given_up.set()


def test_closing_it_gives_its_start_up_and_waits_for_that():
    engine, raised = NeverUp(), []

    def start():
        try:
            asyncio.run(engine.start())
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=start, daemon=True)
    thread.start()
    assert engine.opening.wait(60)
    asyncio.run(engine.close())  # from another loop, as at the end of a run
    assert engine.given_up.is_set()
    thread.join(60)
    assert not thread.is_alive()
    assert [type(error) for error in raised] == [asyncio.CancelledError]


def test_a_cancelled_start_is_given_up_and_can_be_made_again():
    engine = NeverUp()

    async def run():
        for _ in range(2):
            engine.given_up.clear()
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(engine.start(), 0.05)
            assert engine.given_up.is_set()
        await engine.close()

    asyncio.run(run())
