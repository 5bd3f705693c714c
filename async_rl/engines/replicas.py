"""replica_arguments: several colocated engines of one kind, each with its own name, log and share of the cores."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from async_rl.engines.vllm_launch import engine_cores


def replica_arguments(
    kind: str, arguments: Mapping[str, Any], replicas: int, allowed_cores: Sequence[int]
) -> list[dict[str, Any]]:
    """Constructor arguments of each replica.

    Args:
        kind: First part of their names: ``"vllm"`` gives ``vllm-0``, ``vllm-1``.
        arguments: Those of one engine. Memory (``kv_cache_gib``, ``gpu_memory_utilization``) is per replica.
        replicas: How many, >= 1.
        allowed_cores: Cores this process may use, sorted; ``cpu_cores`` is divided among the replicas.

    Raises:
        ValueError: ``cpu_cores`` lists fewer cores than there are replicas, or can't be read.

    Example:
        >>> engines = [VLLMEngine(**a) for a in replica_arguments("vllm", {"model": "models/smollm2"}, 2, range(8))]
    """
    if replicas == 1:
        return [dict(arguments)]
    shares = _core_shares(str(arguments.get("cpu_cores", "auto")), replicas, list(allowed_cores))
    result = []
    for i in range(replicas):
        own = {**arguments, "name": f"{kind}-{i}"}
        if "cpu_cores" in arguments:
            own["cpu_cores"] = shares[i]
        if arguments.get("log_file"):
            log_file = Path(arguments["log_file"])
            own["log_file"] = str(log_file.with_stem(f"{log_file.stem}-{i}"))
        result.append(own)
    return result


def _core_shares(spec: str, replicas: int, allowed: list[int]) -> list[str]:
    """``cpu_cores`` of each replica: neighbouring cores; with ``"auto"`` and too few of them, the same ones in turn."""
    cores = engine_cores(spec, allowed)
    if not cores:
        return ["none"] * replicas
    if spec == "auto" and len(cores) < replicas:
        cores = allowed[:replicas]
        return [str(cores[i % len(cores)]) for i in range(replicas)]
    if len(cores) < replicas:
        raise ValueError(
            f"engine.cpu_cores={spec} has {len(cores)} cores for engine.replicas={replicas} engines; list at least "
            'one for each, or set it to "none"'
        )
    bounds = [len(cores) * i // replicas for i in range(replicas + 1)]
    return [",".join(map(str, cores[a:b])) for a, b in itertools.pairwise(bounds)]
