"""DrainCallback: admission stops, hooks around the wait, never more than half of the time for the end."""

from types import SimpleNamespace

import pytest

from async_rl.callbacks import DrainCallback


@pytest.mark.parametrize(("remaining_s", "waits_s"), [(100.0, 10.0), (8.0, 4.0)])
def test_admission_has_stopped_when_on_drain_start_is_called(remaining_s, waits_s):
    calls = []

    def drain(timeout_s, poll):
        calls.append(("drain", timeout_s))
        return 3

    orchestrator = SimpleNamespace(stop_admission=lambda: calls.append("stop"), drain=drain)
    trainer = SimpleNamespace(
        orchestrator=orchestrator,
        shutdown=SimpleNamespace(remaining_s=remaining_s),
        call_rl_hook=lambda *hook: calls.append(hook),
        poll=lambda: None,
    )
    DrainCallback(timeout_s=10.0).on_train_end(trainer, None)
    assert calls == ["stop", ("on_drain_start",), ("drain", waits_s), ("on_drain_end", 3)]
