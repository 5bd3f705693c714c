"""What bfloat16 does to a training step on this CPU, and what ``precision=auto`` makes of it.

    python scripts/bench_precision.py [--model DIR] [--tokens 1024] [--rounds 3] [--json FILE]
    ONEDNN_MAX_CPU_ISA=AVX2 python scripts/bench_precision.py --tokens 64    # as on a CPU without AVX-512

Forward and backward pass of a causal language model over sequences of at most 512 tokens, under autocast to bfloat16
and in float32, taking turns; the weights are float32 in both. Medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from async_rl.causal_lm import load_causal_lm
from async_rl.models import SMOLLM2, resolve_model
from async_rl.precision import AUTO, BFLOAT16, FLOAT32, resolve_precision


def step_s(model: Any, token_ids: torch.Tensor, precision: str) -> float:
    """Seconds of one forward and backward pass over ``token_ids`` (``[batch, seq]``)."""
    began_s = time.perf_counter()
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == BFLOAT16):
        loss = model(input_ids=token_ids, labels=token_ids).loss
    loss.backward()
    model.zero_grad()
    return time.perf_counter() - began_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=SMOLLM2, help="directory or name of a model, or 'tiny'")
    parser.add_argument("--tokens", type=int, default=1024, help="of a step")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

    model = load_causal_lm(resolve_model(args.model).path)
    length = min(args.tokens, 512)
    token_ids = torch.randint(0, model.config.vocab_size, (args.tokens // length, length))
    taken: dict[str, list[float]] = {BFLOAT16: [], FLOAT32: []}
    for turn in range(args.rounds + 1):
        for precision, seconds in taken.items():
            one_s = step_s(model, token_ids, precision)
            if turn:  # the first one warms up
                seconds.append(one_s)

    row = {precision: statistics.median(seconds) for precision, seconds in taken.items()}
    chosen = resolve_precision(AUTO, "cpu")
    table = Table(title=f"{token_ids.numel()} tokens, forward and backward, {torch.get_num_threads()} threads")
    for head in (*(f"{precision} (s)" for precision in row), "32-true is faster by", "precision=auto"):
        table.add_column(head, justify="right")
    table.add_row(*(f"{s:.2f}" for s in row.values()), f"{row[BFLOAT16] / row[FLOAT32]:.2f} x", chosen)
    Console().print(table)
    if args.json:
        args.json.write_text(json.dumps({**row, "auto": chosen}, indent=2) + "\n")


if __name__ == "__main__":
    main()
