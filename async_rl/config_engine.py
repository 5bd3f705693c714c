"""The rules of the engine sections of a config: replicas, servers, and keys that must not be there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from async_rl.config import Component, Problem, RunConfig
from async_rl.engines.vllm_server_address import KEY_VARIABLE, check_url

MOST_GPU_MEMORY = 0.95
"""Share of a GPU's memory that engines on it may take together."""
EXAMPLE = "http://127.0.0.1:8001"
KEY_FIX = f"remove it and set the environment variable {KEY_VARIABLE} here and where the servers run"


def engine_rules(c: RunConfig) -> Iterator[Problem]:
    """What is wrong with how many engines there are, and where."""
    nodes = {"engine": c.engine}
    if c.run.evaluation.engine is not None:
        nodes["run.evaluation.engine"] = c.run.evaluation.engine
        if c.run.evaluation.at == "never" and not c.eval_every:
            yield Problem(
                "run.evaluation.engine",
                "is never used with run.evaluation.at=never and eval_every=0; change one of them, or set it to null",
            )
    for path, engine in nodes.items():
        yield from _node_rules(path, engine)
    dtypes = {path: node["dtype"] for path, node in nodes.items() if node.get("dtype") not in (None, "auto")}
    if len(set(dtypes.values())) > 1:
        yield Problem(
            "run.evaluation.engine.dtype",
            f"{dtypes['run.evaluation.engine']} with engine.dtype={dtypes['engine']}: weights are published once, for "
            "all engines; make them the same",
        )
    if shared := _urls_of(c.engine) & _urls_of(c.run.evaluation.engine or {}):
        yield Problem(
            "run.evaluation.engine.urls",
            f"{min(shared)} is one of engine.urls, and a server serves one version at a time; give another server, or "
            "leave run.evaluation.engine at null: then the engines of training evaluate, too",
        )
    if c.hardware.kind == "gpu":
        yield from _memory_rules(nodes)
    else:
        for path in [path for path, node in nodes.items() if node.get("weight_transfer") == "nccl"]:
            yield Problem(
                f"{path}.weight_transfer",
                "nccl sends weights from the trainer's GPU, but the trainer is on the CPU (hardware.kind="
                f"{c.hardware.kind}); give {path}.weight_transfer=file",
            )


def _node_rules(path: str, engine: Component) -> Iterator[Problem]:
    for name in engine:
        if "key" in str(name).lower():
            yield Problem(
                f"{path}.{name}",
                f"a key in a config ends up in files and logs; {KEY_FIX}",
            )
    if not is_count(replicas := engine.get("replicas", 1)):
        yield Problem(f"{path}.replicas", f"{replicas!r} is not possible; give a whole number >= 1")
    elif "urls" in engine:
        yield from _url_rules(path, engine, replicas)


def missing_key_hint(key: str) -> str:
    """What to do about a key of an engine section that is not there; empty where nothing particular is known."""
    section, _, name = key.rpartition(".")
    if section.rpartition(".")[2] != "engine":
        return ""
    if name == "replicas":
        return f"servers are counted by their addresses: list more of them, {section}.urls=[{EXAMPLE},{EXAMPLE[:-1]}2]"
    if any(word in name.lower() for word in ("key", "token", "password", "secret")):
        return f"a key in a config ends up in files and logs; {KEY_FIX}"
    return ""


def _urls_of(engine: Component) -> set[str]:
    urls = engine.get("urls")
    return {str(url).rstrip("/") for url in urls} if isinstance(urls, list | tuple) else set()


def is_count(value: Any) -> bool:
    """Whether it is a whole number."""
    return isinstance(value, int) and not isinstance(value, bool)


def _memory_rules(nodes: Mapping[str, Component]) -> Iterator[Problem]:
    shares = {
        path: (node.get("replicas", 1), node.get("gpu_memory_utilization"))
        for path, node in nodes.items()
        if isinstance(node.get("gpu_memory_utilization"), float) and is_count(node.get("replicas", 1))
    }
    engines = sum(replicas for replicas, _ in shares.values())
    if engines > 1 and sum(replicas * share for replicas, share in shares.values()) > MOST_GPU_MEMORY:
        each = ", ".join(f"{path}.gpu_memory_utilization={share:g}" for path, (_, share) in shares.items())
        yield Problem(
            "engine.replicas" if len(shares) == 1 else "run.evaluation.engine",
            f"{engines} engines with {each} each do not fit on one GPU; lower it to at most "
            f"{MOST_GPU_MEMORY / engines:.2f}",
        )


def _url_rules(path: str, engine: Component, replicas: int) -> Iterator[Problem]:
    urls = engine["urls"]
    if not isinstance(urls, list | tuple) or not urls or not all(isinstance(url, str) for url in urls):
        yield Problem(f"{path}.urls", f"give the servers' addresses, for example {path}.urls=[{EXAMPLE}]")
        return
    if replicas > 1:
        yield Problem(f"{path}.replicas", f"servers are counted by {path}.urls; remove it")
    if len(set(urls)) < len(urls):
        yield Problem(f"{path}.urls", "names a server twice")
    for url in urls:
        try:
            check_url(url, allow_remote=engine.get("allow_remote") is True)
        except ValueError as error:
            yield Problem(f"{path}.urls", str(error))
