"""TransformersEngine: the right log-probabilities, one version per token, nothing lost whatever happens."""

from __future__ import annotations

import asyncio
import copy
import json
import math
import shutil
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, MistralConfig, MistralForCausalLM

from async_rl.engines.base import EngineError, EngineStats, Generation, GenerationRequest, SamplingParams
from async_rl.engines.decode_batch import DecodeBatch
from async_rl.engines.transformers import TransformersEngine
from async_rl.types import Segment


class Weights:
    """A weight source over tensors of this process."""

    backend = "test"

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors
        self.version = 0

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._tensors.items()

    @classmethod
    def of(cls, model: Any) -> Weights:
        return cls({name: p.detach().clone() for name, p in model.named_parameters()})


def varied(model: Any, seed: int) -> Any:
    """A copy with other weights, whose layers matter and whose distributions are far from uniform and from certain."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in other.named_parameters():
            scale = 0.005 if "embed" in name else 0.1
            parameter += scale * torch.randn(parameter.shape, generator=generator)
        other.model.norm.weight *= 6.0
    return other


@pytest.fixture(scope="module")
def models(tiny_model_dir: Path) -> list[Any]:
    """Reference models of three versions."""
    base = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32).eval()
    return [varied(base, seed) for seed in (1, 2, 3)]


def request(i: int = 0, length: int = 8, seed: int | None = None, **sampling: Any) -> GenerationRequest:
    prompt = tuple(3 + (7 * i + 5 * k) % 90 for k in range(length))
    sampling.setdefault("max_tokens", 24)
    return GenerationRequest(f"r{i}", prompt, SamplingParams(**sampling), i if seed is None else seed)


def run(directory: Path, talk: Callable[[TransformersEngine], Awaitable[Any]], models: list[Any], **kwargs: Any) -> Any:
    """Start an engine that serves ``models[0]`` as version 0, talk to it, close it."""

    async def go() -> Any:
        engine = TransformersEngine(str(directory), device="cpu", **kwargs)
        await engine.start()
        try:
            await engine.load_weights(0, Weights.of(models[0]))
            return await asyncio.wait_for(talk(engine), 60)
        finally:
            await engine.close()

    return asyncio.run(go())


def all_logprobs(model: Any, token_ids: list[int], temperature: float = 1.0) -> torch.Tensor:
    with torch.no_grad():
        return (model(torch.tensor([token_ids])).logits[0, :-1].float() / temperature).log_softmax(-1)


def check_logprobs(model: Any, asked: GenerationRequest, got: Generation, temperature: float = 1.0) -> None:
    whole = [*asked.prompt_token_ids, *got.token_ids]
    expected = all_logprobs(model, whole, temperature)[len(asked.prompt_token_ids) - 1 :]
    expected = expected.gather(-1, torch.tensor(got.token_ids)[:, None])[:, 0]
    assert got.logprobs == pytest.approx(expected.tolist(), abs=1e-4)


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.5])
@pytest.mark.parametrize("max_batch", [64, 5])
def test_logprobs_equal_a_plain_forward(
    tiny_model_dir: Path, models: list[Any], temperature: float, max_batch: int
) -> None:
    """CASES 20 and 25: prompts of many lengths, groups of equal ones, rows that join and leave on the way."""
    asked = [
        request(i % 8, length=3 + 5 * (i % 8), seed=i, max_tokens=4 + 3 * i, temperature=temperature) for i in range(20)
    ]

    async def talk(engine: TransformersEngine) -> list[Generation]:
        got = await asyncio.gather(*(engine.generate(r) for r in asked))
        assert engine.stats().generated_tokens == sum(len(g.token_ids) for g in got)
        return got

    got = run(tiny_model_dir, talk, models, max_batch=max_batch)
    for r, g in zip(asked, got, strict=True):
        check_logprobs(models[0], r, g, temperature)
        assert g.segments == (Segment(0, 0, len(g.token_ids)),)
        assert g.finish_reason == ("stop" if g.token_ids[-1] == 2 else "length")
        assert len(g.token_ids) == r.sampling.max_tokens or g.finish_reason == "stop"
    assert len({tuple(g.token_ids[:4]) for g in got}) > 8


@pytest.mark.parametrize("filters", [{"top_p": 0.8}, {"top_k": 4}, {"min_p": 0.1}])
def test_filters_renormalise_over_what_they_keep(
    tiny_model_dir: Path, models: list[Any], filters: dict[str, Any]
) -> None:
    """CASES 21."""
    asked = [request(i, temperature=1.2, **filters) for i in range(6)]

    async def talk(engine: TransformersEngine) -> list[Generation]:
        return await asyncio.gather(*(engine.generate(r) for r in asked))

    for r, g in zip(asked, run(tiny_model_dir, talk, models), strict=True):
        plain = all_logprobs(models[0], [*r.prompt_token_ids, *g.token_ids], 1.2)[len(r.prompt_token_ids) - 1 :]
        for token, logprob, row in zip(g.token_ids, g.logprobs, plain.exp(), strict=True):
            order = row.argsort(descending=True)
            if "top_k" in filters:
                kept = order[:4]
            elif "top_p" in filters:
                kept = order[: int((row[order].cumsum(0) < 0.8).sum()) + 1]
            else:
                kept = order[row[order] >= 0.1 * row.max()]
            assert token in kept
            assert logprob == pytest.approx(float((row[token] / row[kept].sum()).log()), abs=1e-3)


def test_greedy_equals_generate(tiny_model_dir: Path, models: list[Any]) -> None:
    asked = [request(i, length=3 + 4 * i, temperature=0.0, max_tokens=20) for i in range(5)]

    async def talk(engine: TransformersEngine) -> list[Generation]:
        return await asyncio.gather(*(engine.generate(r) for r in asked))

    for r, g in zip(asked, run(tiny_model_dir, talk, models), strict=True):
        prompt = torch.tensor([r.prompt_token_ids])
        whole = models[0].generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=20)
        assert g.token_ids == whole[0, prompt.shape[1] :].tolist()
        check_logprobs(models[0], r, g)


def long_request(i: int = 0) -> GenerationRequest:
    """Long enough for anything to happen meanwhile."""
    return request(i, max_tokens=400)


@pytest.fixture(scope="module")
def endless_dir(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model without an end token: every request runs to its length."""
    directory = tmp_path_factory.mktemp("endless") / "model"
    shutil.copytree(tiny_model_dir, directory)
    for file, key in (("generation_config.json", "eos_token_id"), ("tokenizer_config.json", "eos_token")):
        content = json.loads((directory / file).read_text())
        (directory / file).write_text(json.dumps(content | {key: None}))
    return directory


async def swap_on_the_way(engine: TransformersEngine, models: list[Any]) -> Generation:
    running = asyncio.ensure_future(engine.generate(long_request()))
    for version in (1, 2):
        before = engine.stats().generated_tokens
        while engine.stats().generated_tokens < before + 20:
            assert not running.done()
            await asyncio.sleep(0.001)
        await engine.load_weights(version, Weights.of(models[version]))
    return await running


def test_each_token_is_stamped_with_the_version_that_sampled_it(endless_dir: Path, models: list[Any]) -> None:
    """CASES 15: checked against a plain model whose weights are swapped at exactly the stamped places, cache kept."""

    async def swapped(engine: TransformersEngine) -> tuple[Generation, EngineStats]:
        return await swap_on_the_way(engine, models), engine.stats()

    got, stats = run(endless_dir, swapped, models)
    assert [s.version for s in got.segments] == [0, 1, 2]
    assert (stats.recomputes, stats.kv_age) == (0, 2)
    assert [s.start for s in got.segments] == [0, *(s.end for s in got.segments[:-1])]
    assert got.segments[-1].end == len(got.token_ids)

    feed, cache, expected = list(long_request().prompt_token_ids), None, []
    for segment in got.segments:
        for at in range(segment.start, segment.end):
            with torch.no_grad():
                out = models[segment.version](torch.tensor([feed]), past_key_values=cache, use_cache=True)
            cache, feed = out.past_key_values, [got.token_ids[at]]
            expected.append(out.logits[0, -1].log_softmax(-1)[feed[0]].item())
    assert got.logprobs == pytest.approx(expected, abs=1e-4)


def test_kv_max_age_zero_recomputes_what_older_weights_left(endless_dir: Path, models: list[Any]) -> None:
    async def swapped(engine: TransformersEngine) -> tuple[Generation, EngineStats]:
        return await swap_on_the_way(engine, models), engine.stats()

    got, stats = run(endless_dir, swapped, models, kv_max_age=0)
    assert (stats.recomputes, stats.kv_age) == (2, 0)
    prompt = list(long_request().prompt_token_ids)
    assert [s.version for s in got.segments] == [0, 1, 2]
    for segment in got.segments:
        plain = all_logprobs(models[segment.version], prompt + got.token_ids)[len(prompt) - 1 :]
        for at in range(segment.start, segment.end):
            assert got.logprobs[at] == pytest.approx(plain[at, got.token_ids[at]].item(), abs=1e-4)


def test_deterministic_tokens_do_not_depend_on_the_neighbours(tiny_model_dir: Path, models: list[Any]) -> None:
    asked = request(3, max_tokens=30)

    async def alone(engine: TransformersEngine) -> Generation:
        return await engine.generate(asked)

    async def crowded(engine: TransformersEngine) -> Generation:
        others = [asyncio.ensure_future(engine.generate(request(i, length=4 + i))) for i in range(4, 9)]
        got = await engine.generate(asked)
        await asyncio.gather(*others)
        return got

    first = run(tiny_model_dir, alone, models, deterministic=True)
    second = run(tiny_model_dir, crowded, models, deterministic=True)
    assert first.token_ids == second.token_ids
    assert first.logprobs == second.logprobs, "to the last bit"


def test_seeds_decide_and_samples_of_a_group_differ(tiny_model_dir: Path, models: list[Any]) -> None:
    async def talk(engine: TransformersEngine) -> list[Generation]:
        return await asyncio.gather(*(engine.generate(request(1, seed=s)) for s in (5, 5, 6)))

    one, same, other = run(tiny_model_dir, talk, models)
    assert one.token_ids == same.token_ids != other.token_ids


def test_cancelling_ends_the_request_and_nobody_else(endless_dir: Path, models: list[Any]) -> None:
    async def talk(engine: TransformersEngine) -> tuple[Generation, int, float]:
        doomed = [asyncio.ensure_future(engine.generate(request(i, max_tokens=3000))) for i in range(3)]
        survivor = asyncio.ensure_future(engine.generate(request(9, max_tokens=60)))
        while engine.stats().generated_tokens < 8:
            await asyncio.sleep(0.001)
        for task in doomed:
            task.cancel()
        got = await survivor
        for task in doomed:
            with pytest.raises(asyncio.CancelledError):
                await task
        tokens, busy_s = engine.stats().generated_tokens, engine.stats().busy_s
        await asyncio.sleep(0.05)
        assert (engine.stats().generated_tokens, engine.stats().busy_s) == (tokens, busy_s), "the engine idles"
        return got, tokens, busy_s

    got, tokens, busy_s = run(endless_dir, talk, models)
    check_logprobs(models[0], request(9, max_tokens=60), got)
    assert tokens < 1000
    assert busy_s > 0


def test_several_end_tokens_and_stop_strings(tiny_model_dir: Path, tmp_path: Path, models: list[Any]) -> None:
    """CASES 26."""
    directory = tmp_path / "model"
    shutil.copytree(tiny_model_dir, directory)
    config = directory / "generation_config.json"
    ends = [2, 40, 41, 42, 43, 44, 45, 46, 47]
    config.write_text(json.dumps(json.loads(config.read_text()) | {"eos_token_id": ends}))

    async def talk(engine: TransformersEngine) -> list[Generation]:
        return await asyncio.gather(
            *(engine.generate(request(i, temperature=3.0, max_tokens=100, stop=("ab", "c"))) for i in range(40))
        )

    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory)
    seen = set()
    for got in run(directory, talk, models):
        text = tokenizer.decode(got.token_ids, skip_special_tokens=True)
        ended = [i for i, t in enumerate(got.token_ids) if t in ends]
        if got.finish_reason == "length":
            assert not ended
            assert len(got.token_ids) == 100
        elif ended:
            assert ended == [len(got.token_ids) - 1], "the end token is kept, and is the last"
            seen.add("end token")
        else:
            assert text.endswith(("ab", "c"))
            assert not any(s in text[:-1] for s in ("ab", "c"))
            seen.add("stop string")
    assert seen == {"end token", "stop string"}


def test_lengths(endless_dir: Path, models: list[Any]) -> None:
    async def talk(engine: TransformersEngine) -> Generation:
        with pytest.raises(ValueError, match=r"20 tokens.*1 to 19"):
            await engine.generate(request(0, length=20))
        with pytest.raises(ValueError, match="0 tokens"):
            await engine.generate(request(0, length=0))
        with pytest.raises(ValueError, match=r"sampling\.top_p=0"):
            await engine.generate(request(0, top_p=0.0))
        assert engine.max_context == 20
        return await engine.generate(request(0, length=8))

    got = run(endless_dir, talk, models, max_model_len=20)
    assert (len(got.token_ids), got.finish_reason) == (12, "length")


def test_score_is_a_plain_forward_and_follows_the_load(tiny_model_dir: Path, models: list[Any]) -> None:
    tokens = (5, 9, 11, 60, 61, 7)

    async def talk(engine: TransformersEngine) -> list[list[float]]:
        first = await engine.score(tokens)
        await engine.load_weights(1, Weights.of(models[1]))
        return [first, await engine.score(tokens)]

    for model, scores in zip(models, run(tiny_model_dir, talk, models), strict=False):
        expected = all_logprobs(model, list(tokens)).gather(-1, torch.tensor(tokens[1:])[:, None])[:, 0]
        assert scores == pytest.approx(expected.tolist(), abs=1e-4)


def test_tied_weights_may_come_under_either_name_or_both(tiny_model_dir: Path, models: list[Any]) -> None:
    """The output projection must follow the embeddings (the trap of a stale tied head)."""
    named = dict(Weights.of(models[1]).tensors())
    assert "lm_head.weight" not in named
    both = named | {"lm_head.weight": named["model.embed_tokens.weight"]}
    head = {k: v for k, v in both.items() if k != "model.embed_tokens.weight"}

    async def talk(engine: TransformersEngine) -> list[list[float]]:
        scores = []
        for version, tensors in enumerate((named, both, head), 1):
            await engine.load_weights(version, Weights.of(models[2]))
            await engine.load_weights(version, Weights(tensors))
            scores.append(await engine.score((5, 9, 11)))
        return scores

    expected = all_logprobs(models[1], [5, 9, 11]).gather(-1, torch.tensor([[9], [11]]))[:, 0].tolist()
    for scores in run(tiny_model_dir, talk, models):
        assert scores == pytest.approx(expected, abs=1e-4)


def test_a_failed_load_names_engine_version_and_parameter_and_ends_the_engine(
    endless_dir: Path, models: list[Any]
) -> None:
    """CASES 9."""
    good = dict(Weights.of(models[0]).tensors())
    norm = good["model.norm.weight"]

    class Gone(Weights):
        def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
            raise OSError("the buffer is gone")

    bad = [
        (Weights({k: v for k, v in good.items() if k != "model.norm.weight"}), r"lack 'model\.norm\.weight'"),
        (Weights(good | {"model.nrom.weight": norm}), r"'model\.nrom\.weight', which the engine's model has not"),
        (Weights(good | {"model.norm.weight": norm[:5]}), r"'model\.norm\.weight' is \(5,\)"),
        (Gone({}), "the buffer is gone"),
    ]
    for weights, match in bad:

        async def talk(engine: TransformersEngine, weights: Weights = weights, match: str = match) -> None:
            running = asyncio.ensure_future(engine.generate(long_request()))
            with pytest.raises(EngineError, match=f"transformers-0.*version 7.*{match}"):
                await engine.load_weights(7, weights)
            for doomed in (running, engine.generate(request()), engine.score((1, 2))):
                with pytest.raises(EngineError, match="version 7"):
                    await doomed

        run(endless_dir, talk, models)


def test_broken_weights_give_nan_logprobs_not_a_crash(tiny_model_dir: Path, models: list[Any]) -> None:
    """CASES 22."""
    broken = {k: torch.full_like(v, math.nan) for k, v in Weights.of(models[0]).tensors()}

    async def talk(engine: TransformersEngine) -> Generation:
        await engine.load_weights(1, Weights(broken))
        return await engine.generate(request(0, max_tokens=5))

    assert all(math.isnan(p) for p in run(tiny_model_dir, talk, models).logprobs)


def test_close_fails_what_runs_and_is_idempotent(endless_dir: Path, models: list[Any]) -> None:
    async def go() -> None:
        engine = TransformersEngine(str(endless_dir), device="cpu", max_batch=1)
        await engine.close()
        with pytest.raises(EngineError, match="not running"):
            await engine.generate(request())
        await engine.start()
        with pytest.raises(EngineError, match="before its first load"):
            await engine.generate(request())
        with pytest.raises(EngineError, match="before its first load"):
            await engine.score((1, 2))
        await engine.load_weights(0, Weights.of(models[0]))
        tasks = [asyncio.ensure_future(engine.generate(request(i, max_tokens=3000))) for i in range(3)]
        while engine.stats().generated_tokens < 2:
            await asyncio.sleep(0.001)
        await engine.close()
        for task in tasks:
            with pytest.raises(EngineError, match="transformers-0 is closed"):
                await task
        await engine.close()

    asyncio.run(asyncio.wait_for(go(), 30))
    assert not [t for t in threading.enumerate() if t.name == "transformers-0"]


def test_a_death_of_the_worker_reaches_everybody(
    endless_dir: Path, models: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: DecodeBatch, version: int) -> None:
        raise MemoryError("out of memory")

    async def talk(engine: TransformersEngine) -> None:
        monkeypatch.setattr(DecodeBatch, "step", broken)
        tasks = [asyncio.ensure_future(engine.generate(request(i, max_tokens=3000))) for i in range(3)]
        for task in tasks:
            with pytest.raises(EngineError, match="died: MemoryError: out of memory"):
                await task
        with pytest.raises(EngineError, match="died"):
            await engine.load_weights(1, Weights.of(models[0]))

    run(endless_dir, talk, models, max_batch=2)


def test_a_model_that_cannot_be_read(tmp_path: Path) -> None:
    engine = TransformersEngine(str(tmp_path / "missing"))
    with pytest.raises(EngineError, match=r"transformers-0 cannot read the model .*missing"):
        asyncio.run(engine.start())


def test_it_is_awaited_from_several_loops_at_once(tiny_model_dir: Path, models: list[Any]) -> None:
    async def talk(engine: TransformersEngine) -> list[Generation]:
        def elsewhere(i: int) -> Generation:
            return asyncio.run(engine.generate(request(i)))

        return await asyncio.gather(*(asyncio.to_thread(elsewhere, i) for i in range(4)))

    for i, got in enumerate(run(tiny_model_dir, talk, models)):
        check_logprobs(models[0], request(i), got)


def test_a_model_with_a_sliding_window(tiny_model_dir: Path, tmp_path: Path) -> None:
    """Its cache cannot be padded: new rows wait for the batch to end, and everything stays right."""
    directory = tmp_path / "mistral"
    shutil.copytree(tiny_model_dir, directory)
    (directory / "model.safetensors").unlink()
    config = MistralConfig(
        vocab_size=99, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, sliding_window=8, max_position_embeddings=256, eos_token_id=2,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = MistralForCausalLM(config).float().eval()
    model.save_pretrained(directory)
    assert not DecodeBatch(model, torch.device("cpu")).joinable
    asked = [request(i, length=3 + 4 * i, max_tokens=5 + 4 * i) for i in range(6)]

    async def talk(engine: TransformersEngine) -> list[Generation]:
        first = [asyncio.ensure_future(engine.generate(r)) for r in asked[:3]]
        while engine.stats().generated_tokens < 6:
            await asyncio.sleep(0)
        return await asyncio.gather(*first, *(engine.generate(r) for r in asked[3:]))

    for r, g in zip(asked, run(directory, talk, [model]), strict=True):
        check_logprobs(model, r, g)


@pytest.mark.parametrize(
    "kwargs", [{"dtype": "int8"}, {"max_batch": 0}, {"max_model_len": 1}, {"kv_max_age": -1}, {"threads": 0}]
)
def test_impossible_settings_are_refused_by_name(kwargs: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"engine\.{next(iter(kwargs))}="):
        TransformersEngine("model", **kwargs)


def test_the_engines_thread_count_is_its_own(tiny_model_dir: Path, models: list[Any]) -> None:
    before = torch.get_num_threads()
    seen: list[int] = []

    async def talk(engine: TransformersEngine) -> None:
        await engine.generate(request())
        newborn = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
        newborn.start()
        newborn.join()

    run(tiny_model_dir, talk, models, threads=before + 1)
    assert [torch.get_num_threads(), *seen] == [before, before]
