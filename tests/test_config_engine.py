"""The rules of the engine section: how many engines, which servers, and no secret anywhere."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from omegaconf import open_dict
from test_config import refused

from async_rl import compose, main
from async_rl.config import ConfigError
from async_rl.engines.replicas import replica_arguments
from async_rl.engines.vllm_server_address import KEY_VARIABLE, check_url, is_loopback, without_secret

ROOT = Path(compose.REPOSITORY)
SECRET = "hunter2hunter2"


def problems(*overrides: str) -> str:
    compose.register()
    with initialize_config_dir(config_dir=str(compose.CONF), version_base="1.3"):
        config = hydra_compose("config", overrides=list(overrides), return_hydra_config=True)
    choices = dict(config.hydra.runtime.choices)
    with open_dict(config):
        del config["hydra"]
    try:
        compose.check(config, overrides, choices)
    except ConfigError as error:
        return str(error)
    return ""


RUN = ("run_dir=x",)
SERVERS = (*RUN, "engine=vllm_server")
SAME_AGAIN = "run.evaluation.engine=${engine}"
OWN = "+engine@run.evaluation.engine"


@pytest.mark.parametrize(
    "overrides",
    [
        (*RUN, "engine=vllm", "engine.replicas=2", "hardware=cpu"),
        (*RUN, "engine=transformers", "engine.replicas=3"),
        (*RUN, "engine=vllm", "engine.replicas=2", "hardware=gpu", "engine.gpu_memory_utilization=0.45"),
        SERVERS,
        (*SERVERS, "engine.urls=['http://127.0.0.1:8001','http://[::1]:8002','https://localhost:8003']"),
        (*RUN, "engine=vllm", SAME_AGAIN),
        (*SERVERS, "hardware=gpu", "engine.weight_transfer=nccl"),
        (*SERVERS, "hardware=cpu", "engine.weight_transfer=file"),
        (*RUN, "engine=vllm", f"{OWN}=vllm", "run.evaluation.engine.max_num_seqs=8"),
        (*RUN, "engine=transformers", "+engine@run.evaluation.engine=transformers"),
        (*SERVERS, f"{OWN}=vllm_server", "run.evaluation.engine.urls=['http://127.0.0.1:8009']"),
    ],
)
def test_possible_engines(overrides):
    assert problems(*overrides) == ""


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ((*RUN, "engine=vllm", "engine.replicas=0"), r"engine\.replicas: 0 .*>= 1"),
        ((*RUN, "engine=vllm", "engine.replicas=two"), r"engine\.replicas: 'two' .*whole number"),
        (
            (*RUN, "engine=vllm", "engine.replicas=3", "hardware=gpu", "engine.gpu_memory_utilization=0.45"),
            r"3 engines with engine\.gpu_memory_utilization=0\.45 each do not fit.*0\.3",
        ),
        ((*SERVERS, "engine.urls=[]"), r"engine\.urls: give the servers' addresses"),
        ((*SERVERS, "engine.urls=8001"), r"engine\.urls: give the servers' addresses"),
        ((*SERVERS, "engine.urls=['http://127.0.0.1:8001','http://127.0.0.1:8001']"), "names a server twice"),
        (
            (*SERVERS, "hardware=cpu", "engine.weight_transfer=nccl"),
            r"engine\.weight_transfer: nccl sends .*hardware\.kind=cpu.*engine\.weight_transfer=file",
        ),
        ((*SERVERS, "+engine.replicas=2"), r"engine\.replicas: servers are counted by engine\.urls"),
        ((*SERVERS, "engine.urls=['http://10.0.0.7:8001']"), r"engine\.allow_remote=true"),
        ((*SERVERS, "engine.urls=['http://10.0.0.7:8001']", "engine.allow_remote=true"), KEY_VARIABLE),
        ((*SERVERS, "engine.urls=['127.0.0.1:8001']"), "is no address"),
        (
            (*SERVERS, SAME_AGAIN),
            r"run\.evaluation\.engine\.urls: http://127\.0\.0\.1:8001 is one of engine\.urls.*leave run\.evaluation",
        ),
        ((*RUN, SAME_AGAIN, "run.evaluation.at=never"), r"run\.evaluation\.engine: is never used with"),
        (
            (*SERVERS, f"{OWN}=vllm_server", "run.evaluation.engine.urls=[]"),
            r"run\.evaluation\.engine\.urls: give the servers'",
        ),
        (
            (*RUN, "engine=vllm", "hardware=gpu", SAME_AGAIN, "engine.gpu_memory_utilization=0.6"),
            r"2 engines with engine\.gpu_memory_utilization=0\.6, .* each do not fit.*0\.47",
        ),
        (
            (*RUN, "engine=vllm", f"{OWN}=vllm", "run.evaluation.engine.max_model_len=16"),
            r"in run\.evaluation\.engine\.max_mod",
        ),
        (
            (*RUN, "engine=vllm", f"{OWN}=vllm", "run.evaluation.engine.replicas=0"),
            r"run\.evaluation\.engine\.replicas: 0",
        ),
        (
            (*RUN, "engine=vllm", f"{OWN}=vllm", "+run.evaluation.engine.seqs=1"),
            r"run\.evaluation\.engine\.seqs: there is no",
        ),
        (
            (*RUN, "engine=vllm", "hardware=cpu", "+engine@run.evaluation.engine=transformers"),
            r"engine\.dtype: float32 with engine\.dtype=bfloat16",
        ),
        ((*SERVERS, "engine.urls=['http://127.0.0.1']"), "is no address"),
    ],
)
def test_impossible_engines_are_refused_with_the_fix(overrides, message, monkeypatch):
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    assert re.search(message, problems(*overrides))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "engine.replicas=2",
            "engine.replicas: servers are counted by their addresses: list more of them, engine.urls=[",
        ),
        (
            "engine.api_key=x",
            f"engine.api_key: a key in a config ends up in files and logs; remove it and set .*{KEY_VARIABLE}",
        ),
        ("engine.token=x", f"engine.token: a key .*{KEY_VARIABLE}"),
        ("engine.urlz=x", r"there is no key engine\.urlz; did you mean"),
    ],
)
def test_keys_that_servers_do_not_have_come_with_what_there_is_instead(override, message):
    assert re.search(message.replace("[", r"\["), refused("engine=vllm_server", override))


def test_a_remote_server_with_leave_and_a_key_is_allowed(monkeypatch):
    monkeypatch.setenv(KEY_VARIABLE, SECRET)
    assert problems(*SERVERS, "engine.urls=['http://10.0.0.7:8001']", "engine.allow_remote=true") == ""


@pytest.mark.parametrize(
    "where",
    [
        f"engine.urls=[http://me:{SECRET}@127.0.0.1:8001]",
        f"+engine.api_key={SECRET}",
        f"engine.api_key={SECRET}",
    ],
)
def test_a_secret_in_the_config_is_refused_and_shown_nowhere(tmp_path, where):
    command = [sys.executable, str(ROOT / "train.py"), "engine=vllm_server", where, f"run_dir={tmp_path / 'run'}"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert done.returncode == 2
    assert KEY_VARIABLE in done.stderr
    assert SECRET not in done.stderr + done.stdout
    assert not [p for p in tmp_path.rglob("*") if p.is_file() and SECRET in p.read_text(errors="replace")]


def test_loopback_is_what_only_this_machine_reaches():
    assert all(map(is_loopback, ("localhost", "127.0.0.1", "127.8.9.1", "::1")))
    assert not any(map(is_loopback, ("0.0.0.0", "10.1.2.3", "example.org", "localhost.example.org", "::")))
    assert check_url("http://127.0.0.1:8001/", allow_remote=False) == "http://127.0.0.1:8001"


def test_secrets_are_taken_out_of_texts_and_the_rest_is_left():
    assert (
        without_secret(f"x=[http://u:{SECRET}@h:1] engine.api_key={SECRET})")
        == "x=[http://***@h:1] engine.api_key=***)"
    )
    plain = "rollout.sampling.max_tokens: 5 leaves no room; key: see http://127.0.0.1:8001/a@b"
    assert without_secret(plain) == plain


@pytest.mark.parametrize(
    ("spec", "allowed", "replicas", "shares"),
    [
        ("auto", range(8), 2, ["0,1", "2,3"]),
        ("auto", range(2), 2, ["0", "1"]),
        ("auto", range(2), 3, ["0", "1", "0"]),
        ("auto", [5], 2, ["5", "5"]),
        ("0-4", range(8), 2, ["0,1", "2,3,4"]),
        ("none", range(8), 2, ["none", "none"]),
    ],
)
def test_replicas_divide_the_cores(spec, allowed, replicas, shares):
    made = replica_arguments("vllm", {"cpu_cores": spec, "log_file": "run/vllm.log", "dtype": "x"}, replicas, allowed)
    assert [one["cpu_cores"] for one in made] == shares
    assert [one["name"] for one in made] == [f"vllm-{i}" for i in range(replicas)]
    assert [one["log_file"] for one in made] == [f"run/vllm-{i}.log" for i in range(replicas)]
    assert {one["dtype"] for one in made} == {"x"}


def test_one_replica_is_the_engine_as_it_is_and_too_few_cores_are_refused():
    assert replica_arguments("vllm", {"cpu_cores": "auto", "log_file": "a.log"}, 1, [0]) == [
        {"cpu_cores": "auto", "log_file": "a.log"}
    ]
    assert replica_arguments("transformers", {"dtype": "x", "log_file": None}, 2, [0]) == [
        {"dtype": "x", "log_file": None, "name": f"transformers-{i}"} for i in range(2)
    ]
    with pytest.raises(ValueError, match=r"engine\.cpu_cores=0 has 1 cores for engine\.replicas=2"):
        replica_arguments("vllm", {"cpu_cores": "0"}, 2, range(4))


@pytest.mark.parametrize(
    ("config", "own", "names", "log"),
    [
        ("engine=vllm", (SAME_AGAIN,), ["eval"], "vllm-eval.log"),
        (
            "engine=vllm",
            (f"{OWN}=vllm", "run.evaluation.engine.replicas=2"),
            ["eval-0", "eval-1"],
            "",
        ),
        (
            "engine=vllm_server",
            (f"{OWN}=vllm_server", "run.evaluation.engine.urls=['http://127.0.0.1:8009']"),
            ["eval-0"],
            "",
        ),
        ("engine=transformers", (), [], ""),
    ],
)
def test_evaluation_engines_have_names_and_log_files_of_their_own(config, own, names, log):
    compose.register()
    with initialize_config_dir(config_dir=str(compose.CONF), version_base="1.3"):
        composed = hydra_compose("config", overrides=[*RUN, config, *own])
    checked = compose.check(composed, (), {})
    engines = main._build_eval_engines(checked, "no/model")
    assert [engine.name for engine in engines] == names
    assert not log or engines[0]._settings.log_file == f"x/{log}"
