"""Math: problems whose answers are formulas, and MathAnswers, which compares two of them in a killable process."""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from typing_extensions import override

from async_rl.environments.base import SingleTurn
from async_rl.environments.rows import RowError, read_rows
from async_rl.environments.worker import WorkerProcess

PROMPT = "{problem}\n\nReason step by step and put the final answer into \\boxed{{}}."


class MathAnswers:
    r"""Says whether an answer is mathematically the same as the right one, with the package ``math-verify``.

    Comparing formulas may take forever or a machine's memory, so it happens in processes that are killed at a deadline.
    Numbers, fractions, sets, intervals, equations and LaTeX are understood: ``1/2``, ``0.5``, ``\frac{1}{2}`` are one.

    Args:
        timeout_s: Deadline of one comparison in seconds, > 0.
        processes: Comparisons at once, >= 1.

    Raises:
        ValueError: ``math-verify`` is not installed; says how to install it.
    """

    def __init__(self, timeout_s: float = 5.0, processes: int = 1) -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise ValueError("the answers are compared by math-verify, which is missing: pip install 'async-rl[math]'")
        self._worker = WorkerProcess(__name__, timeout_s=timeout_s, processes=processes)

    def same(self, right: str, completion: str) -> bool:
        """Whether the final answer in ``completion`` equals ``right``. Blocks; belongs off the event loop.

        Raises:
            RewardTimeoutError: no verdict within ``timeout_s``: a failed sample, not a wrong answer.
            RewardError: the comparison crashed.
        """
        return bool(self._worker.call("same_answer", right, completion))


class Math(SingleTurn):
    """Problems from a file; 1 if the completion's final answer equals the right one, else 0.

    Args:
        path: The training problems: a ``.jsonl`` or ``.parquet`` file with ``problem`` and ``answer`` (a number, an
            expression, or LaTeX without dollar signs) in every row.
        eval_path: The evaluation problems, as ``path``; default: the last ``eval_size`` of the training problems, which
            are then not trained on.
        eval_size: Evaluate on so many problems, >= 1.
        prompt: What to ask: a ``str.format`` template with ``{problem}``.
        timeout_s: Deadline of one comparison in seconds, > 0.
        processes: Comparisons at once, >= 1.
        name: Name for metrics and the ledger.

    Attributes:
        source: What was taken, for the run's header.

    Raises:
        RowError: a file that cannot be used.
        ValueError: a value is out of range, or ``math-verify`` is not installed.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        eval_path: str | os.PathLike[str] | None = None,
        eval_size: int = 200,
        prompt: str = PROMPT,
        timeout_s: float = 5.0,
        processes: int = 1,
        name: str = "math",
    ) -> None:
        if eval_size < 1:
            raise ValueError(f"environment.eval_size={eval_size}: must be >= 1")
        prompt.format(problem="")
        self.name = name
        self.source = str(path)
        self._prompt = prompt
        rows = _problems(path)
        if eval_path is None:
            if eval_size >= len(rows):
                raise RowError(f"{path}: {len(rows)} rows are too few to keep eval_size={eval_size} for evaluation")
            rows, held_out = rows[:-eval_size], rows[-eval_size:]
        else:
            held_out = _problems(eval_path)[:eval_size]
        self._train, self._eval = rows, held_out
        self._answers = MathAnswers(timeout_s, processes)

    @override
    def prompts(self, split: Literal["train", "eval"]) -> Sequence[Mapping[str, Any]]:
        return self._train if split == "train" else self._eval

    @override
    def messages(self, prompt: Mapping[str, Any]) -> str:
        return self._prompt.format(problem=prompt["problem"])

    @override
    def reward(self, prompt: Mapping[str, Any], completion: str) -> float:
        return float(self._answers.same(prompt["answer"], completion))


def _problems(path: str | os.PathLike[str]) -> list[dict[str, str]]:
    rows = read_rows(path, required=("problem", "answer"))
    return [{"problem": str(row["problem"]), "answer": str(row["answer"])} for row in rows]


def same_answer(right: str, completion: str) -> bool:
    """Compare in this process; what :class:`MathAnswers` runs in its own."""
    parse, verify = _math_verify()
    gold = parse(f"${right}$") or parse(right)
    if not gold:
        raise ValueError(f"the right answer {right!r} cannot be read")
    return bool(verify(gold, parse(completion)))


@functools.cache
def _math_verify() -> tuple[Any, Any]:
    import math_verify
    import math_verify.parser

    from async_rl.environments.symbolic import parse_symbolic

    # Its fallback for plain expressions is sympy's parser, which evaluates text as Python.
    math_verify.parser.parse_expr = parse_symbolic
    # Its own time-outs are signals and end nothing that hangs in C; the deadline is the process's. It warns of that.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    parse = functools.partial(math_verify.parse, parsing_timeout=None)
    return parse, functools.partial(math_verify.verify, timeout_seconds=None)
