"""StopSignals in this process: what the first signal says and does, and what the second may not wait for."""

import os
import signal
import threading
import time

import pytest

from async_rl.signals import StopSignals


class Exited(BaseException):
    pass


@pytest.fixture
def exits(monkeypatch):
    """Exit codes given to os._exit, which raises here."""
    codes = []

    def leave(code):
        codes.append(code)
        raise Exited

    monkeypatch.setattr(os, "_exit", leave)
    return codes


def signals(first, second, before_exit):
    with StopSignals(lambda name: None, [before_exit]):
        os.kill(os.getpid(), first)
        with pytest.raises(Exited):
            os.kill(os.getpid(), second)


def test_the_first_signal_says_at_once_what_happens_and_asks_to_stop(capfd):
    asked = []
    with StopSignals(asked.append, ()):
        os.kill(os.getpid(), signal.SIGTERM)
    assert asked == ["SIGTERM"]
    assert capfd.readouterr().err == "SIGTERM: finishing and saving; again = stop at once (nothing more is saved)\n"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_second_leaves_its_reason_and_exits(exits, capfd):
    left = []
    signals(signal.SIGTERM, signal.SIGINT, before_exit=lambda *reason: left.append(reason))
    assert (exits, left) == ([130], [("stopped at once by a second SIGINT", 130)])
    assert capfd.readouterr().err.endswith("SIGINT again: stopped at once\n")


def test_a_reason_that_can_not_be_left_holds_up_nothing(exits):
    stuck = threading.Event()
    began_s = time.monotonic()
    signals(signal.SIGINT, signal.SIGINT, before_exit=lambda *_: stuck.wait(600))
    assert exits == [130]
    assert time.monotonic() - began_s < 60
    stuck.set()


def test_an_error_stream_that_is_closed_does_not_keep_it_from_stopping(monkeypatch):
    def closed(*_):
        raise OSError("closed")

    asked = []
    monkeypatch.setattr(os, "write", closed)
    with StopSignals(asked.append, ()):
        os.kill(os.getpid(), signal.SIGINT)
    assert asked == ["SIGINT"]
