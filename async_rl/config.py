"""The schema of the whole config tree: every key with its type, range and help line. Imports nothing heavy."""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

Component = Mapping[str, Any]
"""A ``_target_`` node: what ``hydra.utils.instantiate`` builds. Its keys are those of the target's signature."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong with a config: the key, and what to do about it."""

    key: str
    message: str


class ConfigError(ValueError):
    """A config that cannot run. The message has a line per problem."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(f"{p.key}: {p.message}" if p.key else p.message for p in self.problems))


@dataclass(frozen=True, slots=True)
class Range:
    """Which numbers are possible."""

    ge: float | None = None
    gt: float | None = None
    le: float | None = None

    def __contains__(self, value: float) -> bool:
        return (
            math.isfinite(value)
            and (self.ge is None or value >= self.ge)
            and (self.gt is None or value > self.gt)
            and (self.le is None or value <= self.le)
        )

    def __str__(self) -> str:
        bounds = ((">=", self.ge), (">", self.gt), ("<=", self.le))
        return " and ".join(f"{sign} {bound:g}" for sign, bound in bounds if bound is not None)


class Key:
    """What the schema says about a key beside its type: its help line and the range of its value."""

    def __init__(self, help: str, **bounds: float) -> None:
        self.help = help
        self.range = Range(**bounds)


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareConfig:
    """The machine; ``${by_hardware:cpu value,gpu value}`` anywhere in a config picks by ``kind``."""

    kind: Annotated[Literal["cpu", "gpu"], Key("what the presets are for; found out when not given")]
    accelerator: Annotated[str, Key("Lightning's accelerator")]
    devices: Annotated[int, Key("devices the policy trains on", ge=1)]
    precision: Annotated[
        Literal["auto", "bf16-mixed", "32-true"], Key("bf16-mixed, 32-true, or auto: the faster one, on a CPU measured")
    ]
    trainer_threads: Annotated[int | None, Key("CPU threads of the trainer; null: one per core", ge=1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The policy's model, and how it fits into memory."""

    name_or_path: Annotated[str, Key("directory, Hub name, or tiny")]
    revision: Annotated[str | None, Key("branch, tag or commit on the Hub")]
    micro_batch_tokens: Annotated[int, Key("tokens of a forward and backward pass", ge=1)]
    gradient_checkpointing: Annotated[bool, Key("recompute activations instead of keeping them")]
    share_prefix: Annotated[Literal["auto"] | bool, Key("compute common beginnings of sequences once")]
    warm_up: Annotated[
        Component | None,
        Key("fine-tune on the environment's demonstrations first: a node such as {_target_: async_rl.warm_up.WarmUp}"),
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmConfig:
    """What a reward is worth and how it moves the policy."""

    advantage: Annotated[Component, Key("rewards -> advantages")]
    loss: Annotated[Component, Key("the policy loss")]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingConfig:
    """How model turns are sampled."""

    max_tokens: Annotated[int, Key("most tokens of a turn", ge=1)]
    temperature: Annotated[float, Key("softmax temperature", ge=0)]
    top_p: Annotated[float, Key("nucleus sampling", gt=0, le=1)]
    top_k: Annotated[int, Key("sample from the k likeliest tokens; 0: all", ge=0)]
    min_p: Annotated[float, Key("least probability relative to the likeliest token", ge=0, le=1)]
    stop: Annotated[list[str], Key("strings that end a turn")]


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutConfig:
    """How rollouts run, fail and end."""

    sampling: Annotated[SamplingConfig, Key("how training rollouts are sampled")]
    max_turns: Annotated[int | None, Key("model turns of a trajectory at most; null: no limit", ge=1)]
    max_generated_tokens: Annotated[
        int | None, Key("sampled tokens of a trajectory at most, over all turns; null: no limit", ge=1)
    ]
    max_context: Annotated[
        int | None, Key("tokens the model sees at once at most; null: what the engine can hold", ge=2)
    ]
    template_rewrite: Annotated[
        Literal["refuse", "split"],
        Key("a chat template that rewrites earlier turns: fail, or train each context apart"),
    ]
    epochs: Annotated[int | None, Key("passes over the prompts; null: as many as the steps need", ge=1)]
    shuffle: Annotated[bool, Key("reorder the prompts every epoch")]
    mixture: Annotated[
        Mapping[str, Any] | None, Key("weights of several environments by name; null: in proportion to their prompts")
    ]
    last_batch: Annotated[Literal["drop", "train"], Key("what becomes of a short last batch")]
    group_completion: Annotated[Literal["all", "quorum"], Key("wait for all of a group, or go on without stragglers")]
    min_group_size: Annotated[int | None, Key("trajectories that make a quorum", ge=1)]
    straggler_timeout_s: Annotated[float | None, Key("seconds a quorum waits for the rest", ge=0)]
    max_retries: Annotated[int, Key("attempts after the first, for one trajectory", ge=0)]
    max_failures: Annotated[int, Key("failed attempts in a row that are put up with; one more ends the run", ge=0)]
    rollout_timeout_s: Annotated[float, Key("deadline of one attempt", gt=0)]
    reward_timeout_s: Annotated[float, Key("deadline of one reward call", gt=0)]
    rollout_threads: Annotated[int, Key("event loops that run rollouts", ge=1)]
    filter_zero_variance: Annotated[bool, Key("leave out groups whose rewards are all equal")]
    forward_backward_batch: Annotated[
        Literal["auto", "off", False] | Mapping[str, Any],
        Key("at max_staleness=0, train complete groups early: auto, off, or {min_sequences: 64, min_tokens: 131072}"),
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationConfig:
    """How the policy is evaluated."""

    at: Annotated[Literal["ends", "never"], Key("before the first and after the last step, or not at all")]
    samples: Annotated[int, Key("samples per evaluation prompt", ge=1)]
    limit: Annotated[int | None, Key("evaluate on the first so many prompts; null: all", ge=1)]
    pass_threshold: Annotated[float, Key("least reward with which a sample passes, for pass@k")]
    engine: Annotated[
        Component | None,
        Key("an engine for evaluations alone, for example ${engine}: the same again; null: no own one"),
    ]
    sampling: Annotated[SamplingConfig, Key("how evaluation is sampled")]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """What surrounds training: evaluation, checkpoints, time-outs, guards."""

    evaluation: Annotated[EvaluationConfig, Key("how the policy is evaluated")]
    checkpoint_every: Annotated[int, Key("save a checkpoint every so many steps; 0: not by steps", ge=0)]
    checkpoint_every_s: Annotated[float | None, Key("save one so many seconds after the last; null: never", gt=0)]
    keep_last: Annotated[int, Key("checkpoints kept", ge=1)]
    parity_check: Annotated[bool, Key("compare log-probabilities of engine and trainer")]
    max_nonfinite_steps: Annotated[int, Key("steps in a row without a finite loss that end the run", ge=1)]
    load_timeout_s: Annotated[float, Key("deadline of one weight load", gt=0)]
    max_engine_restarts: Annotated[int, Key("dead engines started again, over the run; one more death ends it", ge=0)]
    stall_timeout_s: Annotated[
        float | None, Key("seconds without a batch, a finished rollout or a load that end the run; null: any", gt=0)
    ]
    shutdown_timeout_s: Annotated[float, Key("most seconds the end of a run may take", gt=0)]
    checkpoint_timeout_s: Annotated[float, Key("most seconds the last checkpoint may take, not counted there", gt=0)]
    lightning: Annotated[Component, Key("further arguments of lightning.Trainer")]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """Everything a run is made of; the root of the config tree."""

    max_steps: Annotated[int, Key("optimizer steps, which is policy versions, to train", ge=1)]
    max_staleness: Annotated[int, Key("S: oldest age, in versions, of a trained token; 0: the synchronous loop", ge=0)]
    admit_ahead: Annotated[int | None, Key("W: versions to run ahead; null: min(S, 2)", ge=0)]
    oversample_factor: Annotated[float, Key("admit so many times more groups than needed; > 1 needs W < S", ge=1)]
    batch_size: Annotated[int, Key("B: groups per step", ge=1)]
    group_size: Annotated[int, Key("G: trajectories per group", ge=1)]
    max_concurrent: Annotated[int | None, Key("C: trajectories in flight at most; null: (W + 1) * B * G", ge=1)]
    stale_policy: Annotated[Literal["wait", "mask", "allow"], Key("wait keeps the bound; the others give it up")]
    sampling_policy: Annotated[
        Literal["auto", "segment", "trajectory"], Key("swap weights in flight, or between rollouts")
    ]
    acknowledge_staleness: Annotated[bool, Key("confirm a setting that trains on stale data without protection")]
    seed: Annotated[int, Key("seed of the whole run", ge=0)]
    run_dir: Annotated[str, Key("where everything the run writes goes")]
    resume: Annotated[bool, Key("go on from the newest complete checkpoint in run_dir")]
    resume_allow: Annotated[list[str], Key("keys whose change a resume accepts, though recorded data had them other")]
    replay: Annotated[str | None, Key("train on what the run in this directory recorded, without an engine")]
    overwrite: Annotated[bool, Key("delete the run that is in run_dir")]
    eval_every: Annotated[int, Key("evaluate every so many steps; 0: see run.evaluation.at", ge=0)]
    hardware: Annotated[HardwareConfig, Key("the machine")]
    model: Annotated[ModelConfig, Key("the policy's model")]
    environment: Annotated[Component, Key("the task: one _target_ node, or several by name")]
    engine: Annotated[Component, Key("what samples")]
    algorithm: Annotated[AlgorithmConfig, Key("advantage and loss")]
    optimizer: Annotated[Component, Key("the optimizer, its schedule and clipping")]
    rollout: Annotated[RolloutConfig, Key("how rollouts run, fail and end")]
    run: Annotated[RunSettings, Key("evaluation, checkpoints, time-outs, guards")]
    callbacks: Annotated[Mapping[str, Any], Key("Lightning callbacks by name; null leaves one out")]
    logger: Annotated[Mapping[str, Any], Key("Lightning loggers by name; null leaves one out")]

    @property
    def effective_admit_ahead(self) -> int:
        """W after its default."""
        return min(self.max_staleness, 2) if self.admit_ahead is None else self.admit_ahead


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerExtras:
    """Keys of ``optimizer`` that are ours and not the optimizer's."""

    lr_schedule: Annotated[
        Literal["constant", "linear", "cosine"] | Component,
        Key("course of the learning rate after the warm-up, or a _target_ node"),
    ]
    warmup_steps: Annotated[int, Key("steps over which the learning rate rises to lr", ge=0)]
    gradient_clip_val: Annotated[float, Key("largest gradient norm; 0: no clipping", ge=0)]


ENGINE_RANGES: Mapping[str, Range] = {
    "max_model_len": Range(ge=1),
    "max_num_seqs": Range(ge=1),
    "gpu_memory_utilization": Range(gt=0, le=1),
    "kv_cache_gib": Range(gt=0),
    "start_timeout_s": Range(gt=0),
    "kv_max_age": Range(ge=0),
    "replicas": Range(ge=1),
}

COMPONENT_RANGES: Mapping[str, Range] = {
    "model.warm_up.traces": Range(ge=1),
    "model.warm_up.epochs": Range(ge=1),
    "model.warm_up.batch_size": Range(ge=1),
    "model.warm_up.lr": Range(gt=0),
    "optimizer.lr": Range(gt=0),
    "optimizer.weight_decay": Range(ge=0),
    "optimizer.eps": Range(gt=0),
    "algorithm.advantage.epsilon": Range(gt=0),
    "algorithm.loss.clip_low": Range(ge=0, le=1),
    "algorithm.loss.clip_high": Range(ge=0),
    "algorithm.loss.cap": Range(ge=1),
    "algorithm.loss.constant": Range(ge=0),
    "environment.digits": Range(ge=1, le=9),
    "environment.train_size": Range(ge=1),
    "environment.eval_size": Range(ge=1),
    **{
        f"{at}.{name}": allowed for at in ("engine", "run.evaluation.engine") for name, allowed in ENGINE_RANGES.items()
    },
}
"""Ranges of what our own components take, so that they are refused before the component is imported."""


def optimizer_extras(optimizer: Component) -> dict[str, Any]:
    """The keys of the ``optimizer`` node that are ours (see :class:`OptimizerExtras`)."""
    return {name: optimizer[name] for name in keys_of(OptimizerExtras) if name in optimizer}


def keys_of(schema: type[Any]) -> Mapping[str, tuple[Any, Key]]:
    """Annotation and :class:`Key` of every field of a section."""
    hints = typing.get_type_hints(schema, include_extras=True)
    return {name: typing.get_args(hint) for name, hint in hints.items()}


def known_keys(schema: type[Any] = RunConfig, prefix: str = "") -> list[str]:
    """Every key of the schema as a dotted path, sections included."""
    keys: list[str] = []
    for name, (annotation, _) in keys_of(schema).items():
        keys.append(prefix + name)
        if dataclasses.is_dataclass(annotation):
            keys += known_keys(typing.cast("type[Any]", annotation), f"{prefix}{name}.")
    if schema is RunConfig:
        keys += [f"optimizer.{name}" for name in keys_of(OptimizerExtras)] + list(COMPONENT_RANGES)
    return keys


def keys_help(schema: type[Any] = RunConfig, prefix: str = "") -> str:
    """One line per key that is a value, for ``--help``."""
    lines: list[str] = []
    for name, (annotation, about) in keys_of(schema).items():
        if dataclasses.is_dataclass(annotation):
            lines.append(keys_help(typing.cast("type[Any]", annotation), f"{prefix}{name}."))
        else:
            lines.append(f"{prefix + name:<36}  {about.help}")
    return "\n".join(lines)
