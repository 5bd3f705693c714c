"""The simulator: the shipped gate and planner, the figures of the design, and the two scripts that use it."""

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from async_rl.orchestrator import gate, planner, simulator
from async_rl.orchestrator.latencies import Latencies, read_run
from async_rl.orchestrator.ledger import Ledger
from async_rl.orchestrator.simulator import Scenario, Setting, pick, simulate

SCRIPTS = Path(__file__).parents[2] / "scripts"
TAIL = Latencies.from_text("lognormal:0,1")
UNLIMITED = 10**9


def run_script(name: str, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPTS / name), *args], capture_output=True, text=True, timeout=120, check=False
    )


def test_it_drives_the_shipped_gate_and_planner():
    assert simulator.CapacityGate is gate.CapacityGate
    assert simulator.BatchPlanner is planner.BatchPlanner


@pytest.mark.parametrize(
    ("latency", "bound", "ahead", "sampling_policy", "max_age", "mean_age", "step_s"),
    [
        # The table of DESIGN section 5; B = 8, training takes 1 s.
        ("constant:3", 2, 2, "segment", 2, 1.99, 1.34),
        ("lognormal:0,1", 4, 2, "segment", 4, 1.99, 1.81),
        ("lognormal:0,1", 8, 2, "segment", 8, 1.99, 1.26),
        ("lognormal:0,1", 16, 2, "segment", 16, 1.99, 1.10),
        ("pareto:1.5,0.5", 8, 2, "segment", 8, 1.99, 2.36),
        # An engine that drains before each load is as slow at every S.
        ("lognormal:0,1", 2, 2, "trajectory", 2, 1.50, 3.17),
        ("lognormal:0,1", 8, 2, "trajectory", 2, 1.50, 3.17),
    ],
)
def test_the_figures_of_the_design(latency, bound, ahead, sampling_policy, max_age, mean_age, step_s):
    scenario = Scenario(Latencies.from_text(latency), 8, sampling_policy=sampling_policy)
    result = simulate(scenario, Setting(bound, ahead, UNLIMITED))
    assert result.max_age == max_age
    assert result.mean_age == pytest.approx(mean_age, abs=0.01)
    assert result.step_s == pytest.approx(step_s, rel=0.03)  # the design's model had no horizon
    assert len(result.ages) == 400 * 8


@pytest.mark.parametrize("latency", ["constant:3", "lognormal:0,1.5", "pareto:1.5,0.5"])
@pytest.mark.parametrize("bound", [0, 1, 4])
@pytest.mark.parametrize(("group_size", "filtered", "load_s"), [(1, 0.0, 0.0), (4, 0.3, 0.2)])
def test_wait_is_within_two_percent_of_its_lower_bound(latency, bound, group_size, filtered, load_s):
    scenario = Scenario(
        Latencies.from_text(latency), 8, group_size=group_size, filtered=filtered, load_s=load_s, steps=100, engines=2
    )
    result = simulate(scenario, Setting(bound, min(bound, 2), UNLIMITED))
    assert result.max_age <= bound
    assert result.most_groups <= (bound + 1) * 8
    assert result.lower_bound_s <= result.step_s <= 1.02 * result.lower_bound_s
    assert result.wait_fraction == pytest.approx(1 - scenario.train_s / result.step_s)


def test_the_lower_bound_by_hand():
    """Two steps of two groups, S = 1, latencies 1, 2, 9, 3 in admission order: the third is due in the second step."""
    seconds = iter([1.0, 2.0, 9.0, 3.0])
    given = Latencies("given", lambda rng, n: np.array([next(seconds)]))
    result = simulate(Scenario(given, 2, train_s=1.0, steps=2), Setting(1, 1, UNLIMITED))
    # Step 0 ends at 2 + 1, step 1 at 9 + 1; the trainer waited for 2 s, then from 3 s to 9 s.
    assert (result.step_s, result.lower_bound_s, result.wait_fraction) == (5.0, 5.0, 0.8)
    assert list(result.ages) == [0, 0, 1, 1]
    assert sum(result.limits.values()) == pytest.approx(1.0)


def test_mask_and_allow_trade_age_for_time():
    scenario = Scenario(Latencies.from_text("pareto:1.5,0.5"), 8)
    wait, mask, allow = (simulate(scenario, Setting(2, 2, UNLIMITED, 1.0, p)) for p in ("wait", "mask", "allow"))
    assert wait.max_age == 2 < mask.max_age
    assert allow.step_s < wait.step_s
    assert mask.step_s < wait.step_s
    assert mask.most_groups <= 24


def test_replicas_take_turns_so_trajectory_sampling_never_stops():
    one, two = (
        simulate(Scenario(TAIL, 8, sampling_policy="trajectory", engines=n), Setting(4, 4, UNLIMITED)) for n in (1, 2)
    )
    assert two.max_age <= 4
    assert "engines" in one.limits
    assert "engines" not in two.limits


def test_fewer_places_than_needed_show_as_the_limit():
    result = simulate(Scenario(TAIL, 8), Setting(4, 2, 8))
    assert result.limited_by == "concurrency"
    assert result.step_s > simulate(Scenario(TAIL, 8), Setting(4, 2, UNLIMITED)).step_s


def test_the_pick_is_the_youngest_of_the_fast():
    scenario = Scenario(Latencies.from_text("constant:1"), 8, steps=50)
    results = [simulate(scenario, Setting(s, w, c)) for s, w in ((0, 0), (1, 1), (4, 4)) for c in (24, 48)]
    best, why = pick(results)
    assert best.setting == Setting(1, 1, 24)
    assert "4 of 6 settings" in why


@pytest.mark.parametrize(
    ("text", "mean"),
    [("constant:3", 3.0), ("uniform:2,4", 3.0), ("lognormal:0,0.5", math.exp(0.125)), ("pareto:3,2", 3.0)],
)
def test_distributions(text, mean):
    drawn = Latencies.from_text(text).draw(np.random.default_rng(0), 20_000)
    assert drawn.shape == (20_000,)
    assert drawn.mean() == pytest.approx(mean, rel=0.03)


@pytest.mark.parametrize("text", ["normal:0,1", "constant:-1", "uniform:3", "uniform:4,2", "pareto:x,1", ""])
def test_an_unknown_distribution_is_refused(text):
    with pytest.raises(ValueError, match="none of constant:SECONDS"):
        Latencies.from_text(text)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [({"filtered": 1.0}, "filtered"), ({"train_s": -1.0}, "train_s"), ({"engines": 0}, "engines"),
     ({"sampling_policy": "auto"}, "segment or trajectory")],
)  # fmt: skip
def test_impossible_scenarios_are_refused(overrides, message):
    with pytest.raises(ValueError, match=message):
        Scenario(TAIL, 8, **overrides)


def test_groups_of_a_run_are_drawn_whole():
    latencies = Latencies.from_groups("run", [[1.0, 1.5], [9.0, 9.5]])
    rng = np.random.default_rng(0)
    assert {tuple(latencies.draw(rng, 2)) for _ in range(50)} == {(1.0, 1.5), (9.0, 9.5)}
    assert set(latencies.draw(rng, 100)) == {1.0, 1.5, 9.0, 9.5}
    with pytest.raises(ValueError, match="no finished rollout"):
        Latencies.from_groups("run", [[]])


@pytest.fixture
def run_dir(tmp_path):
    """What a run leaves: the ledger's own tables with four groups of two, three trained in batches and one filtered."""
    ledger = Ledger(tmp_path / "run.db")
    insert = ledger._db.execute
    for group in range(4):
        for sample in range(2):
            insert(
                "INSERT INTO trajectories "
                "VALUES (?, ?, 0, x'', x'', x'', '[]', '[0]', 1, 1, '{}', 'stop', '', 1, ?, ?)",
                (group, sample, 100.0, 100.0 + group + sample),
            )
        insert("INSERT INTO endings VALUES (?, ?, '', 110.0)", (group, "filtered" if group == 3 else "trained"))
    for version, ids in enumerate(("[0]", "[1]", "[2]")):
        insert(
            "INSERT INTO batches (version, group_ids, advantages, planned_s, outcome, reason, ended_s) "
            "VALUES (?, ?, '[]', ?, 'trained', '', ?)",
            (version, ids, 200.0, 207.0 + version),
        )
    ledger._db.close()
    return tmp_path


def test_a_run_is_read_from_its_ledger(run_dir):
    run = read_run(run_dir)
    assert (run.batch_size, run.group_size, run.train_s, run.filtered) == (1, 2, 8.0, 0.25)
    assert tuple(run.latencies.draw(np.random.default_rng(0), 2)) in {(0, 1), (1, 2), (2, 3), (3, 4)}


def test_a_run_is_read_from_its_metrics(tmp_path):
    sigma = 0.8
    row = {
        "step": 1,
        "rollout/finished": 64.0,
        "rollout/latency_mean_s": math.exp(1 + sigma**2 / 2),
        "rollout/latency_p99_s": math.exp(1 + 2.3263478740408408 * sigma),
    }
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 0}) + "\n" + json.dumps(row) + "\n")
    assert read_run(tmp_path).latencies.name == "lognormal:1.0000,0.8000"


def test_a_path_without_a_run_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="holds neither run"):
        read_run(tmp_path)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        read_run(tmp_path / "nowhere")
    (tmp_path / "run.db").write_text("not a database, and long enough to be looked at as one" * 20)
    with pytest.raises(ValueError, match="not the record of a run"):
        read_run(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(ValueError, match="no finished rollout"):
        read_run(tmp_path / "metrics.jsonl")


def test_the_command_answers_with_a_table_a_file_and_a_picture(run_dir):
    pytest.importorskip("matplotlib")
    out, png = run_dir / "out.json", run_dir / "ages.png"
    done = run_script("simulate.py", "--run", str(run_dir), "--steps", "30", "--json", str(out), "--png", str(png))
    assert done.returncode == 0, done.stderr
    answer = json.loads(out.read_text())
    assert answer["scenario"]["group_size"] == 2
    assert answer["pick"] in answer["rows"]
    assert f"max_staleness={answer['pick']['S']} admit_ahead={answer['pick']['W']}" in done.stdout
    assert all(row["max_age"] <= row["S"] for row in answer["rows"])
    assert png.read_bytes().startswith(b"\x89PNG")


def test_the_command_refuses_nonsense_with_exit_code_2():
    done = run_script("simulate.py", "--latency", "normal:0,1")
    assert done.returncode == 2
    assert "none of constant:SECONDS" in done.stdout


def test_the_benchmark_writes_its_rows(tmp_path):
    done = run_script("bench_staleness.py", "--steps", "30", "--json", str(tmp_path / "rows.json"))
    assert done.returncode == 0, done.stdout
    rows = json.loads((tmp_path / "rows.json").read_text())
    keys = "latency S W policy sampling_policy max_age mean_age step_s lower_bound_s wait_fraction"
    assert set(rows[0]) == set(keys.split())
    assert {row["S"] for row in rows} == {0, 1, 2, 4, 8, 16}
    assert all(row["max_age"] <= row["S"] for row in rows if row["policy"] == "wait")
    assert any(row["max_age"] > row["S"] for row in rows if row["policy"] == "completion")
