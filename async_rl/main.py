"""The command: compose, validate, build, fit, exit code."""

from __future__ import annotations

import logging
import os
import re
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, InstantiationException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from async_rl import compose
from async_rl.config import Component, ConfigError, RunConfig, optimizer_extras
from async_rl.console import messages, print_error
from async_rl.earlier_config import continued, earlier_choices, keep, save
from async_rl.hub import SourceNotFoundError
from async_rl.resume_rules import DATABASE
from async_rl.run_directory import RunDirectory, claim_directory
from async_rl.run_end import EXIT_CONFIG, EXIT_ERROR, EXIT_FINISHED, EXIT_INTERRUPTED, RunInterrupted
from async_rl.run_header import run_facts
from async_rl.run_record import RunRecord
from async_rl.signals import terminating_interrupts
from async_rl.sweep import JobEnd, never_began
from async_rl.targets import parameters_of, refused_by
from async_rl.types import SettingError

if TYPE_CHECKING:
    from async_rl.datamodule import RolloutDataModule
    from async_rl.models import ResolvedModel
    from async_rl.policy import PolicyModule
    from async_rl.trainer import AsyncRLTrainer

log = logging.getLogger("async_rl")


def main() -> int:
    """Run the command line and return the exit code: 0 finished, 1 error, 2 config error, 3 guard, 75 interrupted.

    In a sweep the jobs run one after the other; the code is that of the first one that did not finish.
    """
    codes: list[int] = []
    command = list(sys.argv)

    def job(config: DictConfig) -> JobEnd:
        end = _job(config, command)
        codes.append(end.code)
        return end

    overrides = [argument for argument in command[1:] if "=" in argument]
    try:
        compose.register()
        compose.check_choices(overrides)
        sys.argv = [*command, *earlier_choices(overrides, compose.recipe_files())]
        with _whole_hydra_errors():
            hydra.main(version_base="1.3", config_path=str(compose.CONF), config_name="config")(job)()
    except ConfigError as error:
        compose.report(str(error))
        return EXIT_CONFIG
    except (HydraException, OmegaConfBaseException) as error:
        compose.report(compose.explain(error, command[1:]))
        return EXIT_CONFIG
    finally:
        sys.argv = command
    return next((code for code in codes if code), EXIT_FINISHED)


def _job(config: DictConfig, command: Sequence[str]) -> JobEnd:
    """One run, from its composed config to its exit code."""
    hydra_config = HydraConfig.get()
    sweep, chosen = hydra_config.mode == RunMode.MULTIRUN, hydra_config.runtime.choices
    if sweep:
        config.run_dir = f"{config.run_dir}/{hydra_config.job.num}"
        if config.resume and never_began(Path(config.run_dir)):
            config.resume = False
            print(f"there is no run in {config.run_dir} yet: it begins now", flush=True)
    try:
        settings = continued(config, hydra_config.overrides.task, chosen)
        checked = compose.check_continued(settings, hydra_config.overrides.task)
        if sweep:
            with suppress(OSError):
                Path(checked.run_dir).rmdir()  # Hydra's, and empty; what the job makes itself, it can take back
        directory = claim_directory(checked)
    except ConfigError as error:
        compose.report(str(error))
        return JobEnd(EXIT_CONFIG)
    save(settings.config, Path(checked.run_dir))
    choices = settings.choices
    record = RunRecord(
        Path(checked.run_dir), compose.recipe_name(choices), checked.seed, compose.resolved_choices(choices), command
    )
    if settings.note:
        print(settings.note, flush=True)
    code, reason, interrupted = EXIT_ERROR, "error", False
    try:
        with messages(Path(checked.run_dir) / "run.log"), terminating_interrupts():
            code, reason = _train(checked, choices, record, directory)
    except KeyboardInterrupt:
        reason, interrupted = "interrupted before training", True
        hint = ""
        if (Path(checked.run_dir) / DATABASE).exists():  # of an earlier process: a resume still works
            code, hint = EXIT_INTERRUPTED, f"; go on with resume=true run_dir={checked.run_dir}"
        print(reason + hint, file=sys.stderr)
    finally:
        if not ((code == EXIT_CONFIG or directory.overwrites) and directory.restore()):
            record.finish(reason, code)
        directory.release()
    return JobEnd(code, interrupted or code == EXIT_INTERRUPTED)


def _train(
    config: RunConfig, choices: Mapping[str, Any], record: RunRecord, directory: RunDirectory
) -> tuple[int, str]:
    """Build and fit; returns the exit code and the reason of the end, errors included."""
    try:
        trainer, policy, datamodule = build(config, choices, record)
    except SourceNotFoundError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_ERROR, str(error)
    except Exception as error:
        if (refusal := _refusal(error)) is None:
            return EXIT_ERROR, print_error(error)
        log.debug("while building", exc_info=error)
        compose.report(refusal)
        return EXIT_CONFIG, refusal
    directory.begin()
    try:
        with suppress(RunInterrupted):  # its exit code is that of the end
            trainer.fit(policy, datamodule=datamodule)
    except SettingError as error:
        compose.report(str(error))
        return EXIT_CONFIG, str(error)
    except Exception as error:
        return EXIT_ERROR, print_error(error)
    return trainer.end.exit_code, trainer.end.reason


def _refusal(error: Exception) -> str | None:
    """The message with which a constructor refused what the config gives it, or ``None`` for any other error."""
    if isinstance(error, InstantiationException) and isinstance(error.__cause__, ValueError | TypeError):
        target = re.search(r"'([\w.]+)'", str(error))
        return refused_by(target[1], error.__cause__) if target else str(error.__cause__)
    return str(error) if isinstance(error, ValueError) else None


def build(
    config: RunConfig, choices: Mapping[str, Any], record: RunRecord
) -> tuple[AsyncRLTrainer, PolicyModule, RolloutDataModule | None]:
    """Make the objects of a run, print the header and write down what was taken."""
    import lightning.pytorch as pl
    import torch

    from async_rl.models import resolve_model
    from async_rl.precision import resolve_precision

    _quieten_libraries()
    pl.seed_everything(config.seed, workers=True, verbose=False)
    if config.hardware.trainer_threads is not None:
        torch.set_num_threads(config.hardware.trainer_threads)
    precision: Any = resolve_precision(config.hardware.precision, config.hardware.accelerator)
    if precision != config.hardware.precision:
        config = replace(config, hardware=replace(config.hardware, precision=precision))
        keep(Path(config.run_dir), "hardware.precision", precision)
    model = resolve_model(config.model.name_or_path, config.model.revision)
    environment = None  # a replay needs none, but for the model it starts with
    if config.replay is None or config.model.warm_up is not None:
        environment = _build_environments(config.environment)
    facts = run_facts(config, choices, model, environment)
    record.start(facts)
    print("\n".join(f"{name:<8} {value}" for name, value in facts.items()), flush=True)
    if config.model.warm_up is not None:
        model = _warm_up(config, model, environment)
    datamodule = None  # a replay brings its own
    if config.replay is None:
        datamodule = _build_datamodule(config, environment, str(model.path))
    return _build_trainer(config, record), _build_policy(config, model), datamodule


def _warm_up(config: RunConfig, model: ResolvedModel, environment: Any) -> ResolvedModel:
    """The model after supervised training on what the environments demonstrate."""
    from async_rl.environments.base import by_name

    warm_up = hydra.utils.instantiate(dict(config.model.warm_up or {}))
    path = warm_up.apply(
        model.path,
        by_name(environment),
        micro_batch_tokens=config.model.micro_batch_tokens,
        precision=config.hardware.precision,
        accelerator=config.hardware.accelerator,
    )
    return replace(model, path=path)


def _build_environments(node: Component) -> Any:
    from async_rl.environments.base import Environment

    if "_target_" in node:
        return _made("environment", node, Environment)
    return {name: _made(f"environment.{name}", one, Environment) for name, one in node.items()}


def _made(path: str, node: Component, kind: type[Any]) -> Any:
    """The object of a node; one of another kind would be noticed only when the run uses it."""
    made = hydra.utils.instantiate(dict(node))
    if not isinstance(made, kind):
        base = f"{kind.__module__}.{kind.__qualname__}"
        raise ValueError(
            f"{path}._target_: {node['_target_']} makes no {kind.__name__}; give a class derived from {base}"
        )
    return made


def _build_engines(node: Component, model: str) -> list[Any]:
    """Engines of one node: as many as ``replicas`` says, or as their target returns."""
    from async_rl.engines.replicas import replica_arguments

    arguments = {name: value for name, value in node.items() if name != "replicas"}
    kind = str(node.get("name") or str(node["_target_"]).split(".")[-2:][0])
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    engines: list[Any] = []
    for own in replica_arguments(kind, arguments, node.get("replicas", 1), cores):
        built = hydra.utils.instantiate(own, model=model)
        engines += built if isinstance(built, list) else [built]
    return engines


def _build_eval_engines(config: RunConfig, model: str) -> list[Any]:
    """The engines for evaluations alone, under names and with log files of their own; none if none is configured."""
    if config.run.evaluation.engine is None:
        return []
    node = dict(config.run.evaluation.engine)
    parameters = parameters_of(str(node["_target_"]))
    if parameters is not None and "name" in parameters.annotations:
        node.setdefault("name", "eval")
    if node.get("log_file") and node["log_file"] == config.engine.get("log_file"):
        log_file = Path(node["log_file"])
        node["log_file"] = str(log_file.with_stem(f"{log_file.stem}-eval"))
    return _build_engines(node, model)


def _build_datamodule(config: RunConfig, environment: Any, model: str) -> RolloutDataModule:
    from async_rl.datamodule import RolloutDataModule
    from async_rl.engines.base import SamplingParams

    def sampling(section: Any) -> SamplingParams:
        return SamplingParams(**{**asdict(section), "stop": tuple(section.stop)})

    rollout = {name: value for name, value in asdict(config.rollout).items() if name != "sampling"}
    return RolloutDataModule(
        environment,
        _build_engines(config.engine, model),
        batch_size=config.batch_size,
        group_size=config.group_size,
        max_concurrent=config.max_concurrent,
        sampling=sampling(config.rollout.sampling),
        eval_sampling=sampling(config.run.evaluation.sampling),
        eval_samples=config.run.evaluation.samples,
        eval_limit=config.run.evaluation.limit,
        eval_pass_threshold=config.run.evaluation.pass_threshold,
        eval_engine=_build_eval_engines(config, model),
        load_timeout_s=config.run.load_timeout_s,
        max_engine_restarts=config.run.max_engine_restarts,
        **rollout,
    )


def _build_policy(config: RunConfig, model: ResolvedModel) -> PolicyModule:
    from async_rl.policy import PolicyModule

    extras = optimizer_extras(config.optimizer)
    optimizer = {name: value for name, value in config.optimizer.items() if name not in extras}
    if isinstance(extras["lr_schedule"], Mapping):
        extras["lr_schedule"] = hydra.utils.instantiate({**extras["lr_schedule"], "_partial_": True})
    make_optimizer = hydra.utils.instantiate({**optimizer, "_partial_": True})
    _try_optimizer(make_optimizer)
    return PolicyModule(
        model=str(model.path),
        advantage=hydra.utils.instantiate(dict(config.algorithm.advantage)),
        loss=hydra.utils.instantiate(dict(config.algorithm.loss)),
        optimizer=make_optimizer,
        micro_batch_tokens=config.model.micro_batch_tokens,
        gradient_checkpointing=config.model.gradient_checkpointing,
        share_prefix=config.model.share_prefix,
        temperature=config.rollout.sampling.temperature,
        max_nonfinite_steps=config.run.max_nonfinite_steps,
        **extras,
    )


def _try_optimizer(make_optimizer: Any) -> None:
    """Let the optimizer refuse its arguments now, not when the engine runs already."""
    import torch

    try:
        make_optimizer([torch.nn.Parameter(torch.zeros(1))])
    except Exception as error:
        raise ValueError(f"optimizer: {type(error).__name__}: {error}") from error


def _build_trainer(config: RunConfig, record: RunRecord) -> AsyncRLTrainer:
    import lightning.pytorch as pl

    from async_rl.trainer import AsyncRLTrainer

    def all_of(section: str, kind: type[Any]) -> list[Any]:
        nodes = getattr(config, section)
        return [_made(f"{section}.{name}", node, kind) for name, node in nodes.items() if node is not None]

    return AsyncRLTrainer(
        max_steps=config.max_steps,
        max_staleness=config.max_staleness,
        admit_ahead=config.admit_ahead,
        oversample_factor=config.oversample_factor,
        stale_policy=config.stale_policy,
        sampling_policy=config.sampling_policy,
        acknowledge_staleness=config.acknowledge_staleness,
        seed=config.seed,
        run_dir=config.run_dir,
        resume=config.resume,
        resume_allow=config.resume_allow,
        replay=config.replay,
        eval_every=config.eval_every,
        evaluate_at=config.run.evaluation.at,
        checkpoint_every=config.run.checkpoint_every,
        checkpoint_every_s=config.run.checkpoint_every_s,
        keep_last=config.run.keep_last,
        parity_check=config.run.parity_check,
        stall_timeout_s=config.run.stall_timeout_s,
        shutdown_timeout_s=config.run.shutdown_timeout_s,
        checkpoint_timeout_s=config.run.checkpoint_timeout_s,
        callbacks=all_of("callbacks", pl.Callback),
        default_callbacks=False,  # the config names them, and what it leaves out is not wanted
        record=record,
        logger=all_of("logger", pl.loggers.Logger),
        accelerator=config.hardware.accelerator,
        devices=config.hardware.devices,
        precision=config.hardware.precision,
        **config.run.lightning,
    )


def _quieten_libraries() -> None:
    """Leave out what other libraries say about themselves when nothing is wrong."""
    from transformers.utils import logging as hf_logging

    hf_logging.disable_progress_bar()
    for name in ("lightning.pytorch", "lightning.fabric", "httpx", "vllm"):
        logging.getLogger(name).setLevel(logging.WARNING)
    for message in (
        r".*isinstance\(treespec",
        r".*overridden `transfer_batch_to_device`",
        r".*does not have many workers",
    ):
        warnings.filterwarnings("ignore", message=message)


@contextmanager
def _whole_hydra_errors() -> Iterator[None]:
    """Hydra prints its errors and exits with 1 unless told not to; we want them, to say more and exit with 2."""
    before = os.environ.get("HYDRA_FULL_ERROR")
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = before
