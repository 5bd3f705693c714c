"""`python -m async_rl.serve`: what its command line refuses before anything starts."""

import socket

import pydantic
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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dtype", "float99"], "invalid choice: 'float99' (choose from"),
        (["--port", "0"], "argument --port: '0' is not possible; give a whole number >= 1 and <= 65535"),
        (["--port", "70000"], "give a whole number >= 1 and <= 65535"),
        (["--port", "http"], "argument --port: 'http' is not possible"),
        (["--max-model-len", "0"], "argument --max-model-len: '0' is not possible; give a whole number >= 1"),
        (["--max-num-seqs", "1.5"], "argument --max-num-seqs: '1.5' is not possible"),
        (["--kv-cache-gib", "nan"], "argument --kv-cache-gib: 'nan' is not possible; give a number > 0"),
        (["--gpu-memory-utilization", "90"], "give a number > 0 and <= 1"),
        (["--engine-kwargs", "[1]"], "argument --engine-kwargs: '[1]' must be a JSON object, for example"),
        (["--engine-kwargs", "{a: 1}"], "argument --engine-kwargs: '{a: 1}' is no JSON (Expecting property name"),
        (["--log-file", "no/such/directory/log"], "--log-file no/such/directory/log: there is no directory"),
        (["--host", "192.0.2.1"], "--host 192.0.2.1 is no address of this machine"),
        (["--host", "no-such-host.invalid"], "--host no-such-host.invalid is no address of this machine"),
    ],
)
def test_what_can_not_be_is_refused_with_what_can(monkeypatch, capsys, arguments, message):
    monkeypatch.setenv(KEY_VARIABLE, "key")
    with pytest.raises(SystemExit) as exit:
        serve.main(["tiny", *arguments])
    assert exit.value.code == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert "Traceback" not in printed


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_port_that_somebody_listens_at_is_refused(capsys, host):
    with socket.socket() as other:
        other.bind((host, 0))
        port = other.getsockname()[1]
        other.listen()
        with pytest.raises(SystemExit) as exit:
            serve.main(["tiny", "--host", host, "--port", str(port)])
    assert exit.value.code == 2
    assert f"--port {port} is in use at {host}: give another one" in capsys.readouterr().err
    serve.check_address(host, port)  # free again


def test_a_model_that_is_not_there_is_told_in_the_words_of_the_command(capsys, tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with pytest.raises(SystemExit) as exit:
        serve.main([str(tmp_path / "absent"), "--port", str(port)])
    assert exit.value.code == 2
    printed = capsys.readouterr().err
    assert f"error: {tmp_path / 'absent'}: " in printed
    assert "does not exist; give a directory" in printed
    assert "name_or_path" not in printed


def test_what_vllm_finds_wrong_is_told_without_its_frame(capsys):
    class Model(pydantic.BaseModel):
        length: int

        @pydantic.field_validator("length")
        @classmethod
        def short(cls, value: int) -> int:
            raise ValueError("User-specified length (9) is greater than 8")

    with pytest.raises(SystemExit), serve._refusing(pydantic.ValidationError):
        Model(length=9)
    assert capsys.readouterr().err == "python -m async_rl.serve: error: User-specified length (9) is greater than 8\n"
