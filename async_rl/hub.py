"""Finds out in two seconds at most whether the Hugging Face Hub can be reached, and says what to do when it can't."""

from __future__ import annotations

import contextlib
import functools
import threading
import urllib.error
import urllib.request
from concurrent.futures import Future, InvalidStateError


class SourceNotFoundError(RuntimeError):
    """A model or data set was found in none of the places looked at; the message lists them and the fix."""


def reachable(timeout_s: float = 2.0) -> bool:
    """Whether the Hub answers. Asked once per process; ``HF_HUB_OFFLINE=1`` means no without asking.

    Args:
        timeout_s: Most seconds to wait for the answer, > 0; no answer means no, for the rest of the process.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    answer = _ask(constants.ENDPOINT)
    with contextlib.suppress(TimeoutError):
        answer.result(timeout=timeout_s)
    with contextlib.suppress(InvalidStateError):
        answer.set_result(False)
    return answer.result()


def offline_reason() -> str:
    """Why nothing was asked of the Hub, for messages: switched off, or no answer."""
    from huggingface_hub import constants

    return "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else f"{constants.ENDPOINT} does not answer"


@functools.cache
def _ask(endpoint: str) -> Future[bool]:
    # In a thread, because name resolution has no timeout of its own; it is left behind when it takes too long.
    answer: Future[bool] = Future()

    def ask() -> None:
        answered = _answers(endpoint)
        with contextlib.suppress(InvalidStateError):
            answer.set_result(answered)

    threading.Thread(target=ask, name="hub-probe", daemon=True).start()
    return answer


def _answers(endpoint: str) -> bool:
    request = urllib.request.Request(endpoint, method="HEAD")
    try:
        with urllib.request.urlopen(request, timeout=5.0):
            return True
    except urllib.error.HTTPError as error:
        return error.code < 500  # it answered, even if it wants a login
    except (OSError, ValueError):
        return False
