"""GSM8K: grade-school word problems from a path, the Hub's cache or the Hub; without network an announced stand-in."""

from __future__ import annotations

import importlib.metadata
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from typing_extensions import override

from async_rl.environments.base import SingleTurn
from async_rl.environments.math_answers import MathAnswers
from async_rl.environments.numbers import final_number
from async_rl.environments.rows import RowError, read_rows

log = logging.getLogger(__name__)

REPO = "openai/gsm8k"
_HUB_FILES = {"train": "main/train-00000-of-00001.parquet", "test": "main/test-00000-of-00001.parquet"}
# The stand-in is as large as the data set it stands in for; the splits' seeds are far apart, so no problem is in both.
_STAND_IN = {"train": (0, 7473), "test": (10_000_000, 1319)}

PROMPT = (
    "{question}\n\nReason step by step and finish with a line that has only the answer as a number after four hash "
    "signs, like this:\n#### 42"
)


@dataclass(frozen=True, slots=True)
class Problems:
    """Both splits and where they came from."""

    source: str
    train: list[dict[str, str]]
    test: list[dict[str, str]]


class GSM8K(SingleTurn):
    """Word problems with one number as the answer; 1 if the completion's final answer is it, else 0.

    The final number is the one after ``####``, or the last one. Data is taken from the first of: ``path``; the Hub's
    cache; the Hub (``openai/gsm8k``); with no network and ``strict`` off, GSM-Symbolic problems made by the package
    reasoning-gym (other problems of the same kind, announced in a warning).

    Args:
        path: A directory with ``train.jsonl`` and ``test.jsonl`` (or ``.parquet``), or one file, of which the last
            ``eval_size`` rows (default a tenth) are kept for evaluation. Rows have ``question`` and ``answer``
            (ending with ``#### number``).
        strict: Refuse the stand-in.
        eval_size: Evaluate on so many problems, >= 1; default all of the test split.
        answer_check: ``"number"`` compares the final numbers; ``"math_verify"`` the final answers as mathematics (see
            :class:`~async_rl.environments.math_answers.MathAnswers`), for models that answer in LaTeX.
        name: Name for metrics and the ledger.

    Attributes:
        source: What was taken, for the run's header.

    Raises:
        RowError: a file or row that cannot be used, named with its line.
        SourceNotFoundError: ``strict``, and none of path, cache and Hub had the data.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        strict: bool = False,
        eval_size: int | None = None,
        answer_check: Literal["number", "math_verify"] = "number",
        name: str = "gsm8k",
    ) -> None:
        if eval_size is not None and eval_size < 1:
            raise ValueError(f"environment.eval_size={eval_size}: must be >= 1, or null for all")
        if answer_check not in ("number", "math_verify"):
            raise ValueError(f'environment.answer_check={answer_check!r}: must be "number" or "math_verify"')
        self.name = name
        self._answers = MathAnswers() if answer_check == "math_verify" else None
        problems = find_problems(path, strict, eval_size)
        self.source = problems.source
        self._train = problems.train
        self._eval = problems.test[:eval_size]

    @override
    def prompts(self, split: Literal["train", "eval"]) -> Sequence[Mapping[str, Any]]:
        return self._train if split == "train" else self._eval

    @override
    def messages(self, prompt: Mapping[str, Any]) -> list[dict[str, str]]:
        return [{"role": "user", "content": PROMPT.format(question=prompt["question"])}]

    @override
    def reward(self, prompt: Mapping[str, Any], completion: str) -> float:
        right = final_number(prompt["answer"])
        if self._answers is not None:
            return float(self._answers.same(str(right), completion))
        return float(final_number(completion) == right)


def find_problems(path: str | os.PathLike[str] | None, strict: bool, eval_size: int | None) -> Problems:
    """Take the data from the first place that has it; see :class:`GSM8K` for the order and the errors."""
    if path is not None:
        return _from_path(Path(path).expanduser(), eval_size)
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    from async_rl.hub import SourceNotFoundError, offline_reason, reachable

    cached = {split: try_to_load_from_cache(REPO, file, repo_type="dataset") for split, file in _HUB_FILES.items()}
    if all(isinstance(file, str) for file in cached.values()):
        return _from_files(f"{REPO} (Hub cache)", cached["train"], cached["test"])  # type: ignore[arg-type]
    if reachable(timeout_s=2.0):
        try:
            files = {split: hf_hub_download(REPO, file, repo_type="dataset") for split, file in _HUB_FILES.items()}
        except Exception as error:  # its client raises errors of several libraries; all of them mean: not from there
            why = f"the Hub refused it ({type(error).__name__}: {error})"
        else:
            return _from_files(f"{REPO} (Hub)", files["train"], files["test"])
    else:
        why = offline_reason()
    if strict:
        raise SourceNotFoundError(
            f"GSM8K ({REPO}) is not in the Hub's cache and {why}. Give a directory with train.jsonl and test.jsonl as "
            "environment.path, or set environment.strict=false to train on the GSM-Symbolic stand-in"
        )
    return _stand_in(why)


def _from_path(path: Path, eval_size: int | None) -> Problems:
    if path.is_file():
        rows = _load(path)
        held_out = eval_size or max(1, len(rows) // 10)
        if held_out >= len(rows):
            raise RowError(f"{path}: {len(rows)} rows are too few to keep {held_out} of them for evaluation")
        return Problems(f"{path} (its last {held_out} rows for evaluation)", rows[:-held_out], rows[-held_out:])
    if not path.is_dir():
        raise RowError(f"environment.path={path}: no such file or directory; give the one with the data")
    return _from_files(str(path), _split_file(path, "train"), _split_file(path, "test"))


def _split_file(directory: Path, split: str) -> Path:
    candidates = [directory / f"{split}.jsonl", directory / f"{split}.parquet", directory / _HUB_FILES[split]]
    for file in candidates:
        if file.is_file():
            return file
    names = ", ".join(str(c.relative_to(directory)) for c in candidates)
    raise RowError(f"environment.path={directory}: has no {split} split; give a directory with one of {names}")


def _from_files(source: str, train: str | Path, test: str | Path) -> Problems:
    return Problems(source, _load(Path(train)), _load(Path(test)))


def _load(file: Path) -> list[dict[str, str]]:
    rows = read_rows(file, required=("question", "answer"), problem=_unanswered)
    return [{"question": str(row["question"]), "answer": str(row["answer"])} for row in rows]


def _unanswered(row: Mapping[str, Any]) -> str | None:
    answer = str(row["answer"])
    return f"the answer has no number: {answer[-80:]!r}" if final_number(answer) is None else None


def _stand_in(why: str) -> Problems:
    import reasoning_gym

    version = importlib.metadata.version("reasoning-gym")
    source = f"GSM-Symbolic problems made by reasoning-gym {version}, NOT GSM8K"
    bar = "!" * 100
    log.warning(
        "\n%s\nThis run does not train on GSM8K: it is not in the Hub's cache and %s.\nIt trains on %s.\n"
        "For GSM8K give environment.path=<directory with train.jsonl and test.jsonl>; environment.strict=true refuses "
        "the stand-in.\n%s",
        bar,
        why,
        source,
        bar,
    )
    splits = {
        split: [
            {"question": problem["question"], "answer": str(problem["answer"])}
            for problem in reasoning_gym.create_dataset("gsm_symbolic", seed=seed, size=size)
        ]
        for split, (seed, size) in _STAND_IN.items()
    }
    return Problems(source, splits["train"], splits["test"])
