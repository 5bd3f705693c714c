"""WatchedGroup: whatever the communicator waits for, a transfer ends, and one that did not arrive whole is an error."""

import threading
import time

import pytest

from async_rl.weights import watched_group
from async_rl.weights.watched_group import TransferError, WatchedGroup

LONG_S = 30.0


class Group:
    """A communicator whose calls wait for ``peer``, or until they are aborted; silently, as NCCL's do."""

    def __init__(self, disabled=False):
        self.disabled = disabled
        self.sent, self.destroyed = [], 0
        self.peer = threading.Event()
        self.peer.set()

    def broadcast(self, tensor, src, stream=None):
        self.sent.append((tensor, src, stream))
        assert self.peer.wait(LONG_S)

    def destroy(self):
        self.destroyed += 1
        self.peer.set()


class Clock:
    """Time that passes when told to; knows when another thread looks at it."""

    def __init__(self):
        self.now_s = 0.0
        self._looked = threading.Semaphore(0)
        self._owner = threading.current_thread()

    def monotonic(self):
        if threading.current_thread() is not self._owner:
            self._looked.release()
        return self.now_s

    def wait_for_a_look(self):
        for _ in range(3):  # the last one may have begun before
            assert self._looked.acquire(timeout=LONG_S)


def test_a_transfer_that_goes_on_is_left_alone(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(watched_group, "time", clock)
    group = Group()
    watched = WatchedGroup(group, patience_s=0.1)
    with watched.transfer():
        for number in range(4):  # longer than the patience, but never without progress for so long
            clock.now_s += 0.09
            clock.wait_for_a_look()
            watched.broadcast(number, 0)
    clock.now_s += 9  # between two transfers nothing is watched
    with watched.transfer():
        watched.broadcast(9, 0, "stream")
    assert group.sent == [(0, 0, None), (1, 0, None), (2, 0, None), (3, 0, None), (9, 0, "stream")]
    assert not group.destroyed


def test_a_peer_that_is_gone_is_given_up(monkeypatch):
    monkeypatch.setattr(watched_group, "CALL_TIMEOUT_S", 0.05)
    group = Group()
    group.peer.clear()
    watched = WatchedGroup(group, patience_s=0.1)
    with pytest.raises(TransferError, match=r"nothing arrived for 0\.1 s"), watched.transfer():
        watched.broadcast(0, 0)  # ends without an error once it is aborted
    assert group.destroyed == 1
    with pytest.raises(TransferError, match="nothing arrived"), watched.transfer():
        watched.broadcast(1, 0)
    assert len(group.sent) == 1  # an aborted communicator is not called again


def test_close_ends_a_transfer_from_another_thread(monkeypatch):
    monkeypatch.setattr(watched_group, "CALL_TIMEOUT_S", 0.05)
    group = Group()
    group.peer.clear()
    watched = WatchedGroup(group, patience_s=LONG_S)
    threading.Timer(0.05, watched.close).start()
    began_s = time.monotonic()
    with pytest.raises(TransferError, match="closed"), watched.transfer():
        watched.broadcast(0, 0)
    assert time.monotonic() - began_s < LONG_S / 3
    watched.close()
    assert group.destroyed == 1


def test_the_error_of_an_aborted_communicator_is_not_the_cause():
    watched = WatchedGroup(Group(), patience_s=LONG_S)

    def fail():
        watched.close()
        raise OSError("NCCL error: invalid usage")

    with pytest.raises(TransferError, match="closed"), watched.transfer():
        fail()
    with pytest.raises(OSError, match="its own"), WatchedGroup(Group(), LONG_S).transfer():
        raise OSError("its own")


def test_a_communicator_that_does_nothing_is_refused():
    with pytest.raises(TransferError, match="VLLM_DISABLE_PYNCCL"):
        WatchedGroup(Group(disabled=True), LONG_S)
