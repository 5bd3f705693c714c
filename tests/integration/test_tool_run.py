"""Tool calls and a rewriting template in a whole run, killed once: masks, contexts and counts, to the last file."""

import json
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tool_run import END, ONCE_MORE, SURE, UNSURE, Sequences, answer_of, call_of, environments, run, write_model

from async_rl.archive import BatchArchive
from async_rl.environments.tool import Tool
from async_rl.orchestrator.ledger_rows import reading, trajectory_of
from async_rl.types import Group, Trajectory

SCRIPT = Path(__file__).parent / "tool_run.py"
ENVIRONMENTS = ("calculator", "asked_again")


@dataclass
class Files:
    """What the two processes of the run left behind."""

    tokenizer: Any
    at_kill: dict[int, list[Trajectory]] = field(default_factory=dict)  # run.db, group by group
    recorded: list[int] = field(default_factory=list)  # the groups whose step was killed
    groups: dict[int, dict[int, Group]] = field(default_factory=dict)  # Parquet, version by version
    metrics: list[dict[str, Any]] = field(default_factory=list)
    requests_after: list[str] = field(default_factory=list)
    trained_after: dict[int, list[tuple[tuple[int, ...], tuple[int, ...]]]] = field(default_factory=dict)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parents[1] / "environments")
        from template_families import FAMILIES
    model_dir, run_dir = tmp_path_factory.mktemp("qwen3"), tmp_path_factory.mktemp("tool_run")
    files = Files(FAMILIES["qwen3"].tokenizer())
    write_model(files.tokenizer, model_dir)
    killed = subprocess.run(
        [sys.executable, str(SCRIPT), str(model_dir), str(run_dir)], capture_output=True, text=True, timeout=120
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    with reading(run_dir / "run.db") as db:
        for row in db.execute("select * from trajectories order by group_id, sample_index"):
            files.at_kill.setdefault(row[0], []).append(trajectory_of(row))
        ((ids,),) = db.execute("select group_ids from batches where version = 1").fetchall()
        files.recorded = json.loads(ids)
    sequences = Sequences()
    files.requests_after = [r.request_id for r in run(model_dir, run_dir, sequences, resume=True).requests]
    files.trained_after = sequences.steps
    archive = BatchArchive(run_dir / "batches")
    with reading(run_dir / "run.db") as db:
        for batch_id, version in db.execute("select batch_id, version from batches where outcome = 'trained'"):
            files.groups[version] = archive.read(batch_id)
        assert db.execute("select outcome, count(*) from groups group by 1").fetchall() == [("trained", 12)]
        assert db.execute("select count(*) from trajectories").fetchone() == (0,)  # moved to the files
    files.metrics = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return files


def conversation(row, answer):
    """What is said about a problem, up to the answer."""
    return [
        {"role": "user", "content": row["question"]},
        {"role": "assistant", "content": call_of(row["expression"])},
        {"role": "tool", "content": row["answer"]},
        {"role": "assistant", "content": answer},
    ]


def check(tokenizer, environment, row, trajectory):
    """The contexts are what the template renders, and trained is exactly what the model said, each turn once."""

    def rendered(messages):
        tools = [Tool(environments()["calculator"].calculate).schema]
        return tokenizer.apply_chat_template(messages, tools=tools, tokenize=False).removesuffix("\n")

    right = trajectory.reward == 1.0
    said = conversation(row, answer_of(row["answer"]) if right else UNSURE)
    turns, contexts = [said[1]["content"], said[3]["content"]], [rendered(said)]
    if environment == "asked_again":
        more = [*said, {"role": "user", "content": ONCE_MORE}, {"role": "assistant", "content": SURE}]
        turns, contexts = [*turns, SURE], [*contexts, rendered(more)]
        assert "I need the tool" in contexts[0]
        assert "I need the tool" not in contexts[1]
    ends = [*trajectory.starts, len(trajectory.token_ids)]
    assert [tokenizer.decode(trajectory.token_ids[a:b]) for a, b in pairwise(ends)] == contexts
    spoken = [tokenizer.decode(trajectory.token_ids[s.start : s.end]) for s in trajectory.segments]
    assert "".join(spoken) == "".join(turn + END for turn in turns)
    sampled = {i for s in trajectory.segments for i in range(s.start, s.end)}
    assert trajectory.loss_mask == [int(i in sampled) for i in range(len(trajectory.token_ids))]
    assert trajectory.logprobs == [-1.0 * m for m in trajectory.loss_mask]
    assert trajectory.turns == len(turns)
    assert trajectory.reward_parts == {"tool_calls": 1, "tool_errors": 0, "tool_timeouts": 0}
    return right


def test_masks_and_contexts_are_those_of_the_conversation_in_the_files(files):
    assert sorted(files.groups) == [0, 1, 2]
    right = []
    for groups in files.groups.values():
        assert {group.prompt.environment for group in groups.values()} == set(ENVIRONMENTS)
        for group in groups.values():
            environment, row = group.prompt.environment, group.prompt.data
            right += [check(files.tokenizer, environment, row, t) for t in group.trajectories]
    assert 0 < sum(right) < len(right) == 3 * 4 * 4


def test_run_db_holds_at_the_kill_what_the_files_hold_in_the_end(files):
    kept = {group_id: group for groups in files.groups.values() for group_id, group in groups.items()}
    assert set(files.recorded) <= set(files.at_kill)
    assert {kept[group_id].prompt.environment for group_id in files.recorded} == set(ENVIRONMENTS)
    for group_id, trajectories in files.at_kill.items():
        if group_id in files.recorded or len(trajectories) == 4:
            assert tuple(trajectories) == kept[group_id].trajectories


def test_nothing_that_was_recorded_is_said_again(files):
    again = {int(request_id.split("-")[0].removeprefix("g")) for request_id in files.requests_after}
    assert again.isdisjoint(files.recorded)
    assert sorted(files.groups[1]) == sorted(files.recorded)


def test_each_context_is_trained_as_a_sequence_of_its_own(files):
    assert sorted(files.trained_after) == [1, 2]  # step 1 was in the checkpoint
    split = 0
    for version, sequences in files.trained_after.items():
        wanted = {}
        for group in files.groups[version].values():
            for t in group.trajectories if len(set(group.rewards)) > 1 else ():
                split += len(t.starts) > 1
                for a, b in pairwise([*t.starts, len(t.token_ids)]):
                    wanted[tuple(t.token_ids[a:b])] = tuple(i for i in range(b - a) if t.loss_mask[a + i])
        assert dict(sequences) == wanted
    assert split


def test_calls_and_tokens_are_counted_in_the_metrics(files):
    for name in ENVIRONMENTS:
        for part, value in {"tool_calls": 1.0, "tool_errors": 0.0, "tool_timeouts": 0.0}.items():
            seen = [row[f"reward/{name}/{part}"] for row in files.metrics if f"reward/{name}/{part}" in row]
            assert seen
            assert set(seen) == {value}
    tokens = {row["step"]: row["train/tokens"] for row in files.metrics if "train/tokens" in row}
    assert tokens == {
        version + 1: sum(t.trainable_tokens for group in groups.values() for t in group.trajectories)
        for version, groups in files.groups.items()
    }
