"""The child of a WorkerProcess: reads calls as JSON lines, answers them, and ends with the process that started it."""

from __future__ import annotations

import importlib
import json
import os
import resource
import signal
import sys
import threading
import time

_MOST_MEMORY = 4 << 30  # bytes of address space; an answer that needs more fails instead of filling the machine
_GRACE_S = 1.0


def main() -> None:
    """``python -m async_rl.environments.worker_child package.module parent_pid``."""
    name, parent_pid = sys.argv[1], int(sys.argv[2])
    threading.Thread(target=_end_with, args=(parent_pid,), daemon=True).start()
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the functions print must not get between the replies
    signal.signal(signal.SIGALRM, signal.SIG_DFL)

    def reply(**content: object) -> None:
        replies.write(json.dumps(content) + "\n")
        replies.flush()

    try:
        module = importlib.import_module(name)
    except Exception as error:
        reply(error=f"{type(error).__name__}: {error}")
        return
    resource.setrlimit(resource.RLIMIT_AS, (_MOST_MEMORY, _MOST_MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    reply(ready=True)
    for line in sys.stdin:
        request = json.loads(line)
        # The kernel ends this process soon after the deadline even when its parent is gone and no thread gets to run.
        signal.setitimer(signal.ITIMER_REAL, request["timeout_s"] + _GRACE_S)
        try:
            value = json.dumps(getattr(module, request["function"])(*request["arguments"]))
        except Exception as error:
            reply(error=f"{type(error).__name__}: {error}")
        else:
            replies.write(f'{{"value": {value}}}\n')
            replies.flush()
        signal.setitimer(signal.ITIMER_REAL, 0)


def _end_with(parent_pid: int) -> None:
    """End this process when its parent has; a death signal of the kernel's would be for the parent's thread alone."""
    while os.getppid() == parent_pid:
        time.sleep(0.25)
    os._exit(1)


if __name__ == "__main__":
    main()
