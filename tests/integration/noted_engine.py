"""Noted: an engine that writes down what it was asked for, and a callback that keeps the groups."""

import asyncio
import time
from dataclasses import dataclass

from fit_kit import Recorder


@dataclass(frozen=True)
class Request:
    """A request that was answered: when, and by which versions."""

    name: str
    began_s: float
    ended_s: float
    versions: list[int]


class Noted:
    """Writes down what an engine was asked for: each request and each load, with its times."""

    load_delay_s = 0.0

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.asked: list[Request] = []
        self.loaded: list[tuple[int, float, float]] = []

    async def generate(self, request):
        began_s = time.time()
        generation = await super().generate(request)
        versions = [s.version for s in generation.segments]
        self.asked.append(Request(request.request_id, began_s, time.time(), versions))
        return generation

    async def load_weights(self, version, source):
        if self.loaded:
            await asyncio.sleep(self.load_delay_s)
        begun_s = time.time()
        await super().load_weights(version, source)
        self.loaded.append((version, begun_s, time.time()))

    def served_at(self, at_s):
        """The version that was confirmed last, at a time; -1 before the first."""
        return max((version for version, _, confirmed_s in self.loaded if confirmed_s <= at_s), default=-1)

    def begun_at(self, at_s):
        """The newest version that may have been served at a time."""
        return max((version for version, begun_s, _ in self.loaded if begun_s <= at_s), default=-1)


class Finished(Recorder):
    def __init__(self):
        super().__init__()
        self.groups = []

    def on_rollout_end(self, trainer, policy, group):
        self.groups.append(group)
