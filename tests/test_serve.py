"""`python -m async_rl.serve`: what its command line refuses before anything starts."""

import pytest

from async_rl import serve
from async_rl.engines.vllm_server_address import KEY_VARIABLE


@pytest.fixture(autouse=True)
def no_key(monkeypatch):
    monkeypatch.delenv(KEY_VARIABLE, raising=False)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.7", "node1", ""])
@pytest.mark.parametrize("key", [None, ""])
def test_an_address_that_others_reach_is_refused_without_a_key(monkeypatch, capsys, host, key):
    if key is not None:
        monkeypatch.setenv(KEY_VARIABLE, key)
    with pytest.raises(SystemExit) as exit:
        serve.main(["tiny", "--host", host])
    assert exit.value.code == 2
    printed = capsys.readouterr().err
    assert f"--host {host} can be reached from other machines, so a key is needed" in printed
    assert KEY_VARIABLE in printed


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.0.0.9"])
def test_this_machine_alone_needs_none(host):
    assert serve.parse(["tiny", "--host", host]).host == host


def test_with_a_key_any_address_will_do_and_the_key_is_in_no_argument(monkeypatch):
    monkeypatch.setenv(KEY_VARIABLE, "hunter2-hunter2")
    parsed = serve.parse(["tiny", "--host", "0.0.0.0"])
    assert parsed.host == "0.0.0.0"
    assert "hunter2" not in repr(parsed)


def test_engine_arguments_must_be_an_object(capsys):
    with pytest.raises(SystemExit):
        serve.parse(["tiny", "--engine-kwargs", "[1]"])
    assert "must be a JSON object" in capsys.readouterr().err
