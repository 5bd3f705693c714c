"""The header of a run: what it is made of and where that came from."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from async_rl import compose
from async_rl.config import Component, RunConfig

if TYPE_CHECKING:
    from async_rl.models import ResolvedModel


def run_facts(config: RunConfig, choices: Mapping[str, Any], model: ResolvedModel, environment: Any) -> dict[str, str]:
    """What the header shows and run.json keeps."""
    from async_rl.replay import RunToReplay

    replayed = None if config.replay is None else RunToReplay.read(config.replay)
    return {
        "recipe": f"{compose.recipe_name(choices)}, seed {config.seed}",
        "model": f"{model.name}, {model.source}" + (f"; {_call(config.model.warm_up)}" if config.model.warm_up else ""),
        **(_sources(config, choices, environment) if replayed is None else {"data": f"recorded in {config.replay}"}),
        "device": f"{config.hardware.accelerator}, {os.cpu_count()} cores, {config.hardware.precision}",
        "steps": (
            f"{config.max_steps} of {config.batch_size} x {config.group_size} rollouts, "
            f"max_staleness {config.max_staleness}, admit_ahead {config.effective_admit_ahead}"
            if replayed is None
            else replayed.described(config.max_steps)
        ),
        "results": config.run_dir,
    }


def _sources(config: RunConfig, choices: Mapping[str, Any], environment: Any) -> dict[str, str]:
    """Where prompts and samples come from."""
    nodes = [config.environment] if "_target_" in config.environment else list(config.environment.values())
    environments = list(environment.values()) if isinstance(environment, Mapping) else [environment]
    engine = str(config.engine["_target_"]).rpartition(".")[2]
    if (replicas := config.engine.get("replicas", 1)) > 1:
        engine += f" x {replicas}"
    if urls := config.engine.get("urls"):
        engine += f" at {', '.join(urls)}"
    if choices.get("engine") == "auto":
        engine += f" (engine=auto: {compose.choose_engine().why})"
    if (own := config.run.evaluation.engine) is not None:
        engine += f"; {str(own['_target_']).rpartition('.')[2]} for evaluations"
    return {
        "data": "; ".join(getattr(e, "source", "") or _call(n) for e, n in zip(environments, nodes, strict=True)),
        "engine": f"{engine}, {config.engine.get('dtype', 'its own dtype')}",
    }


def _call(node: Component) -> str:
    """A component as the call that makes it: ``Arithmetic(digits=1)``."""
    arguments = ", ".join(f"{name}={value!r}" for name, value in node.items() if not name.startswith("_"))
    return f"{str(node['_target_']).rpartition('.')[2]}({arguments})"
