"""`python -m async_rl.serve MODEL`: vLLM's own server, with the arguments and the middleware that training needs."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import errno
import json
import os
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pydantic

from async_rl.config import ENGINE_RANGES, Range
from async_rl.engines.scratch import Scratch
from async_rl.engines.vllm_launch import (
    VLLMSettings,
    child_environment,
    engine_arguments,
    engine_cores,
)
from async_rl.engines.vllm_server_address import KEY_VARIABLE, api_key, is_loopback
from async_rl.hub import SourceNotFoundError
from async_rl.models import TINY, resolve_model
from async_rl.weights.file import BACKEND as FILE
from async_rl.weights.nccl import BACKEND as NCCL

MIDDLEWARE = "async_rl.engines.vllm_server_routes.ServerRoutes"
DTYPES = ("bfloat16", "float16", "float32", "auto")


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line; exits with 2 and a message where it is wrong."""
    parser = argparse.ArgumentParser(prog="python -m async_rl.serve", description=__doc__)
    parser.add_argument("model", help="directory, Hub name, or tiny: the run's model (its weights are not read)")
    parser.add_argument("--host", default="127.0.0.1", help=f"another address than loopback needs {KEY_VARIABLE}")
    parser.add_argument("--port", type=_number(int, Range(ge=1, le=65535)), default=8001)
    parser.add_argument("--revision", default=None, help="branch, tag or commit on the Hub")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="the same as the run's engine.dtype")
    for name, kind, default, about in (
        ("max_model_len", int, 2048, "longest prompt and completion, tokens"),
        ("max_num_seqs", int, 128, "most sequences decoded at once"),
        ("kv_cache_gib", float, 1.0, "memory for keys and values on the CPU, GiB"),
        ("gpu_memory_utilization", float, 0.9, "share of the GPU's memory"),
    ):
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, type=_number(kind, ENGINE_RANGES[name]), default=default, help=about)
    parser.add_argument("--cpu-cores", default="none", help='on the CPU: "none", "auto" (half) or a list like 0,2-3')
    parser.add_argument(
        "--weight-transfer",
        choices=("file", "nccl"),
        default="file",
        help="how weights come: in files that both sides see, or by NCCL from a trainer on another GPU",
    )
    parser.add_argument("--log-file", default=None, help="file for vLLM's messages; without it warnings are shown")
    parser.add_argument("--engine-kwargs", type=_json, default={}, help="JSON: more arguments of AsyncEngineArgs")
    parsed = parser.parse_args(arguments)
    if not is_loopback(parsed.host) and not api_key():
        parser.error(
            f"--host {parsed.host} can be reached from other machines, so a key is needed: set the environment "
            f"variable {KEY_VARIABLE} here and where the run is started"
        )
    if parsed.log_file and not Path(parsed.log_file).absolute().parent.is_dir():
        parser.error(f"--log-file {parsed.log_file}: there is no directory {Path(parsed.log_file).absolute().parent}")
    return parsed


def _number(kind: Callable[[str], float], allowed: Range) -> Callable[[str], float]:
    def read(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or value not in allowed:
            whole = "whole " if kind is int else ""
            raise argparse.ArgumentTypeError(f"{text!r} is not possible; give a {whole}number {allowed}")
        return value

    return read


def _json(text: str) -> dict[str, Any]:
    example = """for example '{"tensor_parallel_size": 4}'"""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON ({error}); {example}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} must be a JSON object, {example}")
    return value


def check_address(host: str, port: int) -> None:
    """Refuse an address that can't be served at, before anything starts.

    Raises:
        ValueError: it is another machine's, or somebody listens there already.
    """
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(
                socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
            )  # else one whose server has just ended is in use
            probe.bind((host, port))
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ValueError(
                f"--port {port} is in use at {host}: give another one, or end what listens there"
            ) from error
        if error.errno == errno.EACCES:
            raise ValueError(f"--port {port} is not for this user: give one from 1024 on") from error
        raise ValueError(f"--host {host} is no address of this machine ({error.strerror or error})") from error


@contextlib.contextmanager
def _refusing(*kinds: type[Exception]) -> Iterator[None]:
    """End as argparse does where what was asked for can't be; any other error is a bug and keeps its traceback."""
    try:
        yield
    except kinds as error:
        # Errors about the model speak of the run's config; here it is the first argument.
        told = _plain(error).replace("model.name_or_path=", "").replace("model=tiny", TINY)
        print(f"python -m async_rl.serve: error: {told}", file=sys.stderr, flush=True)
        raise SystemExit(2) from error


def _plain(error: Exception) -> str:
    if not isinstance(error, pydantic.ValidationError):
        return str(error)
    return "; ".join(str(fault["msg"]).removeprefix("Value error, ") for fault in error.errors())


def main(arguments: list[str]) -> None:
    """Serve until SIGINT or SIGTERM; exits with 2 where what was asked for can't be."""
    given = parse(arguments)
    with _refusing(ValueError, SourceNotFoundError):
        check_address(given.host, given.port)
        model = str(resolve_model(given.model, given.revision).path)
    from vllm.platforms import current_platform

    on_cpu = current_platform.is_cpu()
    scratch = Scratch()
    with _refusing(ValueError):
        if on_cpu and given.weight_transfer == "nccl":
            raise ValueError("--weight-transfer nccl needs a GPU: leave it out, weights come as files")
        cores = engine_cores(given.cpu_cores, sorted(os.sched_getaffinity(0))) if on_cpu else []
        settings = _settings(given, model)
    os.environ.update(child_environment(settings, scratch.name, cores, on_cpu))
    os.environ.pop("VLLM_ALLOW_INSECURE_SERIALIZATION", None)  # nothing that is received is unpickled
    if cores:
        os.sched_setaffinity(0, cores)
    try:
        _serve(given, settings, scratch.name, on_cpu)
    finally:
        scratch.cleanup()
    raise SystemExit(0)


def _settings(given: argparse.Namespace, model: str) -> VLLMSettings:
    from vllm.config.logging import LoggingConfig

    engine_kwargs: dict[str, Any] = {
        "weight_transfer_config": {"backend": NCCL if given.weight_transfer == "nccl" else FILE}
    }
    if given.log_file is None:
        engine_kwargs["logging_config"] = LoggingConfig(log_level="WARNING")
    return VLLMSettings(
        name="server",
        model=model,
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
    with _refusing(ValueError):
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
    with _refusing(pydantic.ValidationError):  # what vLLM finds wrong with its arguments
        uvloop.run(run_server(arguments))


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except SystemExit as end:
        sys.stdout.flush()
        os._exit(int(end.code or 0))  # libraries complain about each other when an interpreter with vLLM in it closes
