"""precision="auto": what is measured decides, what is given stays."""

import json
import runpy
import sys

import pytest
import torch

from async_rl.compose import REPOSITORY
from async_rl.precision import resolve_precision
from async_rl.trainer import AsyncRLTrainer


def machine(float32_s, bfloat16_s):
    taken = {torch.float32: iter(float32_s), torch.bfloat16: iter(bfloat16_s)}
    return lambda dtype: next(taken[dtype])


@pytest.mark.parametrize(
    ("float32_s", "bfloat16_s", "precision"),
    [
        ([4.0] * 5, [1.0] * 5, "bf16-mixed"),  # matrix units
        ([4.0] * 5, [3.0] * 5, "bf16-mixed"),
        ([4.0] * 5, [3.5] * 5, "32-true"),  # too little to give up exactness
        ([4.0] * 5, [160.0] * 5, "32-true"),  # nothing for bfloat16
        ([4.0] * 5, [9.0, 9.0, 1.0, 9.0, 9.0], "bf16-mixed"),  # something else ran meanwhile
        ([9.0, 9.0, 4.0, 9.0, 9.0], [5.0] * 5, "32-true"),
    ],
)
def test_on_a_cpu_the_faster_one_is_taken(float32_s, bfloat16_s, precision):
    assert resolve_precision("auto", "cpu", machine(float32_s, bfloat16_s)) == precision


@pytest.mark.parametrize("accelerator", ["cuda", "gpu", "mps"])
def test_elsewhere_it_is_bfloat16_without_measuring(accelerator):
    assert resolve_precision("auto", accelerator, machine([], [])) == "bf16-mixed"


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-true", 32])
def test_what_is_given_is_not_touched(precision):
    assert resolve_precision(precision, "cpu", machine([], [])) == precision


def test_the_real_products_are_timed_in_both():
    asked_for = []

    def seconds(dtype):
        asked_for.append(dtype)
        return 1.0

    resolve_precision("auto", "cpu", seconds)
    assert set(asked_for) == {torch.float32, torch.bfloat16}
    assert resolve_precision("auto", "cpu") in ("32-true", "bf16-mixed")


def test_the_trainer_takes_it(tmp_path):
    trainer = AsyncRLTrainer(max_steps=1, run_dir=tmp_path, precision="auto", accelerator="cpu")
    assert trainer.precision in ("32-true", "bf16-mixed")


def test_the_benchmark_times_both(tiny_model_dir, tmp_path, monkeypatch, capsys):
    out = tmp_path / "row.json"
    arguments = ["--model", tiny_model_dir, "--tokens", 64, "--rounds", 1, "--json", out]
    monkeypatch.setattr(sys, "argv", ["bench_precision.py", *map(str, arguments)])
    runpy.run_path(str(REPOSITORY / "scripts" / "bench_precision.py"), run_name="__main__")
    row = json.loads(out.read_text())
    assert row["auto"] in row
    assert min(row["bf16-mixed"], row["32-true"]) > 0
    assert "64 tokens" in capsys.readouterr().out
