"""ServerCore: the calls of one vLLM server over HTTP, as VLLMClient wants them, and the watch over its life."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from async_rl.engines.base import EngineError, SamplingParams
from async_rl.engines.vllm_port import CoreDiedError, Piece, Span
from async_rl.engines.vllm_server_address import KEY_VARIABLE, api_key
from async_rl.engines.vllm_server_lease import LEASE_S, RUN_HEADER, Claim

MIDDLEWARE = "async_rl.engines.vllm_server_routes.ServerRoutes"
POLL_S = 0.5
ANSWER_TIMEOUT_S = 20.0
"""A server that does not say within this time that it lives is taken for dead."""
CONNECT_TIMEOUT_S = 5.0
RELEASE_TIMEOUT_S = 2.0
IMPOSSIBLE = -9999.0
"""What vLLM sends for a log-probability that is no number, or below it."""


class ServerRefusedError(RuntimeError):
    """The server answered with an error that is neither its death nor the request's fault."""


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What a server says about itself.

    Attributes:
        incarnation: Changes when the server is started again.
        alive: Its engine core runs.
        model: What it was started with.
        dtype: Number format it computes in.
        weight_backend: Weight-transfer back end.
        stages: It prepares weights while it generates.
        workers: Processes that hold a part of the model each.
        logprobs_mode: What its log-probabilities are of.
        max_model_len: Longest prompt and completion together, tokens.
        yours: The run that asks has it (see :class:`~async_rl.engines.vllm_server_lease.ServerLease`).
        holder: Which run has it, for people; empty where none has.
    """

    incarnation: str
    alive: bool
    model: str
    dtype: str
    weight_backend: str
    stages: bool
    workers: int
    logprobs_mode: str
    max_model_len: int
    yours: bool
    holder: str


class ServerCore:
    """One incarnation of a server (a :class:`~async_rl.engines.vllm_port.VLLMCore`); get it with :func:`connect`.

    A connection that breaks, a server that stops answering, and one that was started again all count as its death: a
    new incarnation has lost the weights. So does another run that has it now.

    Args:
        url: Base URL.
        session: What requests are sent with.
        facts: What the server said when it was found.
    """

    def __init__(self, url: str, session: aiohttp.ClientSession, facts: ServerFacts) -> None:
        self.facts = facts
        self.weight_backend = facts.weight_backend
        self.stages = facts.stages
        self.workers = facts.workers
        self.max_model_len = facts.max_model_len
        self._url = url
        self._session = session
        self._streams: dict[str, tuple[asyncio.Task[None], asyncio.Queue[Piece | Exception]]] = {}
        self._watches: list[asyncio.Task[None]] = []

    def watch(self, died: Callable[[str], None]) -> None:
        """Ask twice a second whether it is still the same server."""
        self._watches.append(asyncio.create_task(self._poll(died)))

    async def claim(self, who: str) -> Claim:
        """Ask for the server, which nobody else may have meanwhile; its calls need it.

        Args:
            who: What other runs are told about this one.

        Raises:
            EngineError: the server does not know what that is.
        """
        try:
            return Claim(**await self._call("claim", {"who": who}, ANSWER_TIMEOUT_S))
        except ServerRefusedError as error:
            raise EngineError(f"{error}; it runs another version of async_rl: install this one there") from error

    async def prepare(self) -> None:
        """Let the server open its weight path."""
        await self._call("prepare")

    def sampling(self, sampling: SamplingParams, seed: int) -> dict[str, Any]:
        """Parameters of a request that samples."""
        return {
            "stream": True,
            "sampling_params": {
                "max_tokens": sampling.max_tokens,
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k,
                "min_p": sampling.min_p,
                "stop": list(sampling.stop),
                "seed": seed,
                "logprobs": 0,
                "detokenize": bool(sampling.stop),
                # The first output tells that the request has started, the last one brings the rest.
                "stream_interval": 1 << 30,
            },
        }

    def scoring(self) -> dict[str, Any]:
        """Parameters of a request that scores its prompt."""
        parameters = {"max_tokens": 1, "prompt_logprobs": 0, "detokenize": False, "ignore_eos": True, "logprobs": 0}
        return {"stream": False, "sampling_params": parameters}

    async def run(
        self, request_id: str, prompt: tuple[int, ...], parameters: Any, salt: str
    ) -> AsyncGenerator[Piece, None]:
        """The outputs of one request; its connection is closed when this generator is."""
        body = {"token_ids": list(prompt), "cache_salt": salt, **parameters}
        queue: asyncio.Queue[Piece | Exception] = asyncio.Queue()
        task = asyncio.create_task(self._receive(body, queue))
        self._streams[request_id] = task, queue
        try:
            while True:
                piece = await queue.get()
                if isinstance(piece, Exception):
                    raise piece
                yield piece
                if piece.finish_reason:
                    return
        finally:
            del self._streams[request_id]
            task.cancel()

    async def abort(self, request_id: str) -> None:
        """Close the request's connection, which makes the server drop it, and end its generator."""
        if request_id in self._streams:
            task, queue = self._streams[request_id]
            task.cancel()
            queue.put_nowait(Piece([], [], [], [], "abort"))

    async def pause(self) -> None:
        """Freeze the running requests."""
        await self._call("pause")

    async def resume(self) -> None:
        """Let them go on."""
        await self._call("resume")

    async def connect(self, info: Mapping[str, Any]) -> None:
        """Have the server's workers join the link over which weights are sent."""
        await self._call("connect", {"info": dict(info)})

    async def stage(self, info: Mapping[str, Any]) -> bool:
        """Begin to prepare weights."""
        return bool(await self._call("stage", {"info": dict(info)}))

    async def staged(self) -> bool:
        """Whether they are prepared."""
        return bool(await self._call("staged"))

    async def load(self, info: Mapping[str, Any], label: str) -> None:
        """Load weights and stamp what is sampled from now on with ``label``."""
        await self._call("load", {"info": dict(info), "label": label})

    async def recompute(self) -> None:
        """Have running requests compute their keys and values again."""
        await self._call("recompute")

    async def close(self) -> None:
        """Drop every connection and give the server back; it is somebody else's and lives on."""
        tasks = [*self._watches, *(task for task, _ in self._streams.values())]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        with contextlib.suppress(CoreDiedError, ServerRefusedError, ValueError):  # else the lease runs out by itself
            await self._call("release", timeout_s=RELEASE_TIMEOUT_S)
        await self._session.close()

    async def _poll(self, died: Callable[[str], None]) -> None:
        while True:
            await asyncio.sleep(POLL_S)
            try:
                self._check(await read_facts(self._url, self._session))
            except (CoreDiedError, ServerRefusedError, EngineError) as error:
                return died(str(error))

    def _check(self, facts: ServerFacts) -> None:
        if not facts.alive:
            raise CoreDiedError(f"the engine core of the server at {self._url} died")
        if facts.incarnation != self.facts.incarnation:
            raise CoreDiedError(f"the server at {self._url} was started again and has lost its weights")
        if not facts.yours:
            raise CoreDiedError(
                f"the server at {self._url} has been given to another run ({facts.holder}), because this one gave no "
                f"sign of life for {LEASE_S:g} s"
            )

    async def _call(self, name: str, body: Mapping[str, Any] | None = None, timeout_s: float | None = None) -> Any:
        """Call one of the routes of :class:`async_rl.engines.vllm_server_routes.ServerRoutes`."""
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_TIMEOUT_S)
        with _connection(self._url):
            async with self._session.post(f"{self._url}/async_rl/{name}", json=body or {}, timeout=timeout) as response:
                return (await _content(self._url, response))["result"]

    async def _receive(self, body: Mapping[str, Any], queue: asyncio.Queue[Piece | Exception]) -> None:
        try:
            with _connection(self._url):
                async with self._session.post(f"{self._url}/inference/v1/generate", json=body) as response:
                    if response.status != 200 or not body["stream"]:
                        queue.put_nowait(_scored(await _content(self._url, response), body["token_ids"]))
                        return
                    async for event in _events(response):
                        if (error := event.get("error")) is not None:
                            raise _failure(self._url, int(error.get("code") or 500), error)
                        queue.put_nowait(_piece(event))
            # After the last piece nobody reads the queue any more.
            raise CoreDiedError(f"the server at {self._url} broke off an answer")
        except ServerRefusedError as error:
            queue.put_nowait(await self._cause(error))
        except Exception as error:
            queue.put_nowait(error)

    async def _cause(self, error: Exception) -> Exception:
        """The server's death, if that is what its answer comes from."""
        try:
            self._check(await read_facts(self._url, self._session))
        except Exception as cause:
            return cause
        return error


async def connect(url: str, run: str) -> ServerCore:
    """Find the server at ``url``. Call on the event loop that will own the connection.

    Args:
        url: Base URL.
        run: Under which id the server is claimed; nobody else may know it.

    Raises:
        CoreDiedError: it can't be reached, or is not up yet.
        EngineError: it wants another key, or was not started for training.
    """
    session = aiohttp.ClientSession(
        # A connection for each request: one that a server has just closed would look like its death.
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
        headers={RUN_HEADER: run} | ({"Authorization": f"Bearer {key}"} if (key := api_key()) else {}),
        trust_env=False,
    )
    try:
        facts = await read_facts(url, session)
        if not facts.alive:
            raise CoreDiedError(f"the engine core of the server at {url} is dead")
        return ServerCore(url, session, facts)
    except BaseException as error:
        await session.close()
        if isinstance(error, ServerRefusedError):
            raise EngineError(str(error)) from error
        raise


async def read_facts(url: str, session: aiohttp.ClientSession) -> ServerFacts:
    """Ask a server what it is.

    Raises:
        CoreDiedError: no answer.
        EngineError: it wants another key, or does not have our routes.
    """
    with _connection(url):
        timeout = aiohttp.ClientTimeout(total=ANSWER_TIMEOUT_S, sock_connect=CONNECT_TIMEOUT_S)
        async with session.get(f"{url}/async_rl/info", timeout=timeout) as response:
            if response.status == 401:
                raise EngineError(
                    f"the server at {url} refuses the key: set {KEY_VARIABLE} to the same value here and there"
                )
            if response.status == 404:
                raise EngineError(
                    f"the server at {url} was not started for training: start it with `python -m async_rl.serve`, or "
                    f"give vllm serve --middleware {MIDDLEWARE}"
                )
            facts = (await _content(url, response))["result"]
    try:
        return ServerFacts(**{name: facts[name] for name in ServerFacts.__dataclass_fields__})
    except KeyError as error:
        raise EngineError(
            f"the server at {url} runs another version of async_rl, which does not tell {error}: install this one there"
        ) from error


@contextlib.contextmanager
def _connection(url: str) -> Iterator[None]:
    """A broken connection as the server's death."""
    try:
        yield
    except TimeoutError as error:
        raise CoreDiedError(f"the server at {url} does not answer") from error
    except aiohttp.ClientConnectorError as error:
        raise CoreDiedError(f"the server at {url} can't be reached ({error.os_error.strerror})") from error
    except (aiohttp.ClientError, ConnectionError) as error:
        raise CoreDiedError(f"the connection to the server at {url} broke ({type(error).__name__})") from error


async def _content(url: str, response: aiohttp.ClientResponse) -> Any:
    """The JSON of an answer, or its error."""
    text = await response.text()
    if response.status == 200:
        return json.loads(text)
    try:
        error = json.loads(text)["error"]
    except (ValueError, KeyError, TypeError):
        error = text[:500]
    raise _failure(url, response.status, error)


def _failure(url: str, status: int, error: Any) -> Exception:
    """What an error of the server means, whether it is the answer or comes in the stream of one."""
    message = str(error.get("message")) if isinstance(error, Mapping) else str(error)
    if status == 503:
        return CoreDiedError(f"the engine core of the server at {url} died: {message}")
    if status == 409:
        return CoreDiedError(f"the server at {url} is lost: {message}")
    if status in (400, 422):
        return ValueError(message)
    return ServerRefusedError(f"the server at {url} answered {status}: {message}")


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[Mapping[str, Any]]:
    """The JSON objects of a stream of server-sent events, of any length each."""
    buffer = b""
    async for data in response.content.iter_any():
        *events, buffer = (buffer + data).split(b"\n\n")
        for event in events:
            payload = event.removeprefix(b"data:").strip()
            if payload and payload != b"[DONE]":
                yield json.loads(payload)


def _piece(event: Mapping[str, Any]) -> Piece:
    (choice,) = event["choices"]
    content = (choice.get("logprobs") or {}).get("content") or []
    return Piece(
        token_ids=list(choice.get("token_ids") or []),
        logprobs=[_finite(entry["logprob"]) for entry in content],
        prompt_logprobs=[],
        spans=[_span(span) for span in choice.get("weight_versions") or []],
        finish_reason=choice.get("finish_reason") or "",
    )


def _scored(content: Mapping[str, Any], prompt: Sequence[int]) -> Piece:
    (choice,) = content["choices"]
    rows = zip(content["prompt_logprobs"][1:], prompt[1:], strict=True)
    prompt_logprobs = [_finite((row or {}).get(str(token), {}).get("logprob")) for row, token in rows]
    spans = [_span(span) for span in choice.get("weight_versions") or []]
    return Piece(list(choice["token_ids"]), [], prompt_logprobs, spans, choice["finish_reason"])


def _span(span: Any) -> Span:
    return Span(str(span["version"]), int(span["start"]), int(span["end"]))


def _finite(logprob: float | None) -> float:
    return logprob if logprob is not None and math.isfinite(logprob) and logprob > IMPOSSIBLE else math.nan
