"""docs/reliability.md: the commands that read a run directory do what the page says."""

import os
import subprocess
import sys
from pathlib import Path

PAGE = (Path(__file__).resolve().parent.parent / "docs" / "reliability.md").read_text()


def test_of_a_step_that_was_trained_twice_the_last_line_counts(tmp_path):
    (command,) = [line.strip() for line in PAGE.splitlines() if "metrics.jsonl'" in line]
    rows = ('{"step": 1, "train/loss": 0.5}', '{"step": 2, "train/loss": 0.4}', '{"step": 2, "eval/reward": 1.0}')
    (tmp_path / "metrics.jsonl").write_text("\n".join((*rows, '{"step": 2, "train/loss": 0.3}')) + "\n")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", command], env=os.environ | {"RUN": str(tmp_path), "PATH": path}, capture_output=True, text=True
    )
    assert done.stdout.splitlines() == ["(1, 0.5)", "(2, 0.3)"], done.stderr
