"""The vLLM plug-in, run in every vLLM process: registers our weight back ends, ties an engine's life to its trainer."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import threading

CHILD_VARIABLE = "ASYNC_RL_ENGINE_CHILD"
"""Set to "1" in the processes that a VLLMEngine or a server starts."""
LOG_VARIABLE = "ASYNC_RL_ENGINE_LOG"
"""File that takes the output of those processes; empty: they keep the trainer's."""
CORES_VARIABLE = "ASYNC_RL_ENGINE_CORES"
"""Cores that the trainer may use, by which the engine's spare-time work may be done too: "0,1"."""

_PR_SET_PDEATHSIG = 1


def register() -> None:
    """Entry point of the group ``vllm.general_plugins``. Called once or more in every process of a vLLM engine."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    from async_rl.weights import file, nccl, shared_memory

    for backend, module, name in (
        (shared_memory.BACKEND, "async_rl.weights.vllm_backend", "SharedMemoryWeightTransferEngine"),
        (file.BACKEND, "async_rl.weights.file_backend", "FileWeightTransferEngine"),
        (nccl.BACKEND, "async_rl.weights.nccl_backend", "NcclWeightTransferEngine"),
    ):
        if backend not in WeightTransferEngineFactory._registry:
            WeightTransferEngineFactory.register_engine(backend, module, name)
    parent = multiprocessing.parent_process()
    if os.environ.get(CHILD_VARIABLE) == "1" and parent is not None:
        _redirect_output(os.environ.get(LOG_VARIABLE, ""))
        _leave_signals_to_parent()
        if sys.platform == "linux" and parent.pid is not None:
            _die_with_parent(parent.pid)


def _die_with_parent(parent_pid: int) -> None:
    """Ask the kernel for SIGKILL when the parent ends, however it ends (vLLM's engine core would live on)."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed: the engine could outlive the trainer")
    if os.getppid() != parent_pid:  # it ended before the call
        os._exit(1)


def _leave_signals_to_parent() -> None:
    """Live on when Ctrl-C or a batch system signals the whole process group: the trainer decides when to end."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _redirect_output(log_file: str) -> None:
    if log_file:
        sys.stdout.flush()
        sys.stderr.flush()
        descriptor = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.close(descriptor)
