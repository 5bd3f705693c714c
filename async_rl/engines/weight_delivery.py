"""WeightDelivery: gets published weights into one engine, which fetches them or is sent them over a link of its own."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import Any, Protocol, TypeVar

from async_rl.weights.base import SentSource, WeightLink, WeightSource

T = TypeVar("T")
GRACE_S = 5.0
"""How long the engine is given to say what went wrong, after the trainer's end of a link has failed."""


class TakesWeights(Protocol):
    """The part of a :class:`~async_rl.engines.vllm_port.VLLMCore` that is needed here."""

    workers: int

    async def connect(self, info: Mapping[str, Any]) -> None:
        """Join a link."""
        ...

    async def load(self, info: Mapping[str, Any], label: str) -> None:
        """Put weights in place."""
        ...


class WeightDelivery:
    """Weights for one incarnation of an engine. Every method runs on one event loop, one load at a time.

    A link is made for the first load and serves the later ones. After a load that failed there is none any more, and no
    further load: what brings the engine back is a new one, with a link of its own. So no other engine takes part.

    Args:
        core: The engine.
    """

    def __init__(self, core: TakesWeights) -> None:
        self._core = core
        self._link: WeightLink | None = None

    async def prepare(self, source: WeightSource) -> dict[str, Any]:
        """What the engine has to be told to load ``source``; where that is sent, both ends are connected afterwards."""
        info = dict(source.update_info())
        if not isinstance(source, SentSource):
            return info
        if self._link is None:
            self._link = await in_daemon(partial(source.link, self._core.workers))
            await self._both(self._link, self._core.connect(self._link.init_info()), self._link.open)
        return {**info, "link": self._link.name}

    async def load(self, source: WeightSource, info: Mapping[str, Any], label: str) -> None:
        """Load ``source``, for which :meth:`prepare` gave ``info``; returns once the engine has confirmed it."""
        if self._link is None:
            await self._core.load(info, label)
        else:
            await self._both(self._link, self._core.load(info, label), partial(self._link.send, source))

    async def close(self) -> None:
        """Leave the link."""
        if self._link is not None:
            await in_daemon(self._link.close)

    async def _both(self, link: WeightLink, taking: Coroutine[Any, Any, None], sending: Callable[[], None]) -> None:
        """The engine's part and ours at once; neither goes on waiting for the other after that has failed."""
        taken = asyncio.ensure_future(taking)
        sent = in_daemon(sending)
        try:
            done, _ = await asyncio.wait((taken, sent), return_when=asyncio.FIRST_EXCEPTION)
            if taken not in done:  # the engine knows better what happened: that it is dead, or why it gave up
                await asyncio.wait((taken,), timeout=GRACE_S)
            if taken.done():
                await taken
            await sent
        except BaseException:
            taken.cancel()
            in_daemon(link.close)  # not waited for: it takes seconds where the engine is gone
            raise


def in_daemon(work: Callable[[], T]) -> asyncio.Future[T]:
    """Run blocking work in a daemon thread, which an interpreter that ends does not wait for."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
            future.exception()  # looked at, should nobody else do so
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, failure = None, None
        try:
            result = work()
        except BaseException as error:
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, result, failure)

    threading.Thread(target=run, name="weight-delivery", daemon=True).start()
    return future
