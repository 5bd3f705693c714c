"""The rollout benchmark on a scripted engine: what it writes down, and that its free runs are free."""

from __future__ import annotations

import importlib.util
import json
import sys

import pytest

from async_rl.compose import REPOSITORY
from async_rl.engines.scripted import ScriptedEngine


@pytest.fixture
def bench(monkeypatch):
    """The script as a module, with an engine that answers at once instead of vLLM; ``bench.engines`` lists them."""
    spec = importlib.util.spec_from_file_location("bench_rollout", REPOSITORY / "scripts" / "bench_rollout.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    module.engines = []

    def make(model, **settings):
        module.engines.append(ScriptedEngine(lambda prompt, seed: [10 + seed % 7] * 4, 0.002))
        return module.engines[-1]

    module.VLLMEngine = make
    return module


def test_it_writes_a_row_for_every_setting(bench, monkeypatch, tiny_model_dir, tmp_path, capsys):
    out = tmp_path / "rows.json"
    arguments = ["--model", tiny_model_dir, "--json", out, "--steps", 2, "--staleness", 0, 2, "--tool-mean-s", 0.01]
    monkeypatch.setattr(sys, "argv", ["bench_rollout.py", *map(str, arguments)])
    bench.compare(bench.parse())
    rows = json.loads(out.read_text())
    keys = "S sampling_policy tokens_per_s free_tokens_per_s engine_idle_fraction max_age pause_s step_s mean_age"
    assert all(set(keys.split()) <= set(row) for row in rows)
    assert [(row["S"], row["sampling_policy"]) for row in rows] == [(s, p) for s in (0, 2) for p in bench.POLICIES]
    assert all(row["max_age"] <= row["S"] for row in rows)
    assert all(row["tokens_per_s"] > 0 and 0 <= row["engine_idle_fraction"] < 1 for row in rows)
    assert "does no work" in capsys.readouterr().out


def test_free_runs_load_once_and_go_on_without_a_bound(bench, tiny_model_dir, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["bench_rollout.py", "--steps", "4", "--tool-mean-s", "0.01"])
    args = bench.parse()
    model = bench.load_causal_lm(tiny_model_dir)
    tokenizer = bench.AutoTokenizer.from_pretrained(tiny_model_dir)
    for setting, loads in ((bench.FREE, 0), (bench.ALONE, 0), (bench.Setting(2), 4)):
        engine = bench.VLLMEngine(tiny_model_dir)
        measured = bench.run(setting, engine, model, tokenizer, 0, args)
        assert measured.steps == 4
        assert len(measured.ages) == 4 * args.batch_size
        # The first load is before the window; the newest may still be under way at its end.
        assert len(engine.loads) - 1 == pytest.approx(loads, abs=1 if loads else 0)
        assert measured.engine.loads == pytest.approx(loads, abs=1 if loads else 0)
