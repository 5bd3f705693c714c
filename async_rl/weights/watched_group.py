"""WatchedGroup: a communicator whose transfers end, where NCCL would wait for ever for a peer that is gone."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any, Protocol

CALL_TIMEOUT_S = 1.0
"""How long giving up waits for a call that is just being enqueued; one that takes longer waits for its peer itself."""


class TransferError(RuntimeError):
    """A transfer was given up: what arrived of it is not whole."""


class Communicator(Protocol):
    """The part of vLLM's ``PyNcclCommunicator`` that a broadcast needs."""

    disabled: bool
    """Its calls do nothing (there is no NCCL, or it was switched off)."""

    def broadcast(self, tensor: Any, src: int, stream: Any = None) -> None:
        """Enqueue the broadcast of ``tensor`` from rank ``src``."""
        ...

    def destroy(self) -> None:
        """Abort what is enqueued, whatever the peers do, and free everything. Idempotent."""
        ...


class WatchedGroup:
    """A communicator that is destroyed when a transfer makes no progress, or from another thread.

    Args:
        group: A communicator whose ranks have all joined; owned by this object from now on.
        patience_s: Longest time without progress before a transfer is given up, seconds. A broadcast is progress once
            the next one is enqueued, which the packed transfers of vLLM do when the one before has arrived.

    Raises:
        TransferError: the communicator does nothing.
    """

    def __init__(self, group: Communicator, patience_s: float) -> None:
        if group.disabled:
            raise TransferError("NCCL is switched off in this process: unset VLLM_DISABLE_PYNCCL")
        self._group = group
        self._patience_s = patience_s
        self._calls = threading.Lock()
        self._ending = threading.Lock()
        self._moved_s = time.monotonic()
        self._ended = ""  # why it can't be used any more

    def broadcast(self, tensor: Any, src: int, stream: Any = None) -> None:
        """Enqueue a broadcast. Raises :class:`TransferError` after the group has ended."""
        with self._calls:
            if self._ended:
                raise TransferError(self._ended)
            self._moved_s = time.monotonic()
            self._group.broadcast(tensor, src, stream)

    @contextlib.contextmanager
    def transfer(self) -> Iterator[None]:
        """Watch the broadcasts that are made inside; whoever leaves it without an error has them all.

        Raises:
            TransferError: they were given up.
        """
        self._moved_s = time.monotonic()
        over = threading.Event()
        threading.Thread(target=self._watch, args=(over,), name="weight-transfer-watch", daemon=True).start()
        try:
            yield
        except Exception as error:
            if self._ended:  # a communicator that is aborted fails in words that do not tell why
                raise TransferError(self._ended) from error
            raise
        finally:
            over.set()
        if self._ended:
            raise TransferError(self._ended)

    def close(self, reason: str = "the group was closed") -> None:
        """Abort and free the communicator, from any thread; blocks for seconds where a peer is gone. Idempotent."""
        with self._ending:
            if self._ended:
                return
            self._ended = reason
        free = self._calls.acquire(timeout=CALL_TIMEOUT_S)
        try:
            self._group.destroy()
        finally:
            if free:
                self._calls.release()

    def _watch(self, over: threading.Event) -> None:
        while not over.wait(max(0.01, self._moved_s + self._patience_s - time.monotonic())):
            if time.monotonic() - self._moved_s >= self._patience_s:
                self.close(f"nothing arrived for {self._patience_s:g} s")
                return
