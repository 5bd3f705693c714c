"""VLLMEngine on a real vLLM: weights, stamps, caches, sampling, cancellation."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from async_rl.engines.base import EngineError, Generation, GenerationRequest, SamplingParams
from async_rl.engines.vllm import VLLMEngine
from async_rl.weights.parity import WeightParityError, check_parity, mean_tolerance
from async_rl.weights.publishers import make_publisher
from async_rl.weights.shared_memory import SharedMemoryPublisher

pytest.importorskip("vllm")
pytestmark = pytest.mark.vllm

TOLERANCE = 1e-4
SECOND_END_TOKEN = 50
SLOTS = 8


class Served:
    """An engine, the trainer's model and the publisher between them."""

    def __init__(self, engine: VLLMEngine, model: torch.nn.Module) -> None:
        self.engine = engine
        self.model = model
        self.publisher = make_publisher(engine.weight_backend, getattr(torch, engine.dtype))
        self.version = -1

    def perturb(self, scale: float, only: str = "") -> None:
        """Add noise of ``scale`` times each parameter's own spread."""
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if only in name:
                    spread = parameter.std() if parameter.numel() > 1 and parameter.std() > 0 else torch.tensor(1.0)
                    parameter.add_(torch.randn_like(parameter) * spread * scale)

    async def push(self) -> None:
        self.version += 1
        source = self.publisher.publish(self.model.named_parameters(), self.version)
        try:
            await self.engine.load_weights(self.version, source)
        finally:
            source.release()

    async def started(self, number: int) -> None:
        """Wait until ``number`` running requests have a token."""
        requests = self.engine._session.client._requests
        await until(lambda: sum(r.started for r in list(requests.values())) >= number)

    async def freeze(self) -> None:
        """Hold the scheduler, so that what is sent now stays queued until the next load."""
        core = self.engine._session.client.core.llm.engine_core
        await self.engine._session.thread.run(core.pause_scheduler_async(mode="keep", clear_cache=False))

    def distribution(self, token_ids: list[int]) -> torch.Tensor:
        """The trainer's logits for every next token, ``[seq, vocabulary]``."""
        with torch.no_grad():
            return self.model(torch.tensor([token_ids])).logits[0].float()

    def logprobs(self, token_ids: list[int], temperature: float = 1.0) -> torch.Tensor:
        """The trainer's log-probabilities of ``token_ids[1:]``."""
        logprobs = (self.distribution(token_ids) / temperature).log_softmax(-1)
        return logprobs[:-1].gather(1, torch.tensor(token_ids)[1:, None])[:, 0]

    def difference(self, prompt: tuple[int, ...], generation: Generation, temperature: float = 1.0) -> float:
        """Largest |engine - trainer| over the generated tokens."""
        reference = self.logprobs([*prompt, *generation.token_ids], temperature)[len(prompt) - 1 :]
        return float((reference - torch.tensor(generation.logprobs)).abs().max())


async def until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.002)


@pytest.fixture(scope="module")
def model_dir(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a second end token, as instruct models have."""
    directory = tmp_path_factory.mktemp("two_ends") / "model"
    shutil.copytree(tiny_model_dir, directory)
    path = directory / "generation_config.json"
    config = json.loads(path.read_text())
    # The sampling defaults must not have any effect.
    config.update(eos_token_id=[config["eos_token_id"], SECOND_END_TOKEN], temperature=0.1, top_k=2, do_sample=True)
    path.write_text(json.dumps(config))
    return directory


@pytest.fixture(scope="module")
def served(model_dir: Path) -> Iterator[Served]:
    from transformers import AutoModelForCausalLM

    engine = VLLMEngine(str(model_dir), dtype="float32", max_model_len=1024, max_num_seqs=SLOTS, kv_cache_gib=0.25)
    asyncio.run(engine.start())
    try:
        served = Served(engine, AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32))
        served.perturb(1.0)  # away from the flat start, so that a wrong weight shows
        asyncio.run(served.push())
        yield served
    finally:
        asyncio.run(engine.close())


def request(prompt: tuple[int, ...], seed: int = 0, **sampling) -> GenerationRequest:
    return GenerationRequest(f"test-{seed}", prompt, SamplingParams(**{"max_tokens": 32, **sampling}), seed)


def prompt_of(length: int, start: int = 5) -> tuple[int, ...]:
    return tuple(3 + (start * 7 + i * i) % 90 for i in range(length))


@pytest.mark.parametrize(("scale", "only"), [(0.5, ""), (0.01, ""), (1.0, "embed_tokens"), (0.5, "norm")])
def test_every_update_reaches_the_engine_tied_head_included(served: Served, scale: float, only: str):
    async def run() -> None:
        served.perturb(scale, only)
        await served.push()
        prompt = prompt_of(20)
        generation = await served.engine.generate(request(prompt, seed=3))
        assert served.difference(prompt, generation) <= TOLERANCE
        assert {s.version for s in generation.segments} == {served.version}
        scores = await served.engine.score((*prompt, *generation.token_ids))
        reference = served.logprobs([*prompt, *generation.token_ids])
        assert float((torch.tensor(scores) - reference).abs().max()) <= TOLERANCE

    asyncio.run(run())


def test_parity_passes_on_the_loaded_weights_and_fails_on_others(served: Served):
    async def check():
        return await check_parity(
            served.engine,
            lambda ids: served.logprobs(ids).tolist(),
            [prompt_of(60), prompt_of(60, start=9)],
            tolerance=mean_tolerance("float32"),
            version=served.version,
        )

    async def run() -> None:
        report = await check()
        assert report.tokens == 118
        served.perturb(0.2, "layers.3.mlp.down_proj")  # trained, not pushed
        with pytest.raises(WeightParityError, match=f"vllm-0.*version {served.version}"):
            await check()
        await served.push()
        await check()

    asyncio.run(run())


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.5])
def test_logprobs_are_those_of_the_tempered_distribution(served: Served, temperature: float):
    prompt = prompt_of(12)
    generation = asyncio.run(served.engine.generate(request(prompt, seed=1, temperature=temperature)))
    assert served.difference(prompt, generation, temperature) <= TOLERANCE


def test_greedy_takes_the_trainers_most_likely_tokens(served: Served):
    prompt = prompt_of(12)
    generation = asyncio.run(served.engine.generate(request(prompt, temperature=0.0, max_tokens=40)))
    logits = served.distribution([*prompt, *generation.token_ids])
    assert generation.token_ids == logits[len(prompt) - 1 : -1].argmax(-1).tolist()
    assert served.difference(prompt, generation) <= TOLERANCE


@pytest.mark.parametrize("cut", [{"top_p": 0.8}, {"top_k": 5}, {"min_p": 0.2}, {"top_p": 0.9, "top_k": 20}])
def test_logprobs_are_renormalised_over_the_tokens_kept(served: Served, cut: dict):
    prompt = prompt_of(16)
    generation = asyncio.run(served.engine.generate(request(prompt, seed=11, temperature=0.8, **cut)))
    logits = served.distribution([*prompt, *generation.token_ids])[len(prompt) - 1 : -1] / 0.8
    if "min_p" in cut:
        probabilities = logits.softmax(-1)
        logits[probabilities < cut["min_p"] * probabilities.max(-1, keepdim=True).values] = -torch.inf
    if "top_k" in cut:
        logits[logits < logits.topk(cut["top_k"]).values[:, -1:]] = -torch.inf
    if "top_p" in cut:
        ordered, order = logits.sort(-1)
        drop = ordered.softmax(-1).cumsum(-1) <= 1 - cut["top_p"]
        drop[:, -1] = False
        logits[torch.zeros_like(drop).scatter(1, order, drop)] = -torch.inf
    reference = logits.log_softmax(-1).gather(1, torch.tensor(generation.token_ids)[:, None])[:, 0]
    assert float((reference - torch.tensor(generation.logprobs)).abs().max()) <= TOLERANCE
    assert (logits > -torch.inf).sum(-1).float().mean() < 60  # the cut did cut


def test_the_seed_decides(served: Served):
    async def run() -> list[Generation]:
        seeds = (5, 5, 6)
        return list(await asyncio.gather(*(served.engine.generate(request(prompt_of(9), seed=s)) for s in seeds)))

    first, again, other = asyncio.run(run())
    assert first.token_ids == again.token_ids != other.token_ids


def test_versions_per_token_across_swaps_under_load(served: Served):
    async def run() -> list[Generation]:
        jobs = [
            asyncio.ensure_future(served.engine.generate(request(prompt_of(30, start=s), seed=s, max_tokens=400)))
            for s in range(24)  # three times the slots: some wait for one
        ]
        for _ in range(3):
            await served.started(2)
            served.perturb(0.05)
            await served.push()
            await asyncio.sleep(0.05)
        for seed in (24, 25):  # asked for after the last load, whatever the pace of the others
            jobs.append(
                asyncio.ensure_future(
                    served.engine.generate(request(prompt_of(30, start=seed), seed=seed, max_tokens=400))
                )
            )
        return list(await asyncio.gather(*jobs))

    before = served.version
    generations = asyncio.run(run())
    assert max(len(g.segments) for g in generations) >= 2  # how many loads one lives through is a matter of pace
    for generation in generations:
        segments = generation.segments
        assert [s.start for s in segments] == [0, *[s.end for s in segments[:-1]]]
        assert segments[-1].end == len(generation.token_ids) == len(generation.logprobs)
        versions = [s.version for s in segments]
        assert versions == sorted(set(versions))
        assert before <= versions[0] <= versions[-1] <= served.version
        if len(generation.token_ids) < 400:
            assert generation.finish_reason == "stop"
    # What started after the last load knows one version and nothing of the others.
    fresh = [(s, g) for s, g in enumerate(generations) if g.segments[0].version == served.version]
    assert fresh
    assert all(served.difference(prompt_of(30, start=s), g) <= TOLERANCE for s, g in fresh)


def test_no_cache_is_shared_across_versions(served: Served):
    prompt = prompt_of(520)  # four cache blocks

    async def run() -> None:
        old = await served.engine.generate(request(prompt, seed=1))
        assert served.difference(prompt, old) <= TOLERANCE
        served.perturb(0.5)
        await served.push()
        new = await served.engine.generate(request(prompt, seed=1))
        assert served.difference(prompt, new) <= TOLERANCE

    asyncio.run(run())


def test_a_request_queued_during_a_load_does_not_get_old_keys(served: Served):
    prompt = prompt_of(520, start=2)

    async def run() -> list[Generation]:
        await served.engine.generate(request(prompt, seed=0, max_tokens=1))  # its keys are in the cache now
        await served.freeze()
        queued = [asyncio.ensure_future(served.engine.generate(request(prompt, seed=s))) for s in range(SLOTS)]
        llm = served.engine._session.client.core.llm
        await until(lambda: llm.get_num_unfinished_requests() == SLOTS)
        served.perturb(0.5)
        await served.push()
        return list(await asyncio.gather(*queued))

    for generation in asyncio.run(run()):
        assert {s.version for s in generation.segments} == {served.version}
        assert served.difference(prompt, generation) <= TOLERANCE


@pytest.mark.parametrize("kv_max_age", [0, None])
def test_kv_max_age_makes_running_requests_recompute(
    served: Served, kv_max_age: int | None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(served.engine._session.client, "_kv_max_age", kv_max_age)
    prompts = [prompt_of(200, start=s) for s in range(SLOTS)]

    async def run() -> list[Generation]:
        jobs = [
            asyncio.ensure_future(served.engine.generate(request(p, seed=s, max_tokens=200)))
            for s, p in enumerate(prompts)
        ]
        await served.started(SLOTS // 2)
        served.perturb(0.5)
        await served.push()
        return list(await asyncio.gather(*jobs))

    differences, before = [], served.engine.stats()
    for prompt, generation in zip(prompts, asyncio.run(run()), strict=True):
        after = [s for s in generation.segments if s.version == served.version and s.start > 0]
        if after:
            assert [s.version for s in generation.segments] == [served.version - 1, served.version]
            reference = served.logprobs([*prompt, *generation.token_ids])[len(prompt) - 1 :]
            gaps = (reference - torch.tensor(generation.logprobs)).abs()
            differences.append(float(gaps[after[0].start :].max()))
    assert differences  # some spanned the load
    now = served.engine.stats()
    assert (now.recomputes - before.recomputes, now.kv_age) == ((1, 0) if kv_max_age == 0 else (0, 1))
    if kv_max_age == 0:
        assert max(differences) <= TOLERANCE  # the whole context was computed anew by the new weights
    else:
        assert max(differences) > 100 * TOLERANCE  # keys of the old weights remain: what the option is for


def test_the_context_it_tells_is_what_it_can_hold(served: Served):
    assert served.engine.max_context == 1024
    generation = asyncio.run(served.engine.generate(request(prompt_of(1023), max_tokens=1)))
    assert len(generation.token_ids) == 1
    with pytest.raises(ValueError, match="1024"):
        asyncio.run(served.engine.generate(request(prompt_of(1024), max_tokens=1)))


def test_end_tokens_come_from_the_model_and_are_kept(served: Served):
    async def run() -> list[Generation]:
        jobs = [served.engine.generate(request(prompt_of(6, start=s), seed=s, max_tokens=100)) for s in range(60)]
        return list(await asyncio.gather(*jobs))

    ends = {2, SECOND_END_TOKEN}
    seen = set()
    for generation in asyncio.run(run()):
        assert not ends & set(generation.token_ids[:-1])
        if generation.finish_reason == "stop":
            seen.add(generation.token_ids[-1])
        else:
            assert (generation.finish_reason, len(generation.token_ids)) == ("length", 100)
    assert seen == ends


def test_a_stop_string_ends_the_turn_and_its_tokens_are_kept(served: Served):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(served.engine._settings.model)
    stops = ("a", "e", "7")

    async def run() -> list[Generation]:
        sampling = {"stop": stops, "max_tokens": 200}
        jobs = [served.engine.generate(request(prompt_of(6, start=s), seed=s, **sampling)) for s in range(16)]
        return list(await asyncio.gather(*jobs))

    stopped = 0
    for generation in asyncio.run(run()):
        text = tokenizer.decode(generation.token_ids, skip_special_tokens=True)
        assert not any(stop in text[:-1] for stop in stops)
        assert len(generation.logprobs) == len(generation.token_ids)
        stopped += text.endswith(stops) and generation.finish_reason == "stop"
    assert stopped


def test_a_cancelled_request_leaves_the_engine(served: Served):
    async def run() -> None:
        llm = served.engine._session.client.core.llm
        await served.freeze()
        job = asyncio.ensure_future(served.engine.generate(request(prompt_of(5), seed=1)))
        await until(lambda: llm.get_num_unfinished_requests() == 1)
        job.cancel()
        with pytest.raises(asyncio.CancelledError):
            await job
        await until(lambda: llm.get_num_unfinished_requests() == 0)
        await served.push()  # thaws it
        await served.engine.generate(request(prompt_of(5), max_tokens=4))

    asyncio.run(run())


def test_a_request_that_cannot_be_served_is_refused_and_the_next_one_served(served: Served):
    async def run() -> None:
        with pytest.raises(ValueError, match=r"vllm-0.*refused"):
            await served.engine.generate(request(prompt_of(1025)))
        with pytest.raises(ValueError, match=r"vllm-0.*vocabulary"):
            await served.engine.generate(request((5, 1_000_000)))
        assert len((await served.engine.generate(request(prompt_of(5), max_tokens=4))).token_ids) <= 4

    asyncio.run(run())


def test_weights_for_another_backend_are_refused_and_nothing_breaks(served: Served):
    source = served.publisher.publish(served.model.named_parameters(), 99)
    source.backend = "nccl"

    async def run() -> None:
        with pytest.raises(ValueError, match="nccl"):
            await served.engine.load_weights(99, source)
        generation = await served.engine.generate(request(prompt_of(5), max_tokens=4))
        assert generation.segments[-1].version == served.version

    asyncio.run(run())


def test_loops_of_several_threads_may_call_at_once(served: Served):
    results: list[Generation] = []

    def work(seed: int) -> None:
        results.append(asyncio.run(served.engine.generate(request(prompt_of(10), seed=seed, max_tokens=10))))

    before = served.engine.stats()
    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(results) == 6
    after = served.engine.stats()
    assert after.generated_tokens - before.generated_tokens == sum(len(g.token_ids) for g in results)
    assert after.busy_s > before.busy_s


def test_starting_the_engine_left_no_variable_behind(served: Served):
    assert not {"ASYNC_RL_ENGINE_CHILD", "OMP_PLACES", "TORCH_COMPILE_DISABLE", "VLLM_RPC_BASE_PATH"} & set(os.environ)
    assert len(os.sched_getaffinity(0)) == os.cpu_count() or os.cpu_count() is None


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_whole_process_group_is_left_to_the_trainer(served: Served, number: signal.Signals):
    async def run() -> None:
        for process in served.engine._session.client.core.llm.engine_core.resources.engine_manager.processes:
            os.kill(process.pid, number)
        await asyncio.sleep(0.3)
        await served.engine.generate(request(prompt_of(5), max_tokens=4))

    asyncio.run(run())


def test_signals_to_the_whole_process_group_while_it_starts_are_left_to_the_trainer(model_dir: Path, capfd):
    engine, before = VLLMEngine(str(model_dir), name="vllm-early"), set(multiprocessing.active_children())

    async def run() -> None:
        starting = asyncio.ensure_future(engine.start())
        try:
            while not (born := set(multiprocessing.active_children()) - before):
                await asyncio.sleep(0.01)
            for number in (signal.SIGINT, signal.SIGTERM):  # it imports, and knows nothing of us yet
                os.kill(next(iter(born)).pid, number)
            await starting
        finally:
            await engine.close()

    asyncio.run(run())
    assert "KeyboardInterrupt" not in capfd.readouterr().err
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ()) & {signal.SIGINT, signal.SIGTERM}


def test_engine_before_start_and_after_close(model_dir: Path):
    engine = VLLMEngine(str(model_dir), name="vllm-idle")

    async def run() -> None:
        with pytest.raises(EngineError, match=r"vllm-idle.*start"):
            await engine.generate(request(prompt_of(3)))
        await engine.close()
        await engine.close()
        assert engine.stats().generated_tokens == 0

    asyncio.run(run())


def test_impossible_settings_are_refused(model_dir: Path):
    with pytest.raises(ValueError, match="kv_max_age"):
        VLLMEngine(str(model_dir), kv_max_age=-1)
    with pytest.raises(ValueError, match="cpu_cores"):
        asyncio.run(VLLMEngine(str(model_dir), cpu_cores="0,999").start())
    with pytest.raises(ValueError, match="no_such_argument"):
        asyncio.run(VLLMEngine(str(model_dir), engine_kwargs={"no_such_argument": 1}).start())
    assert SharedMemoryPublisher.backend == "async_rl_shared_memory"
