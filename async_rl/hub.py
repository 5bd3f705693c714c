"""Finds out in two seconds at most whether the Hugging Face Hub can be reached, and says what to do when it can't."""

from __future__ import annotations

import functools
import queue
import threading
import urllib.error
import urllib.request


class SourceNotFoundError(RuntimeError):
    """A model or data set was found in none of the places looked at; the message lists them and the fix."""


@functools.cache
def reachable(timeout_s: float = 2.0) -> bool:
    """Whether the Hub answers. Asked once per process; ``HF_HUB_OFFLINE=1`` means no without asking.

    Name resolution has no timeout of its own, so the question is asked in a thread that is left behind when it
    doesn't come back in time.

    Args:
        timeout_s: Most seconds to wait, > 0.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    answers: queue.Queue[bool] = queue.Queue()
    threading.Thread(
        target=lambda: answers.put(_answers(constants.ENDPOINT, timeout_s)), name="hub-probe", daemon=True
    ).start()
    try:
        return answers.get(timeout=timeout_s)
    except queue.Empty:
        return False


def offline_reason() -> str:
    """Why nothing was asked of the Hub, for messages: switched off, or no answer."""
    from huggingface_hub import constants

    return "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else f"{constants.ENDPOINT} does not answer"


def _answers(endpoint: str, timeout_s: float) -> bool:
    request = urllib.request.Request(endpoint, method="HEAD")
    try:
        with urllib.request.urlopen(request, timeout=timeout_s):
            return True
    except urllib.error.HTTPError as error:
        return error.code < 500  # it answered, even if it wants a login
    except (OSError, ValueError):
        return False
