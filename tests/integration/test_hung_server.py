"""A server that hangs (it lives, and answers nothing) in a whole run: taken out, waited for, taken back."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fit_kit import Recorder, make_data, make_policy, make_trainer, outcomes

from async_rl.engines import vllm_server_core
from async_rl.engines.vllm_server import vllm_servers
from async_rl.orchestrator.restarts import EngineLostError

SCRIPT = Path(__file__).parent / "fake_server_process.py"
ANSWER_TIMEOUT_S = 2.0


@pytest.fixture
def start(monkeypatch):
    """Starts so many servers; returns their processes and addresses."""
    monkeypatch.setattr(vllm_server_core, "ANSWER_TIMEOUT_S", ANSWER_TIMEOUT_S)
    command, started = [sys.executable, str(SCRIPT)], []

    def start(count):
        for _ in range(count):
            started.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        return started, [process.stdout.readline().strip() for process in started]

    yield start
    for process in started:
        process.kill()
        process.communicate(timeout=10)


class StopsOne(Recorder):
    """Stops a server's process, lets it go on when it has been taken out, and ends the run once it is back."""

    def __init__(self, process, *, goes_on):
        super().__init__()
        self.process, self.goes_on = process, goes_on
        self.heads = {0: [], 1: []}
        self.stopped_at = self.stopped_s = self.out_at = self.out_s = None

    def on_batch_planned(self, trainer, policy, batch):
        super().on_batch_planned(trainer, policy, batch)
        for group in batch.groups:
            self.heads[group.engine].append(group.head)
        if self.stopped_at is None:
            if batch.version >= 2 and self.heads[0]:
                self.stopped_at, self.stopped_s = batch.version, time.monotonic()
                self.process.send_signal(signal.SIGSTOP)
        elif self.out_at is None:
            if trainer.orchestrator.snapshot()["engine_restarts"]:
                self.out_at, self.out_s = batch.version, time.monotonic()
        elif batch.version == self.out_at + 4 and self.goes_on:
            self.process.send_signal(signal.SIGCONT)
        trainer.should_stop = max(self.heads[0], default=0) > (self.out_at or 10**9)


def test_a_server_that_hangs_is_taken_out_and_the_run_goes_on_with_the_other(tiny_model_dir, tmp_path, start, caplog):
    processes, urls = start(2)
    engines = vllm_servers(urls, weights_dir=str(tmp_path / "weights"), dtype="float32", start_timeout_s=10.0)
    callback = StopsOne(processes[0], goes_on=True)
    trainer = make_trainer(tmp_path / "run", max_steps=2000, stall_timeout_s=30.0, callbacks=[callback])
    data = make_data(with_engine=engines, batch_size=4, max_engine_restarts=0, max_retries=0)
    trainer.fit(make_policy(tiny_model_dir), data)
    assert trainer.end.exit_code == 0
    assert callback.out_s - callback.stopped_s < ANSWER_TIMEOUT_S + 20
    assert f"engine server-0 died (engine server-0: the server at {urls[0]} does not answer" in caplog.text
    assert max(callback.heads[1]) > callback.out_at  # the other went on alone
    assert max(callback.heads[0]) > callback.out_at  # taken back, at the newest weights
    assert not [h for h in callback.heads[0] if callback.stopped_at + 1 < h < callback.out_at + 4]
    assert max(callback.ages) <= 2
    ended = outcomes(tmp_path / "run")
    assert set(ended) <= {"trained", "saved"}  # with max_retries=0: given to the other, not tried again
    assert ended["trained"] == 4 * trainer.global_step


def test_the_only_server_hanging_ends_the_run_with_that_error(tiny_model_dir, tmp_path, start):
    (process,), (url,) = start(1)
    engines = vllm_servers([url], weights_dir=str(tmp_path / "weights"), dtype="float32", start_timeout_s=1.0)
    callback = StopsOne(process, goes_on=False)
    trainer = make_trainer(tmp_path / "run", max_steps=2000, stall_timeout_s=30.0, callbacks=[callback])
    with pytest.raises(EngineLostError, match=rf"server-0 died .*The first death: .*{url} does not answer"):
        trainer.fit(make_policy(tiny_model_dir), make_data(with_engine=engines, batch_size=4))
    assert trainer.end.exit_code == 1
    assert "open" not in outcomes(tmp_path / "run")
    assert outcomes(tmp_path / "run")["trained"] == 4 * trainer.global_step
