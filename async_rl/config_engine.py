"""The rules of the `engine` section of a config: replicas, servers, and keys that must not be there."""

from __future__ import annotations

from collections.abc import Iterator

from async_rl.config import Problem, RunConfig
from async_rl.engines.vllm_server_address import KEY_VARIABLE, check_url

MOST_GPU_MEMORY = 0.95
"""Share of a GPU's memory that engines on it may take together."""


def engine_rules(c: RunConfig) -> Iterator[Problem]:
    """What is wrong with how many engines there are, and where."""
    engine, replicas = c.engine, c.engine.get("replicas", 1)
    for name in engine:
        if "key" in str(name).lower():
            yield Problem(
                f"engine.{name}",
                "a key in a config ends up in files and logs; remove it and set the environment variable "
                f"{KEY_VARIABLE} here and where the servers run",
            )
    if not isinstance(replicas, int) or isinstance(replicas, bool):
        yield Problem("engine.replicas", f"{replicas!r} is not possible; give a whole number >= 1")
        return
    share = engine.get("gpu_memory_utilization")
    if replicas > 1 and c.hardware.kind == "gpu" and isinstance(share, float) and replicas * share > MOST_GPU_MEMORY:
        yield Problem(
            "engine.replicas",
            f"{replicas} engines with engine.gpu_memory_utilization={share:g} each do not fit on one GPU; lower it to "
            f"at most {MOST_GPU_MEMORY / replicas:.2f}",
        )
    if "urls" in engine:
        yield from _url_rules(c, replicas)


def _url_rules(c: RunConfig, replicas: int) -> Iterator[Problem]:
    urls = c.engine["urls"]
    if not isinstance(urls, list | tuple) or not urls or not all(isinstance(url, str) for url in urls):
        yield Problem("engine.urls", "give the servers' addresses, for example engine.urls=[http://127.0.0.1:8001]")
        return
    if replicas > 1:
        yield Problem("engine.replicas", "servers are counted by engine.urls; remove it")
    if len(set(urls)) < len(urls):
        yield Problem("engine.urls", "names a server twice")
    for url in urls:
        try:
            check_url(url, allow_remote=c.engine.get("allow_remote") is True)
        except ValueError as error:
            yield Problem("engine.urls", str(error))
