"""`python -m async_rl.serve MODEL`: vLLM's own server, with the arguments and the middleware that training needs."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from typing import Any

from async_rl.engines.scratch import Scratch
from async_rl.engines.vllm_launch import (
    VLLMSettings,
    child_environment,
    engine_arguments,
    engine_cores,
)
from async_rl.engines.vllm_server_address import KEY_VARIABLE, api_key, is_loopback
from async_rl.weights.file import BACKEND as FILE
from async_rl.weights.nccl import BACKEND as NCCL

MIDDLEWARE = "async_rl.engines.vllm_server_routes.ServerRoutes"


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line; exits with 2 and a message where it is wrong."""
    parser = argparse.ArgumentParser(prog="python -m async_rl.serve", description=__doc__)
    parser.add_argument("model", help="directory, Hub name, or tiny: the run's model (its weights are not read)")
    parser.add_argument("--host", default="127.0.0.1", help=f"another address than loopback needs {KEY_VARIABLE}")
    parser.add_argument("--port", type=int, default=8001)
    parser.add_argument("--revision", default=None, help="branch, tag or commit on the Hub")
    parser.add_argument("--dtype", default="bfloat16", help="the same as the run's engine.dtype")
    parser.add_argument("--max-model-len", type=int, default=2048, help="longest prompt and completion, tokens")
    parser.add_argument("--max-num-seqs", type=int, default=128, help="most sequences decoded at once")
    parser.add_argument("--kv-cache-gib", type=float, default=1.0, help="memory for keys and values on the CPU, GiB")
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.9, help="share of the GPU's memory")
    parser.add_argument("--cpu-cores", default="none", help='on the CPU: "none", "auto" (half) or a list like 0,2-3')
    parser.add_argument(
        "--weight-transfer",
        choices=("file", "nccl"),
        default="file",
        help="how weights come: in files that both sides see, or by NCCL from a trainer on another GPU",
    )
    parser.add_argument("--log-file", default=None, help="file for vLLM's messages; without it warnings are shown")
    parser.add_argument("--engine-kwargs", type=json.loads, default={}, help="JSON: more arguments of AsyncEngineArgs")
    parsed = parser.parse_args(arguments)
    if not is_loopback(parsed.host) and not api_key():
        parser.error(
            f"--host {parsed.host} can be reached from other machines, so a key is needed: set the environment "
            f"variable {KEY_VARIABLE} here and where the run is started"
        )
    if not isinstance(parsed.engine_kwargs, dict):
        parser.error("--engine-kwargs must be a JSON object")
    return parsed


def main(arguments: list[str]) -> None:
    """Serve until SIGINT or SIGTERM."""
    given = parse(arguments)
    from vllm.platforms import current_platform

    on_cpu = current_platform.is_cpu()
    if on_cpu and given.weight_transfer == "nccl":
        print("--weight-transfer nccl needs a GPU: leave it out, weights come as files", file=sys.stderr)
        sys.exit(2)
    scratch = Scratch()
    settings = _settings(given)
    cores = engine_cores(given.cpu_cores, sorted(os.sched_getaffinity(0))) if on_cpu else []
    os.environ.update(child_environment(settings, scratch.name, cores, on_cpu))
    os.environ.pop("VLLM_ALLOW_INSECURE_SERIALIZATION", None)  # nothing that is received is unpickled
    if cores:
        os.sched_setaffinity(0, cores)
    try:
        _serve(given, settings, scratch.name, on_cpu)
    finally:
        scratch.cleanup()
    sys.stdout.flush()
    os._exit(0)  # libraries complain about each other when an interpreter with vLLM in it closes


def _settings(given: argparse.Namespace) -> VLLMSettings:
    from vllm.config.logging import LoggingConfig

    from async_rl.models import resolve_model

    engine_kwargs: dict[str, Any] = {
        "weight_transfer_config": {"backend": NCCL if given.weight_transfer == "nccl" else FILE}
    }
    if given.log_file is None:
        engine_kwargs["logging_config"] = LoggingConfig(log_level="WARNING")
    return VLLMSettings(
        name="server",
        model=str(resolve_model(given.model, given.revision).path),
        dtype=given.dtype,
        max_model_len=given.max_model_len,
        max_num_seqs=given.max_num_seqs,
        gpu_memory_utilization=given.gpu_memory_utilization,
        kv_cache_gib=given.kv_cache_gib,
        cpu_cores=given.cpu_cores,
        seed=0,
        start_timeout_s=600.0,
        log_file=given.log_file,
        engine_kwargs={**engine_kwargs, **given.engine_kwargs},
    )


def _serve(given: argparse.Namespace, settings: VLLMSettings, scratch: str, on_cpu: bool) -> None:
    import uvloop
    from vllm.entrypoints.launchers.api_server.entry import run_server
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.logger import configure_logging_if_needed
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    arguments = make_arg_parser(FlexibleArgumentParser()).parse_args([])
    engine = engine_arguments(settings, scratch, on_cpu)
    for field in dataclasses.fields(engine):
        setattr(arguments, field.name, getattr(engine, field.name))
    arguments.host, arguments.port = given.host, given.port
    arguments.middleware = [MIDDLEWARE]
    arguments.disable_uvicorn_access_log = True
    arguments.disable_fastapi_docs = True
    arguments.enable_scale_out = True  # the routes for tokens in and tokens out
    configure_logging_if_needed(engine.logging_config)
    validate_parsed_serve_args(arguments)
    who = f"those who have the key in {KEY_VARIABLE}" if api_key() else "this machine only"
    print(f"serving {settings.model} at http://{given.host}:{given.port}, to {who}", flush=True)
    uvloop.run(run_server(arguments))


if __name__ == "__main__":
    main(sys.argv[1:])
