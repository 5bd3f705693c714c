"""ScriptedEngine: stamps, latencies on a given clock, failures."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from async_rl.engines.base import EngineDiedError, EngineError, GenerationRequest, SamplingParams
from async_rl.engines.scripted import ScriptedEngine
from async_rl.engines.stamps import segments_of
from async_rl.types import Segment


class VirtualClock:
    """Time that only moves when everybody sleeps."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []

    def time(self) -> float:
        return self.now_s

    async def sleep(self, seconds: float) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._sleepers.append((self.now_s + seconds, len(self._sleepers), future))
        await future

    async def run(self, *coroutines: Any) -> list[Any]:
        together = asyncio.gather(*coroutines, return_exceptions=True)
        while not together.done():
            for _ in range(20):
                await asyncio.sleep(0)
            if self._sleepers:
                self._sleepers.sort(key=lambda s: s[:2])
                self.now_s, _, future = self._sleepers.pop(0)
                if not future.done():
                    future.set_result(None)
        return await together


def request(prompt: tuple[int, ...] = (1, 2), seed: int = 0, max_tokens: int = 100) -> GenerationRequest:
    return GenerationRequest(f"r{seed}", prompt, SamplingParams(max_tokens=max_tokens), seed)


def engine_on(clock: VirtualClock, **kwargs: Any) -> ScriptedEngine:
    kwargs.setdefault("output", lambda prompt, seed: [seed] * 10)
    return ScriptedEngine(
        kwargs.pop("output"), kwargs.pop("latency_s", 1.0), clock=clock.time, sleep=clock.sleep, **kwargs
    )


def test_a_swap_in_flight_gives_one_segment_per_version() -> None:
    clock = VirtualClock()
    engine = engine_on(clock)

    async def swap(version: int, at_s: float) -> None:
        await clock.sleep(at_s)
        await engine.load_weights(version, None)  # type: ignore[arg-type]

    async def go() -> list[Any]:
        await clock.run(engine.load_weights(4, None))  # type: ignore[arg-type]
        return await clock.run(engine.generate(request()), swap(5, 0.25), swap(6, 0.75))

    generation, *_ = asyncio.run(go())
    assert generation.segments == (Segment(4, 0, 2), Segment(5, 2, 7), Segment(6, 7, 10))
    assert generation.token_ids == [0] * 10
    assert len(generation.logprobs) == 10
    assert clock.now_s == pytest.approx(1.0)
    assert [(r.version, r.running) for r in engine.loads] == [(4, 0), (5, 1), (6, 1)]
    stats = engine.stats()
    assert (stats.generated_tokens, stats.loads) == (10, 3)
    assert stats.busy_s == pytest.approx(1.0)


def test_an_engine_that_keeps_versions_alive_stamps_only_the_first() -> None:
    clock = VirtualClock()
    engine = engine_on(clock, versions_alive=2)

    async def swap() -> None:
        await clock.sleep(0.5)
        await engine.load_weights(1, None)  # type: ignore[arg-type]

    async def go() -> list[Any]:
        await clock.run(engine.load_weights(0, None))  # type: ignore[arg-type]
        return await clock.run(engine.generate(request()), swap())

    generation, _ = asyncio.run(go())
    assert generation.segments == (Segment(0, 0, 10),)


def test_latency_and_output_are_functions_of_prompt_and_seed() -> None:
    clock = VirtualClock()
    engine = engine_on(
        clock, output=lambda prompt, seed: [*prompt, seed], latency_s=lambda prompt, seed: float(seed), load_s=2.0
    )

    async def go() -> Any:
        await clock.run(engine.load_weights(0, None))  # type: ignore[arg-type]
        assert clock.now_s == 2.0
        (generation,) = await clock.run(engine.generate(request((7, 8), seed=5, max_tokens=2)))
        return generation

    generation = asyncio.run(go())
    assert clock.now_s == pytest.approx(7.0)
    assert (generation.token_ids, generation.finish_reason) == ([7, 8], "length")


def test_failures_are_raised_where_they_are_scripted() -> None:
    clock = VirtualClock()
    engine = engine_on(
        clock,
        fail_generate=lambda r: ValueError("no") if r.seed == 1 else None,
        fail_load=lambda version: OSError("disk") if version == 2 else None,
    )

    async def go() -> list[Any]:
        early = await clock.run(engine.generate(request()))
        await clock.run(engine.load_weights(0, None))  # type: ignore[arg-type]
        some = await clock.run(engine.generate(request()), engine.generate(request(seed=1)))
        load = await clock.run(engine.load_weights(2, None))  # type: ignore[arg-type]
        after = await clock.run(engine.generate(request()), engine.score((1, 2)))
        return [*early, *some, *load, *after]

    early, good, bad, load, after, score = asyncio.run(go())
    assert isinstance(early, EngineError)
    assert "before its first load_weights" in str(early)
    assert good.finish_reason == "stop"
    assert isinstance(bad, ValueError)
    assert isinstance(load, EngineError)
    assert "scripted-0" in str(load)
    assert "version 2" in str(load)
    assert isinstance(after, EngineError)
    assert isinstance(score, EngineError)


def test_close_fails_what_runs() -> None:
    clock = VirtualClock()
    engine = engine_on(clock)

    async def close() -> None:
        await clock.sleep(0.55)
        await engine.close()
        await engine.close()

    async def go() -> list[Any]:
        await clock.run(engine.load_weights(0, None))  # type: ignore[arg-type]
        return await clock.run(engine.generate(request()), close())

    result, _ = asyncio.run(go())
    assert isinstance(result, EngineError)
    assert clock.now_s == pytest.approx(0.6)


def test_a_dead_engine_fails_everything_and_is_a_new_one_once_started_again() -> None:
    clock = VirtualClock()
    engine = engine_on(clock, load_s=0.3)

    async def life() -> None:
        await clock.sleep(0.55)
        engine.die()
        assert isinstance(engine.died, EngineDiedError)
        await clock.sleep(0.25)  # one request notices the death, the other one only that the engine is new
        await engine.close()
        await engine.start()
        assert engine.died is None

    async def slow() -> Any:
        await clock.sleep(0.54)
        return await engine.load_weights(1, None)  # type: ignore[arg-type]

    async def go() -> list[Any]:
        await clock.run(engine.load_weights(0, None))  # type: ignore[arg-type]
        results = await clock.run(engine.generate(request()), engine.generate(request(max_tokens=1)), slow(), life())
        results += await clock.run(engine.generate(request()))
        await clock.run(engine.load_weights(2, None))  # type: ignore[arg-type]
        return results + await clock.run(engine.generate(request()))

    *dead, ended, early, good = asyncio.run(go())
    assert ended is None
    assert [type(error) for error in dead] == [EngineDiedError] * 3
    assert type(early) is EngineError
    assert "before its first load_weights" in str(early)
    assert good.segments == (Segment(2, 0, 10),)
    assert [load.version for load in engine.loads] == [0, 2]


def test_segments_of_is_run_length_encoding() -> None:
    assert segments_of([]) == ()
    assert segments_of([1, 1, 2, 1]) == (Segment(1, 0, 2), Segment(2, 2, 3), Segment(1, 3, 4))
