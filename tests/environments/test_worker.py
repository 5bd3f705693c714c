"""WorkerProcess: deadlines that hold, crashes that are told, and no process left behind."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from async_rl.environments.base import RewardError, RewardTimeoutError
from async_rl.environments.worker import WorkerProcess

HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{HERE}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")


# what the child runs


def echo(value: Any) -> Any:
    print("not a reply")
    return value


def pid() -> int:
    return os.getpid()


def fail(value: Any) -> None:
    raise KeyError(value)


def leave() -> None:
    os._exit(7)


def hang() -> None:
    while True:
        pass


def power() -> int:
    return 9**9**9  # holds the interpreter: no other thread of the process gets to run


def memory() -> int:
    return len(bytearray(16 << 30))


MODULE = Path(__file__).stem


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def gone(pid: int, seconds: float) -> bool:
    deadline_s = time.monotonic() + seconds
    while alive(pid) and time.monotonic() < deadline_s:
        time.sleep(0.02)
    return not alive(pid)


def test_calls_errors_deadlines_and_crashes() -> None:
    worker = WorkerProcess(MODULE, timeout_s=0.5)
    assert worker.call("echo", {"a": [1, "ü\n"]}) == {"a": [1, "ü\n"]}
    first = worker.call("pid")
    assert first != os.getpid()
    with pytest.raises(RewardError, match=r"fail raised KeyError: 'x' for \('x',\)"):
        worker.call("fail", "x")
    with pytest.raises(RewardError, match="raised MemoryError"):
        worker.call("memory")
    assert worker.call("pid") == first  # an exception costs no process
    with pytest.raises(RewardError, match="died \\(exit code 7\\)"):
        worker.call("leave")
    assert worker.call("echo", 2) == 2
    with pytest.raises(RewardError, match="no attribute 'nonsense'"):
        worker.call("nonsense")
    for kind in ("hang", "power"):
        child = worker.call("pid")
        began_s = time.monotonic()
        with pytest.raises(RewardTimeoutError, match=r"took more than 0\.5 s"):
            worker.call(kind)
        assert time.monotonic() - began_s < 30
        assert not alive(child)
    last = worker.call("pid")
    del worker
    gc.collect()
    assert not alive(last)


def test_processes_work_side_by_side_for_many_threads() -> None:
    worker = WorkerProcess(MODULE, processes=2)
    results: list[int] = []
    threads = [threading.Thread(target=lambda n=n: results.append(worker.call("echo", n))) for n in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == list(range(20))
    worker.close()


def test_what_cannot_start_says_why() -> None:
    with pytest.raises(RewardError, match="cannot start: ModuleNotFoundError"):
        WorkerProcess("no_such_module").call("f")
    for bad in ({"timeout_s": 0}, {"processes": 0}):
        with pytest.raises(ValueError, match="must be"):
            WorkerProcess(MODULE, **bad)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["idle", "power"])
def test_no_process_is_left_when_the_run_is_killed(kind: str, tmp_path: Path) -> None:
    program = (
        "import threading, time\n"
        "from async_rl.environments.worker import WorkerProcess\n"
        f"worker = WorkerProcess({MODULE!r}, timeout_s=1.0)\n"
        "print(worker.call('pid'), flush=True)\n"
        f"if {kind!r} == 'power': threading.Thread(target=worker.call, args=('power',)).start()\n"
        "time.sleep(60)\n"
    )
    run = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    child = int(run.stdout.readline())
    assert alive(child)
    time.sleep(0.2)
    run.send_signal(signal.SIGKILL)
    run.wait()
    assert gone(child, 4.0)
