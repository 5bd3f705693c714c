"""WarmUp: a model learns what its environment demonstrates, once; the run then starts from it."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from async_rl import warm_up as module
from async_rl.environments import SingleTurn
from async_rl.environments.demonstrations import Trace, demonstrate
from async_rl.policy import PolicyModule
from async_rl.warm_up import WarmUp


class Echo(SingleTurn):
    """Says the word again."""

    name = "echo"

    def prompts(self, split: str) -> Sequence[Mapping[str, Any]]:
        return [{"word": w} for w in ("tree", "river", "stone", "cloud", "bird", "fish")]

    def messages(self, prompt: Mapping[str, Any]) -> str:
        return str(prompt["word"])

    def reward(self, prompt: Mapping[str, Any], completion: str) -> float:
        return float(completion == prompt["word"])

    def demonstrate(self, prompt: Mapping[str, Any], messages: Sequence[Mapping[str, Any]]) -> str:
        return str(messages[-1]["content"])


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ASYNC_RL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def loss(policy: PolicyModule, trace: Trace, mask: int) -> float:
    """Mean negative log-probability of the model's tokens, or of all others."""
    logprobs = policy.logprobs(trace.token_ids)
    taken = [p for p, m in zip(logprobs, trace.loss_mask[1:], strict=True) if m == mask]
    return -math.fsum(taken) / len(taken)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_is_one_and_keeps_nothing(
    tiny_model_dir: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """Lightning ends the script for both without a word, with exit code 0 for SIGTERM."""
    before = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}
    step = module._Imitation.training_step

    def interrupted(self: Any, *args: Any) -> None:
        step(self, *args)
        os.kill(os.getpid(), number)

    monkeypatch.setattr(module._Imitation, "training_step", interrupted)
    try:
        with pytest.raises(KeyboardInterrupt):
            WarmUp(traces=6, batch_size=2).apply(tiny_model_dir, {"echo": Echo()}, accelerator="cpu")
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)
    assert not [path for path in cache.iterdir() if path.is_dir() and any(path.iterdir())]


def test_it_learns_the_models_turns_and_nothing_else(tiny_model_dir: Path, cache: Path) -> None:
    warm_up = WarmUp(traces=6, epochs=60, batch_size=6, lr=3e-3)
    state = torch.random.get_rng_state()
    path = warm_up.apply(tiny_model_dir, {"echo": Echo()}, accelerator="cpu")
    assert torch.equal(torch.random.get_rng_state(), state)  # the run is the same whether it was made or found
    before, after = PolicyModule(tiny_model_dir), PolicyModule(path)
    (trace,) = demonstrate({"echo": Echo()}, before.tokenizer, 1)
    assert loss(before, trace, 1) > 3.0
    assert loss(after, trace, 1) < 1.0
    assert loss(after, trace, 0) > 3.0
    assert after.tokenizer.chat_template == before.tokenizer.chat_template


def test_it_is_made_once_for_the_same_model_traces_and_settings(
    tiny_model_dir: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warm_up = WarmUp(traces=2, batch_size=2)
    path = warm_up.apply(tiny_model_dir, {"echo": Echo()}, accelerator="cpu")
    written = (path / "model.safetensors").stat().st_mtime_ns
    assert warm_up.apply(tiny_model_dir, {"echo": Echo()}, accelerator="cpu") == path
    assert (path / "model.safetensors").stat().st_mtime_ns == written
    others = {
        WarmUp(traces=2, batch_size=2, lr=1e-4).apply(tiny_model_dir, {"echo": Echo()}, accelerator="cpu"),
        WarmUp(traces=2, batch_size=2, seed=1).apply(tiny_model_dir, {"echo": Echo()}, accelerator="cpu"),
        warm_up.apply(path, {"echo": Echo()}, accelerator="cpu"),
    }
    assert len(others | {path}) == 4
    assert len(list(cache.iterdir())) == 4  # nothing half-made is left


@pytest.mark.parametrize("wrong", [{"traces": 0}, {"epochs": 0}, {"batch_size": 0}, {"lr": 0.0}, {"lr": math.nan}])
def test_a_number_out_of_range_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"model.warm_up.{next(iter(wrong))}="):
        WarmUp(**wrong)


def test_the_command_trains_and_samples_with_the_warmed_up_model(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from test_config import composed

    from async_rl import main
    from async_rl.run_record import RunRecord

    config = composed(
        "+recipe=calculator", "model=tiny", "engine=transformers", "model.warm_up.traces=2", "hardware=cpu",
        "environment.train_size=4", "environment.eval_size=2", "hardware.precision=32-true",
        f"run_dir={tmp_path / 'run'}",
    )  # fmt: skip
    (tmp_path / "run").mkdir()
    told: dict[str, str] = {}
    record = RunRecord(tmp_path / "run", "calculator", 0, choices={}, command=[])
    monkeypatch.setattr(record, "start", told.update)
    _, policy, datamodule = main.build(config, {}, record)
    warmed = next(path for path in cache.iterdir() if path.name.startswith("warm-"))
    assert datamodule is not None
    assert [engine._model for engine in datamodule.engines] == [str(warmed)]
    assert any(
        (a != b).any() for a, b in zip(policy.parameters(), PolicyModule(cache / "tiny-1").parameters(), strict=True)
    )
    assert "WarmUp(traces=2" in told["model"]
