"""AsyncRLTrainer: a Lightning Trainer fed by rollouts that run ahead by a bounded number of versions."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from typing_extensions import override

from async_rl.arguments import refuse_impossible
from async_rl.callbacks.base import RLCallback
from async_rl.callbacks.checkpoint import RunCheckpoint, latest_checkpoint, version_in
from async_rl.checkpoint_io import DurableCheckpointIO
from async_rl.datamodule import RolloutDataModule
from async_rl.evaluation import evaluate, evaluate_if_owed, only_evaluates
from async_rl.fit_record import recorded
from async_rl.lightning_arguments import lightning_arguments
from async_rl.orchestrator.garbage import rare_collections
from async_rl.policy import PolicyModule
from async_rl.record_evaluations import RecordedEvaluations
from async_rl.replay import ReplayDataModule, open_replay
from async_rl.resume_rules import check_arguments, check_directory
from async_rl.run_end import EXIT_ERROR, EXIT_FINISHED, EXIT_INTERRUPTED, RunEnd, RunInterrupted, announce
from async_rl.run_record import RunRecord
from async_rl.session import RolloutSession, close_engines, start_engines, wait_for
from async_rl.shutdown import ShutdownDeadline, leave_behind
from async_rl.signals import StopSignals
from async_rl.types import Batch, EvalBatch
from async_rl.wiring import StalenessSettings, check_record, check_settings, open_session

log = logging.getLogger(__name__)

_RUNNING = "running"


class StopRun(StopIteration):
    """Raised while waiting when the run was asked to stop; Lightning's loops end on it."""


class AsyncRLTrainer(pl.Trainer):
    """Trains a policy on rollouts that are at most ``max_staleness`` policy versions old.

    Generation keeps running in background threads while the optimizer steps; see :class:`RolloutDataModule` for the
    rollout side. All of Lightning's arguments, callbacks and loggers work.

    ``fit`` prints a line per step and a closing table (``RunProgress``, ``RunSummary``); ``enable_progress_bar=False``
    switches both off, and a progress bar of Lightning's in ``callbacks`` takes the place of the lines. ``run_dir`` gets
    ``run.json`` (what was run, how it ended, the closing figures), ``run.db``, ``batches/``, ``checkpoints/``, and from
    the default loggers ``metrics.jsonl`` and ``tensorboard/``; ``logger=False`` leaves these two out.

    Args:
        max_steps: Optimizer steps (= policy versions) to train, >= 1.
        max_staleness: S, oldest age in versions a trained token may have; 0 is the synchronous loop.
        admit_ahead: W, how many versions ahead to start rollouts; default ``min(S, 2)``.
        oversample_factor: Admit so many times more groups than needed, >= 1; more than 1 needs W < S.
        stale_policy: ``"wait"`` keeps the bound exactly; ``"mask"`` and ``"allow"`` give it up and need acknowledging.
        sampling_policy: ``"segment"`` swaps weights in flight, ``"trajectory"`` lets rollouts finish first, ``"auto"``.
        acknowledge_staleness: Confirms a setting that trains on stale data without protection.
        seed: Seed of sampling and prompt order.
        run_dir: Where ledger, checkpoints and logs go.
        resume: Continue from the newest complete checkpoint in ``run_dir``, or from version 0 where there is none yet.
        resume_allow: What may differ from what the run recorded, though it changes the meaning of its data:
            ``"environment"``, ``"model"``, ``"batch_size"``, ``"group_size"``, ``"seed"``, ``"rollout.epochs"``, ...
        replay: Directory of a run: train the batches it recorded, in order and at their versions, without an engine,
            until they are used up. ``fit`` then takes no datamodule, nothing is evaluated, and no record is kept.
        eval_every: Evaluate every so many steps; 0: only as ``evaluate_at`` says.
        evaluate_at: ``"ends"`` evaluates before the first and after the last step too, ``"never"`` does not.
        checkpoint_every: Save a checkpoint every so many steps; 0: not by steps.
        checkpoint_every_s: Save one so many seconds after the last; ``None``: not by time. See ``RunCheckpoint``.
        keep_last: Checkpoints kept.
        parity_check: Compare engine and trainer log-probabilities before the first rollout and after the first update.
        stall_timeout_s: Seconds without a trained batch, an ended rollout or a load of newer weights that end the run,
            with a report in ``stall.txt``; ``None``: never.
        shutdown_timeout_s: Most seconds the end of a run may take, the last evaluation and checkpoint not counted; then
            the process is ended with exit code 1 (see :class:`~async_rl.shutdown.ShutdownDeadline`).
        checkpoint_timeout_s: Most seconds that last checkpoint may take; then the process is ended too.
        callbacks: Lightning callbacks, RL hooks included.
        default_callbacks: Add those of ``RunProgress``, ``RunSummary``, ``DrainCallback``, ``EmptyBatchGuard`` and
            ``ResumeVersionRecovery`` that ``callbacks`` holds none of.
        logger: As Lightning's; default a ``TensorBoardLogger`` and a ``JsonlLogger`` in ``run_dir``.
        record: Keeps ``run.json``, already begun by who holds ``run_dir`` (``RunLock``); default: ``fit`` does both.
        precision: ``"bf16-mixed"``, ``"32-true"``, or ``"auto"``: the faster one, which is measured on a CPU.
        **lightning_kwargs: Anything else ``lightning.Trainer`` takes.

    Raises:
        ValueError: a value is impossible, or two contradict each other; names the argument and what is possible.

    Attributes:
        end: How the last ``fit`` ended: ``end.reason``, for people, and ``end.exit_code`` (0 finished, 3 stopped by a
            guard, 75 interrupted and to be resumed, 1 anything else).
        evaluations: The figures of each evaluation, oldest first.
        start_version: The version the last ``fit`` went on from; 0 without a checkpoint.
        nothing_to_train: Why it had nothing to train; empty where it had.
        evaluated: The evaluations the run has finished, those of earlier processes included.
        makes_up: Whether it had nothing to train but the last evaluation to make up for.

    Example:
        >>> trainer = AsyncRLTrainer(max_steps=200, max_staleness=4)
        >>> trainer.fit(policy, datamodule=RolloutDataModule(environment, engine))
        >>> sys.exit(trainer.end.exit_code)
    """

    def __init__(
        self,
        *,
        max_steps: int,
        max_staleness: int = 2,
        admit_ahead: int | None = None,
        oversample_factor: float = 1.0,
        stale_policy: Literal["wait", "mask", "allow"] = "wait",
        sampling_policy: Literal["auto", "segment", "trajectory"] = "auto",
        acknowledge_staleness: bool = False,
        seed: int = 0,
        run_dir: str | os.PathLike[str] = "runs/latest",
        resume: bool = False,
        resume_allow: Sequence[str] = (),
        replay: str | os.PathLike[str] | None = None,
        eval_every: int = 0,
        evaluate_at: Literal["ends", "never"] = "ends",
        checkpoint_every: int = 0,
        checkpoint_every_s: float | None = 1800.0,
        keep_last: int = 2,
        parity_check: bool = True,
        stall_timeout_s: float | None = 1800.0,
        shutdown_timeout_s: float = 30.0,
        checkpoint_timeout_s: float = 600.0,
        callbacks: Sequence[pl.Callback] | pl.Callback | None = None,
        default_callbacks: bool = True,
        logger: Any = None,
        record: RunRecord | None = None,
        **lightning_kwargs: Any,
    ) -> None:
        refuse_impossible("AsyncRLTrainer", locals())
        check_arguments(resume, resume_allow, replay)
        self.staleness = StalenessSettings(
            max_staleness=max_staleness,
            admit_ahead=admit_ahead,
            oversample_factor=oversample_factor,
            stale_policy=stale_policy,
            sampling_policy=sampling_policy,
            acknowledged=acknowledge_staleness,
        )
        self.staleness.check()
        self.record = record
        self.seed = seed
        self.run_dir = Path(run_dir)
        self.resume = resume
        self.resume_allow = tuple(resume_allow)
        self.replay = None if replay is None else Path(replay)
        if self.replay is not None:
            evaluate_at, eval_every = "never", 0  # nothing samples
        self.evaluate_at = evaluate_at
        self.eval_every = eval_every
        self.parity_check = parity_check
        self.stall_timeout_s = stall_timeout_s
        self.shutdown = ShutdownDeadline(shutdown_timeout_s)
        self.end = RunEnd("not run", EXIT_ERROR)
        self.evaluations: list[dict[str, float]] = []
        self._sessions: list[RolloutSession] = []
        self.start_version = 0
        self.nothing_to_train = ""
        self.evaluated = RecordedEvaluations()
        self.makes_up = False
        self._max_steps = max_steps
        self._engine_start: Future[None] = Future()
        self._signals = StopSignals(
            lambda name: self.stop(f"received {name}", EXIT_INTERRUPTED), self.shutdown.before_exit
        )

        super().__init__(
            **lightning_arguments(
                lightning_kwargs,
                max_steps=max_steps,
                eval_every=eval_every,
                evaluates=evaluate_at != "never" or eval_every > 0,
                run_dir=self.run_dir,
                callbacks=callbacks,
                default_callbacks=default_callbacks,
                logger=logger,
                make_checkpoint=lambda: RunCheckpoint(
                    self.run_dir / "checkpoints", checkpoint_every, keep_last, checkpoint_every_s, checkpoint_timeout_s
                ),
            )
        )
        if type(self.strategy.checkpoint_io) is TorchCheckpointIO:
            self.strategy.checkpoint_io = DurableCheckpointIO()
        if self.world_size > 1:
            raise ValueError(f"AsyncRLTrainer: devices={self.world_size} is not supported yet; use devices=1")

    # the run

    @override
    def fit(  # type: ignore[override]
        self,
        model: PolicyModule,
        datamodule: RolloutDataModule | None = None,
        ckpt_path: str | os.PathLike[str] | None = None,
    ) -> None:
        """Train; returns when ``max_steps`` is reached, the data ends, or a callback or guard stops the run.

        :attr:`end` says why (``end.reason``), and with which code a script should end (``end.exit_code``).

        Args:
            model: The policy.
            datamodule: Environments and engines; none with ``replay``.
            ckpt_path: Checkpoint to start from; default: the newest in ``run_dir`` if ``resume``.

        Raises:
            RunInterrupted: SIGINT or SIGTERM ended it, and everything is saved: as with Lightning, the script ends.
            SettingError: ``run_dir`` is in use, holds a record not to be resumed, or would mean something else.
            Exception: The first failure of any thread, engine, environment, callback or of training itself.
        """
        if (datamodule is None) is (self.replay is None):
            raise ValueError("AsyncRLTrainer: fit needs datamodule=RolloutDataModule(...), with replay it takes none")
        data: Any = datamodule if self.replay is None else ReplayDataModule(self.replay, model)
        if self.replay is None:
            check_settings(self, model, data)
        check_directory(self.run_dir, self.resume, ckpt_path)
        with recorded(self, model, data):
            if ckpt_path is None and self.resume:
                ckpt_path = latest_checkpoint(self.run_dir / "checkpoints")
            self.start_version, self.nothing_to_train = version_in(ckpt_path), ""
            self._fit(model, data, ckpt_path)
        if self._signals.received and self.end.exit_code != EXIT_FINISHED:
            raise RunInterrupted(self.end.exit_code)

    def _fit(self, model: PolicyModule, data: Any, ckpt_path: str | os.PathLike[str] | None) -> None:
        """What is left of :meth:`fit` when nothing is refused; says how it went in :attr:`end`."""
        self.end = RunEnd(_RUNNING, EXIT_ERROR)
        threads_before = set(threading.enumerate())
        with self._signals, rare_collections():
            try:
                super().fit(model, datamodule=data, ckpt_path=ckpt_path, weights_only=True)
            except StopRun:  # asked to stop before the first batch: nothing to save, nothing went wrong
                pass
            except BaseException as error:
                self.end = RunEnd(f"{type(error).__name__}: {error}", EXIT_ERROR)
                raise
            finally:
                self._close(data, threads_before)
        if self.end.reason == _RUNNING:
            self.end = RunEnd(self.ending, EXIT_FINISHED)
        if self.end.exit_code == EXIT_INTERRUPTED and self.replay is not None:
            self.end = RunEnd(f"{self.end.reason}; a replay begins anew, in another run_dir", EXIT_ERROR)
        announce(self.end, self.run_dir)

    def stop(self, reason: str, exit_code: int = EXIT_FINISHED) -> None:
        """Ask the run to end at the next step boundary; only sets flags.

        The first reason given is kept, but an interruption takes the place of a good end: it cuts short what is left.
        """
        if self.end.reason == _RUNNING or (self.ends_well and exit_code == EXIT_INTERRUPTED):
            self.end = RunEnd(reason, exit_code)
        self.should_stop = True

    @property
    def ends_well(self) -> bool:
        """Whether nothing so far but a good end, such as that the prompts are used up, ends the run."""
        return self.end.reason == _RUNNING or self.end.exit_code == EXIT_FINISHED

    @property
    def ending(self) -> str:
        """Why the run is ending, for people; before it ends, what it is on its way to."""
        if self.end.reason != _RUNNING:
            return self.end.reason
        if self.nothing_to_train:
            return f"nothing to train: {self.nothing_to_train}"
        return "a callback set trainer.should_stop" if self.should_stop else f"max_steps={self.max_steps} reached"

    @property
    def session(self) -> RolloutSession:
        """The live session.

        Raises:
            RuntimeError: outside ``fit``, or before training started.
        """
        if not self._sessions:
            raise RuntimeError("AsyncRLTrainer: rollouts are not running; this is available from on_train_start on")
        return self._sessions[-1]

    @property
    def orchestrator(self) -> Any:
        """The control plane of the live session."""
        return self.session.orchestrator

    def call_rl_hook(self, name: str, *args: Any) -> None:
        """Call an RL hook on every callback that defines it, in order."""
        for callback in self.callbacks:  # type: ignore[attr-defined]
            if (hook := getattr(callback, name, None)) is not None:
                hook(self, self.lightning_module, *args)

    def poll(self) -> None:
        """What the main thread does while it waits: raise the first failure, run the hooks that are due."""
        if self._sessions:
            self.orchestrator.check()
            for event in self.orchestrator.events():
                self.call_rl_hook(f"on_{event.name}", event.value)

    # called by the run loop and the loaders

    def start_engines(self) -> None:
        """Begin to start the engines in the background, while Lightning sets up the rest; none if nothing is to do.

        Raises:
            SettingError: the run's record means something else with what changed since.
        """
        data = self.datamodule  # type: ignore[attr-defined]
        if self.replay is None:
            self.nothing_to_train, self.evaluated = check_record(self, self.lightning_module, data)
        self.makes_up = only_evaluates(self)
        if self.makes_up or not self.nothing_to_train:
            self._engine_start = start_engines([*data.engines, *data.eval_engines])

    def open_session(self) -> None:
        """Start the control plane at the current version: weights pushed and checked, then admission opened."""
        self._signals.install()
        self.fit_loop.epoch_loop.max_steps = self._max_steps  # which only_evaluates may have changed
        if self.nothing_to_train and not self.makes_up:
            raise StopRun  # with the weights of the checkpoint, which are loaded by now
        wait_for(self._engine_start, self._poll_or_stop)
        policy, version = self.lightning_module, self.global_step
        open_it = open_session if self.replay is None else open_replay
        session = open_it(self, policy, self.datamodule)  # type: ignore[attr-defined]
        self._sessions.append(session)
        session.orchestrator.start()
        self.publish()
        self._confirm_weights(version)

    def publish(self) -> None:
        """Hand the current weights to the engines, unless they have them already."""
        version = self.global_step
        if self.session.published_version >= version or not self.session.engines:
            return
        self.session.publish(self.lightning_module.named_weights(), version)
        self.call_rl_hook("on_policy_published", version)
        if version == self.session.first_version + 1:
            self._confirm_weights(version)

    def next_batch(self) -> Batch:
        """Publish what the last step made, then wait for the next batch. Raises StopIteration at the end."""
        self.publish()
        if not self.session.admitting:
            if self.session.eval_engines:
                self.session.admit()
            evaluate_if_owed(self)  # alone on a shared engine: side by side, both would only take longer
            self.session.admit()
        self._poll_or_stop()
        batch = self.session.next_batch(self.lightning_module, self._poll_or_stop)
        if batch is None:
            self.stop("the prompts are used up" if self.replay is None else "all recorded batches are trained")
            raise StopRun
        self.call_rl_hook("on_batch_planned", batch)
        return batch

    def run_evaluation(self) -> EvalBatch:
        """Evaluate the newest weights (see :func:`async_rl.evaluation.evaluate`)."""
        self.publish()
        return evaluate(self, self._poll_or_stop)

    def _poll_or_stop(self) -> None:
        self.poll()
        if self.should_stop:
            raise StopRun

    def _confirm_weights(self, version: int) -> None:
        """Wait until the engines serve ``version``, then compare their log-probabilities with the policy's.

        Once before the first rollout and once after the first update: a reload can leave a layer behind silently.
        """
        if not self.session.engines:
            return
        self.orchestrator.fleet.wait_served(version, self._poll_or_stop)
        if self.parity_check:
            policy, poll = self.lightning_module, self._poll_or_stop
            self.session.check_parity(self.session.engines, policy, str(self.precision), version, poll)

    def _close(self, datamodule: RolloutDataModule, threads_before: set[threading.Thread]) -> None:
        """Stop what runs for this fit, within what is left of the time for its end."""
        self.shutdown.start()
        timeout_s = 0.8 * self.shutdown.remaining_s  # before the deadline, which ends the process
        session = self._sessions.pop() if self._sessions else None
        engines = [*datamodule.engines, *datamodule.eval_engines]
        left = session.close(timeout_s) if session else close_engines(engines, timeout_s)
        if left:
            log.error("did not stop within %.3g s: %s", timeout_s, ", ".join(left))
            self.end = RunEnd(f"{self.end.reason}; forced shutdown of {', '.join(left)}", EXIT_ERROR)
        leave_behind(threads_before, self.end.exit_code or EXIT_ERROR, max(self.shutdown.remaining_s, 2.0))
        self.shutdown.end()


__all__ = ["AsyncRLTrainer", "RLCallback", "RunEnd"]
