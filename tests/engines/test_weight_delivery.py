"""WeightDelivery: engine and trainer are at it together, and neither waits for the other after that has failed."""

import asyncio
import threading
import time

import pytest

from async_rl.engines import weight_delivery
from async_rl.engines.vllm_port import CoreDiedError
from async_rl.engines.weight_delivery import WeightDelivery, in_daemon

LONG_S = 20.0


class Link:
    """A link whose calls wait for the engine's, or until it is closed."""

    def __init__(self, number: int):
        self.name = f"link-{number}"
        self.engine_is_at_it = threading.Event()
        self.closed = threading.Event()
        self.sent = []
        self.fails = None

    def init_info(self):
        return {"link": self.name}

    def open(self):
        self._meet()

    def send(self, source):
        if self.fails is not None:
            raise self.fails
        self._meet()
        self.sent.append(source.version)

    def close(self):
        self.closed.set()
        self.engine_is_at_it.set()

    def _meet(self):
        assert self.engine_is_at_it.wait(LONG_S)
        self.engine_is_at_it.clear()
        if self.closed.is_set():
            raise RuntimeError("the group was closed")


class Source:
    """Weights that are sent."""

    backend = "x"

    def __init__(self, version, links):
        self.version, self._links = version, links

    def update_info(self):
        return {"names": ["a"]}

    def tensors(self):
        return iter(())

    def reserve(self):
        pass

    def release(self):
        pass

    def link(self, workers):
        self._links.append(Link(len(self._links)))
        self._links[-1].workers = workers
        return self._links[-1]


class Fetched(Source):
    """Weights that an engine fetches."""

    link = None

    def __getattribute__(self, name):
        if name == "link":
            raise AttributeError(name)
        return super().__getattribute__(name)


class Core:
    """An engine; ``answer`` is what it does when it is told to load."""

    workers = 3

    def __init__(self, links):
        self.links, self.calls = links, []
        self.answer = None

    async def connect(self, info):
        self.calls.append(("connect", info))
        self.links[-1].engine_is_at_it.set()

    async def load(self, info, label):
        self.calls.append(("load", info, label))
        if self.answer is not None:
            return await self.answer()
        if self.links:
            self.links[-1].engine_is_at_it.set()


async def load(delivery, source):
    await delivery.load(source, await delivery.prepare(source), f"t-{source.version}")


def test_one_link_serves_every_version():
    links = []

    async def run():
        core = Core(links)
        delivery = WeightDelivery(core)
        for version in (3, 4):
            await load(delivery, Source(version, links))
        await delivery.close()
        return core.calls

    told = {"names": ["a"], "link": "link-0"}
    assert asyncio.run(run()) == [("connect", {"link": "link-0"}), ("load", told, "t-3"), ("load", told, "t-4")]
    assert [link.workers for link in links] == [3]
    assert links[0].sent == [3, 4]
    assert links[0].closed.is_set()


def test_weights_that_are_fetched_need_no_link():
    async def run():
        core = Core([])
        delivery = WeightDelivery(core)
        await load(delivery, Fetched(3, []))
        await delivery.close()
        return core.calls

    assert asyncio.run(run()) == [("load", {"names": ["a"]}, "t-3")]


def fails_with(fault, answer, *, link_fault=None):
    """Load while the engine answers with ``answer``; the link must have been closed, and the error is the engine's."""
    links = []

    async def run():
        core = Core(links)
        delivery = WeightDelivery(core)
        source = Source(1, links)
        info = await delivery.prepare(source)
        core.answer = answer
        links[0].fails = link_fault
        began_s = time.monotonic()
        with pytest.raises(type(fault), match=str(fault)):
            await delivery.load(source, info, "t-1")
        return time.monotonic() - began_s

    took_s = asyncio.run(run())
    assert links[0].closed.wait(LONG_S)
    assert links[0].sent == []
    return took_s


def test_an_engine_that_dies_ends_the_sending():
    async def dies():
        await asyncio.sleep(0.02)
        raise CoreDiedError("the server broke off")

    assert fails_with(CoreDiedError("the server broke off"), dies) < LONG_S / 2


def test_what_the_engine_says_comes_before_what_its_link_says():
    async def dies_later():
        await asyncio.sleep(0.2)
        raise CoreDiedError("the server broke off")

    fails_with(CoreDiedError("the server broke off"), dies_later, link_fault=RuntimeError("NCCL error"))


def test_an_engine_that_waits_for_what_was_not_sent_is_left(monkeypatch):
    monkeypatch.setattr(weight_delivery, "GRACE_S", 0.1)

    async def waits():
        await asyncio.sleep(LONG_S)

    fault = RuntimeError("NCCL error")
    assert fails_with(fault, waits, link_fault=fault) < LONG_S / 2


def test_a_load_that_is_cancelled_ends_the_sending():
    links = []

    async def run():
        core = Core(links)
        delivery = WeightDelivery(core)
        source = Source(1, links)
        info = await delivery.prepare(source)
        core.answer = lambda: asyncio.sleep(LONG_S)
        task = asyncio.ensure_future(delivery.load(source, info, "t-1"))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    assert links[0].closed.wait(LONG_S)


def test_work_in_a_daemon_thread_outlives_its_loop_without_a_sound(capfd):
    go = threading.Event()

    async def run():
        in_daemon(lambda: go.wait(LONG_S))
        failing = in_daemon(lambda: 1 / 0)
        await asyncio.wait((failing,))  # its error is looked at by nobody

    asyncio.run(run())
    go.set()
    for thread in [t for t in threading.enumerate() if t.name == "weight-delivery"]:
        thread.join(LONG_S)
    assert not [t for t in threading.enumerate() if not t.daemon and t is not threading.main_thread()]
    assert "Exception" not in capfd.readouterr().err
