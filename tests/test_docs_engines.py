"""docs/engines.md: its commands are accepted, by us and by vLLM's own parser, and mean what `async_rl.serve` does."""

import dataclasses
import re
import shlex
from pathlib import Path

import pytest
from test_config import composed

from async_rl import serve
from async_rl.engines import vllm_server_core, vllm_server_lease
from async_rl.engines.vllm_launch import VLLMSettings, engine_arguments
from async_rl.engines.vllm_server_address import KEY_VARIABLE

PAGE = (Path(__file__).resolve().parent.parent / "docs/engines.md").read_text()
BLOCKS = [
    re.sub(r"\\\n\s*", "", "\n".join(line[4:] for line in block.splitlines()))
    for block in re.findall(r"(?:^    .*\n)+", PAGE, flags=re.M)
]
COMMANDS = [line.partition(" # ")[0].strip() for block in BLOCKS for line in block.splitlines()]
IN_THE_TEXT = re.findall(r"`(python [^`]*)`", " ".join(PAGE.split()))
# What `async_rl.serve` gives vLLM besides: its own choices, or of no meaning for the tokens.
NOT_NEEDED = {
    "model", "served_model_name", "load_format", "disable_log_stats", "logging_config", "seed", "max_num_seqs",
    "kv_cache_memory_bytes", "gpu_memory_utilization", "distributed_executor_backend", "enable_prefix_caching",
}  # fmt: skip


def after(start):
    """The words that follow ``start`` in the commands that hold it."""
    found = [c.partition(start)[2] for c in (*COMMANDS, *IN_THE_TEXT) if start in c]
    return [shlex.split(words) for words in found]


@pytest.mark.parametrize("words", after("python -m async_rl.serve "))
def test_commands_that_serve_are_accepted(words, monkeypatch):
    monkeypatch.setenv(KEY_VARIABLE, "a key")
    assert serve.parse(words if words[0] != "--help" else ["MODEL"]).model


@pytest.mark.parametrize("words", after("python train.py "))
def test_commands_that_train_compose(words, monkeypatch):
    monkeypatch.setenv(KEY_VARIABLE, "a key")
    assert composed(*words)


def test_there_are_such_commands():
    assert len(after("python -m async_rl.serve ")) >= 3
    assert len(after("python train.py ")) >= 2


def test_times_on_the_page_are_those_of_the_code():
    assert f"One that hangs is given {vllm_server_core.ANSWER_TIMEOUT_S:g} s" in PAGE
    assert f"loses them {vllm_server_lease.LEASE_S:g} s after its last sign of life" in " ".join(PAGE.split())


@pytest.mark.vllm
@pytest.mark.parametrize("on_cpu", [False, True])
def test_the_flags_by_hand_make_the_server_that_async_rl_serve_makes(on_cpu, tiny_model_dir, tmp_path):
    from vllm import AsyncEngineArgs
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    (by_hand,) = after("vllm serve ")
    if on_cpu:
        (more,) = [c for c in COMMANDS if c.startswith("--enforce-eager")]
        by_hand = [*by_hand, *shlex.split(more)]
    parsed = make_arg_parser(FlexibleArgumentParser()).parse_args(by_hand)
    assert parsed.model_tag == "MODEL"
    assert (parsed.host, parsed.port) == ("127.0.0.1", 8001)
    assert parsed.middleware == [serve.MIDDLEWARE]
    assert parsed.enable_scale_out
    ours = served_by_us(str(tiny_model_dir), tmp_path, on_cpu)
    plain = AsyncEngineArgs(model=str(tiny_model_dir))
    for field in dataclasses.fields(AsyncEngineArgs):
        value = getattr(ours, field.name)
        if field.name not in NOT_NEEDED and value != getattr(plain, field.name):
            assert getattr(parsed, field.name) == value, f"the page lacks, or has another, {field.name}={value!r}"
    assert parsed.weight_transfer_config.backend == ours.weight_transfer_config.backend
    assert parsed.generation_config == ours.generation_config == "vllm"
    assert parsed.logprobs_mode == ours.logprobs_mode


def served_by_us(model, directory, on_cpu):
    """What `async_rl.serve` gives vLLM."""
    given = serve.parse([model])
    transfer = {"weight_transfer_config": {"backend": serve.FILE}}
    settings = VLLMSettings(
        name="server", model=model, dtype=given.dtype, max_model_len=given.max_model_len, max_num_seqs=1, seed=0,
        gpu_memory_utilization=0.9, kv_cache_gib=1.0, cpu_cores="none", start_timeout_s=1.0, log_file=None,
        engine_kwargs=transfer,
    )  # fmt: skip
    return engine_arguments(settings, str(directory), on_cpu)


@pytest.mark.vllm
def test_weights_by_nccl_are_named_as_they_are():
    assert f'--weight-transfer-config \'{{"backend": "{serve.NCCL}"}}\'' in PAGE
