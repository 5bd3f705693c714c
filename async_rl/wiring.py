"""Builds the parts of a run from trainer, policy and datamodule, and connects them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from async_rl.archive import BatchArchive
from async_rl.arguments import refuse
from async_rl.engines.base import Engine, SamplingParams
from async_rl.environments.rollout import RolloutFunction, make_rollout
from async_rl.fingerprint import fingerprint
from async_rl.orchestrator.gate import CapacityGate
from async_rl.orchestrator.ledger import Ledger
from async_rl.orchestrator.orchestrator import Orchestrator
from async_rl.orchestrator.records import Recovery
from async_rl.orchestrator.recovery import described, within_bound
from async_rl.orchestrator.settings import ForwardBackwardBatch, OrchestratorSettings
from async_rl.record_bounds import RecordedBounds
from async_rl.record_evaluations import RecordedEvaluations
from async_rl.resume_rules import DATABASE, refusal
from async_rl.session import RolloutSession
from async_rl.staleness_rules import staleness_problems
from async_rl.types import SettingError
from async_rl.weights import nccl
from async_rl.weights.base import WeightPublisher
from async_rl.weights.publishers import make_publisher
from async_rl.weights.shared_memory import BACKEND as SHARED_MEMORY

if TYPE_CHECKING:
    from async_rl.datamodule import RolloutDataModule
    from async_rl.policy import PolicyModule
    from async_rl.trainer import AsyncRLTrainer

log = logging.getLogger(__name__)
BATCHES = "batches"
"""The archive's directory in that of the run."""


@dataclass(frozen=True, slots=True)
class StalenessSettings:
    """How old the data may get, as the user set it, and what that gives up.

    Attributes:
        max_staleness: S, >= 0.
        admit_ahead: W in [0, S]; ``None``: ``min(S, 2)``, or S where whole trajectories keep their version.
        oversample_factor: f >= 1.
        stale_policy: ``"wait"``, ``"mask"`` or ``"allow"``.
        sampling_policy: ``"segment"``, ``"trajectory"`` or ``"auto"``.
        acknowledged: The user accepts training on stale data without protection.
    """

    max_staleness: int
    admit_ahead: int | None
    oversample_factor: float
    stale_policy: Literal["wait", "mask", "allow"]
    sampling_policy: Literal["auto", "segment", "trajectory"]
    acknowledged: bool

    def check(self) -> None:
        """Refuse settings that contradict each other, or give something up that was not acknowledged.

        Raises:
            ValueError: names the setting and the fix.
        """
        refuse(
            "AsyncRLTrainer",
            staleness_problems(
                max_staleness=self.max_staleness,
                admit_ahead=self.admit_ahead,
                oversample_factor=self.oversample_factor,
                stale_policy=self.stale_policy,
                acknowledged=self.acknowledged,
            ),
        )

    def check_loss(self, policy: PolicyModule) -> None:
        """Refuse old data for a loss that does not correct for its age, unless that was acknowledged.

        Raises:
            ValueError: names the setting and the fix.
        """
        if self.max_staleness > 0 and not policy.loss.corrects_off_policy and not self.acknowledged:
            raise ValueError(
                f"max_staleness={self.max_staleness} with a loss that does not correct for the behaviour policy; "
                "set the loss's correction to truncate or mask, max_staleness=0, or acknowledge_staleness=true"
            )

    def given_up(self, policy: PolicyModule) -> str:
        """What an acknowledged setting gives up, for people; empty where it is nothing."""
        if self.stale_policy == "mask":
            return (
                f"stale_policy=mask: the trainer does not wait for rollouts that are late; tokens older than "
                f"max_staleness={self.max_staleness} versions are masked out of the loss, so late rollouts teach "
                "little or nothing, and those are the long ones"
            )
        if self.stale_policy == "allow":
            return (
                "stale_policy=allow: nothing bounds the age of what is trained; a rollout is trained whenever it ends, "
                f"with tokens of any age (max_staleness={self.max_staleness} is not enforced)"
            )
        if self.max_staleness > 0 and not policy.loss.corrects_off_policy:
            return (
                f"max_staleness={self.max_staleness} without off-policy correction: tokens up to "
                f"{self.max_staleness} versions old are trained as if the current policy had sampled them"
            )
        return ""

    def resolve(self, versions_alive: int) -> tuple[int, Literal["segment", "trajectory"]]:
        """W and the sampling policy for engines that keep so many versions alive."""
        sampling = self.sampling_policy
        if sampling == "auto":
            sampling = "trajectory" if versions_alive > 1 else "segment"
        if self.admit_ahead is not None:
            return self.admit_ahead, sampling
        ahead = self.max_staleness if sampling == "trajectory" and versions_alive == 1 else min(self.max_staleness, 2)
        return ahead, sampling


def forward_backward_batch(
    setting: Literal["auto", "off"] | Mapping[str, Any], staleness: StalenessSettings, policy: PolicyModule
) -> ForwardBackwardBatch | None:
    """When to train complete groups ahead of the rest of their batch; ``None``: never.

    Raises:
        ValueError: it was asked for where it can't be done; the message names the setting and the fix.
    """
    synchronous = staleness.max_staleness == 0 and staleness.stale_policy == "wait"
    # An advantage function that doesn't say is taken to need the whole batch.
    needs_batch = getattr(policy.advantage, "needs_batch", True)
    if setting in ("auto", "off", False):
        return ForwardBackwardBatch() if setting == "auto" and synchronous and not needs_batch else None
    if not isinstance(setting, Mapping):
        raise ValueError(
            f'forward_backward_batch={setting!r}: give "auto", "off", or min_sequences and min_tokens, for example '
            '{"min_sequences": 64, "min_tokens": 131072}'
        )
    if unknown := set(setting) - {"min_sequences", "min_tokens"}:
        raise ValueError(f"forward_backward_batch: there is no {min(unknown)}; it has min_sequences and min_tokens")
    if not synchronous:
        raise ValueError(
            f"forward_backward_batch={dict(setting)} with max_staleness={staleness.max_staleness}, "
            f"stale_policy={staleness.stale_policy}: rollouts run ahead of training there, so a batch is trained once "
            'it is complete; set forward_backward_batch="auto", or max_staleness=0 and stale_policy=wait'
        )
    if needs_batch:
        raise ValueError(
            f"forward_backward_batch={dict(setting)} with {type(policy.advantage).__name__}: its advantages need the "
            'whole batch; set forward_backward_batch="auto", or a group-centred advantage such as GRPO'
        )
    return ForwardBackwardBatch(**setting)


def check_settings(trainer: AsyncRLTrainer, policy: PolicyModule, data: RolloutDataModule) -> None:
    """Refuse impossible settings before anything is started, and say what the accepted ones give up.

    Raises:
        ValueError: a setting is impossible, or needs to be acknowledged; the message names it.
    """
    trainer.staleness.check_loss(policy)
    if data.sampling.temperature == 0:
        raise ValueError(
            f"sampling with temperature=0 makes the group_size={data.group_size} rollouts of a prompt the same: there "
            "is nothing to learn from; give RolloutDataModule's sampling a temperature > 0, and PolicyModule the same "
            "(eval_sampling may be greedy)"
        )
    if data.sampling.temperature != policy.temperature:
        raise ValueError(
            f"rollouts are sampled at temperature={data.sampling.temperature}, but the policy takes log-probabilities "
            f"at temperature={policy.temperature}; give PolicyModule and RolloutDataModule's sampling the same one"
        )
    s = data.sampling
    if (s.top_p, s.top_k, s.min_p) != (1.0, 0, 0.0):
        raise ValueError(
            f"sampling with top_p={s.top_p}, top_k={s.top_k}, min_p={s.min_p} draws from a cut distribution whose "
            "log-probabilities the trainer does not compute; train with all of them off (eval_sampling may use them)"
        )
    CapacityGate.of(orchestrator_settings(trainer, policy, data))
    engines = [*data.engines, *data.eval_engines]
    if len({e.dtype for e in engines} - {"auto"}) > 1:
        found = ", ".join(f"{e.name}: {e.dtype}" for e in engines)
        raise ValueError(f"the engines of one run must load weights of one dtype, not {found}")
    if any(getattr(e, "weight_transfer", "") == "nccl" for e in engines):
        nccl.check_device(trainer.strategy.root_device)
    urls = [url for e in engines if (url := getattr(e, "url", None)) is not None]
    if twice := {url for url in urls if urls.count(url) > 1}:
        raise ValueError(
            f"two engines of the run are the server at {min(twice)}, which serves one version at a time; without an "
            "eval_engine the engines of training evaluate, too"
        )
    never = trainer.evaluate_at == "never" and not trainer.eval_every
    if never and data.eval_engines:
        raise ValueError(
            'eval_engine is never used with evaluate_at="never" and eval_every=0; change one of them, or leave it out'
        )
    if not never and data.eval_sampling.temperature == 0 and data.eval_samples > 1:
        raise ValueError(
            f"eval_samples={data.eval_samples} with eval_sampling's temperature=0 draws the same sample so often for "
            "each prompt; set eval_samples=1, or a temperature > 0"
        )
    if given_up := trainer.staleness.given_up(policy):
        log.warning("%s", given_up)


def check_record(
    trainer: AsyncRLTrainer, policy: PolicyModule, data: RolloutDataModule
) -> tuple[str, RecordedEvaluations]:
    """Before any engine starts: refuse to go on with a record that means something else, and note what it means.

    Returns:
        Why there is nothing left to train, for people, empty where there is; and which evaluations were finished.

    Raises:
        SettingError: what changed, and how to accept it.
    """
    ledger = Ledger(trainer.run_dir / DATABASE, BatchArchive(trainer.run_dir / BATCHES))
    try:
        meta = ledger.meta()
        now, before = fingerprint(policy, data, trainer.seed), meta.get("meaning")
        is_used = ledger.balance().admitted > 0
        if is_used and before and (why := refusal(trainer.run_dir, before, now, trainer.resume_allow)):
            raise SettingError(why)
        if trainer.resume or not is_used:
            ledger.set_meta({"meaning": now})
        evaluated = RecordedEvaluations.from_meta(meta if trainer.resume else {}, trainer.start_version)
        return _nothing_left(trainer, data, ledger), evaluated
    finally:
        ledger.close()


def _nothing_left(trainer: AsyncRLTrainer, data: RolloutDataModule, ledger: Ledger) -> str:
    version, prompts = trainer.start_version, data.prompt_stream(trainer.seed).total
    if version >= trainer.max_steps:
        return f"the run is at version {version} of max_steps={trainer.max_steps} already; raise max_steps to go on"
    if prompts is not None and ledger.balance().admitted >= prompts and not ledger.has_work(version):
        return f"the prompts are used up ({prompts} in rollout.epochs={data.epochs}); raise it to go on"
    return ""


def orchestrator_settings(
    trainer: AsyncRLTrainer, policy: PolicyModule, data: RolloutDataModule
) -> OrchestratorSettings:
    """The control plane's numbers, from those of trainer and datamodule.

    Raises:
        ValueError: a setting is impossible; the message names it.
    """
    staleness = trainer.staleness
    versions_alive = min(engine.versions_alive for engine in data.engines)
    admit_ahead, sampling_policy = staleness.resolve(versions_alive)
    return OrchestratorSettings(
        max_steps=trainer.max_steps,
        max_staleness=staleness.max_staleness,
        admit_ahead=admit_ahead,
        oversample_factor=staleness.oversample_factor,
        stale_policy=staleness.stale_policy,
        sampling_policy=sampling_policy,
        batch_size=data.batch_size,
        group_size=data.group_size,
        max_concurrent=data.max_concurrent or (admit_ahead + 1) * data.batch_size * data.group_size,
        seed=trainer.seed,
        group_completion=data.group_completion,
        min_group_size=data.min_group_size,
        straggler_timeout_s=data.straggler_timeout_s,
        max_retries=data.max_retries,
        max_failures=data.max_failures,
        rollout_timeout_s=data.rollout_timeout_s,
        rollout_threads=data.rollout_threads,
        last_batch=data.last_batch,
        filter_zero_variance=data.filter_zero_variance,
        load_timeout_s=data.load_timeout_s,
        max_engine_restarts=data.max_engine_restarts,
        stall_timeout_s=trainer.stall_timeout_s,
        forward_backward_batch=forward_backward_batch(data.forward_backward_batch, staleness, policy),
    )


def open_session(trainer: AsyncRLTrainer, policy: PolicyModule, data: RolloutDataModule) -> RolloutSession:
    """Build the session of one fit: control plane, rollout functions and publisher around engines that have started.

    Raises:
        ValueError: a setting is impossible; the message names it.
    """
    version = trainer.global_step

    def rollout_with(sampling: SamplingParams) -> RolloutFunction:
        return make_rollout(
            data.environments,
            policy.tokenizer,
            sampling,
            reward_timeout_s=data.reward_timeout_s,
            limits=data.limits,
            template_rewrite=data.template_rewrite,
        )

    archive = BatchArchive(trainer.run_dir / BATCHES)
    archive.remove_partial()
    ledger = Ledger(trainer.run_dir / DATABASE, archive)
    settings = orchestrator_settings(trainer, policy, data)
    recovered = None
    if trainer.resume or version:
        recovered = _recover(ledger, version, settings)
        log.info(
            "going on from version %d (%s): %s", version, trainer.ckpt_path or "no checkpoint", described(recovered)
        )
    bounds = RecordedBounds.from_meta(ledger.meta())
    bounds = bounds.changed(version, trainer.staleness.max_staleness, settings.stale_policy)
    ledger.set_meta(bounds.to_meta() | trainer.evaluated.to_meta())
    orchestrator = Orchestrator(
        settings,
        engines=data.engines,
        eval_engines=data.eval_engines,
        prompts=data.prompt_stream(trainer.seed),
        rollout=rollout_with(data.sampling),
        advantages=policy.advantage,
        ledger=ledger,
        start_version=version,
        recovered=recovered,
        on_stall=_end_stalled(trainer),
    )
    return RolloutSession(
        engines=data.engines,
        orchestrator=orchestrator,
        publisher=_publisher_for([*data.engines, *data.eval_engines], policy),
        ledger=ledger,
        version=version,
        eval_prompts=data.eval_prompts,
        eval_rollout=rollout_with(data.eval_sampling),
        eval_engines=data.eval_engines,
    )


def _recover(ledger: Ledger, version: int, settings: OrchestratorSettings) -> Recovery:
    """What the run left as of the checkpoint at ``version``, as far as this run's bound leaves time to train it."""
    recovered = within_bound(
        ledger.recover(version),
        batch_size=settings.batch_size,
        group_size=settings.group_size,
        max_staleness=None if settings.stale_policy == "allow" else settings.max_staleness,
        deadlines=settings.stale_policy == "wait",
    )
    if recovered.withdrawn is not None:
        ledger.withdraw(recovered.withdrawn)
        log.warning(
            "recorded batches from version %d on hold groups older than max_staleness=%s; they are planned anew",
            *(recovered.withdrawn, settings.max_staleness),
        )
    if recovered.reissued:
        ledger.forget(recovered.reissued)
        log.warning(
            "%d groups of the earlier process can't be trained within max_staleness=%s any more: sampled again",
            *(len(recovered.reissued), settings.max_staleness),
        )
    sizes = [n for n in map(len, recovered.recovery.batches) if n != settings.batch_size]
    if sizes:
        log.info(
            "%d recorded batches keep their batch_size of %s; batch_size=%d holds for the batches after them",
            *(len(sizes), " or ".join(map(str, sorted(set(sizes)))), settings.batch_size),
        )
    return recovered.recovery


def _end_stalled(trainer: AsyncRLTrainer) -> Callable[[str], None]:
    """What to do with the report of a stall: the thread that fits has to end the run in time, or the process ends."""
    owner = threading.current_thread()

    def end(report: str) -> None:
        trainer.shutdown.start(owner)
        (trainer.run_dir / "stall.txt").write_text(report)

    return end


def _publisher_for(engines: Sequence[Engine], policy: PolicyModule) -> WeightPublisher:
    """One publisher that every engine of the run can load from."""
    own = next(policy.parameters()).dtype
    kinds = {
        (getattr(e, "weight_backend", SHARED_MEMORY), own if e.dtype == "auto" else getattr(torch, e.dtype))
        for e in engines
    }
    if len(kinds) > 1:
        raise ValueError(
            f"engine: the engines of one run must load weights the same way, but {', '.join(e.name for e in engines)} "
            f"need {sorted(map(str, kinds))}; give them the same dtype and device"
        )
    backend, dtype = kinds.pop()
    directories = {directory for e in engines if (directory := getattr(e, "weights_dir", None)) is not None}
    if len(directories) > 1:
        raise ValueError(f"engine: the engines of one run must share one weights_dir, not {sorted(directories)}")
    return make_publisher(backend, dtype, policy.device, next(iter(directories), None))
