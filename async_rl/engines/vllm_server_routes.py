"""ServerRoutes: what a `vllm serve` process needs to be an engine of ours: key, lease, weight loads, facts.

An ASGI middleware, named on the server's command line (``--middleware``). vLLM's own routes for weights need its
development mode, which opens much more and asks for no key; these call the same functions of the engine.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import uuid
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import asdict
from typing import Any

from async_rl.engines.vllm_core import LocalCore
from async_rl.engines.vllm_port import CoreDiedError
from async_rl.engines.vllm_server_address import KEY_VARIABLE, api_key, is_loopback
from async_rl.engines.vllm_server_lease import RUN_HEADER, NotHeldError, ServerLease

PREFIX = "/async_rl/"
CALLS = ("prepare", "pause", "resume", "recompute", "staged", "stage", "connect", "load")
"""What only the run that has the server may ask for."""
MOST_BYTES = 64 * 2**20
"""Largest body of a request to these routes; the largest that is sent names every parameter of a model."""
MOST_TEXT = 4096
"""Longest text in such a body: a label, or what a run says about itself."""

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
log = logging.getLogger(__name__)


class _NoRouteError(Exception):
    """There is nothing of that name."""


class ServerRoutes:
    """Guards and extends the application of a vLLM server. JSON only: nothing that is received is unpickled.

    With ``ASYNC_RL_API_KEY`` in the server's environment every path but ``/health`` needs it as a bearer token;
    without, only clients on the same machine are answered. One run at a time may load weights.

    Args:
        app: vLLM's application.
        lease: Which run that is.
    """

    def __init__(
        self, app: Callable[[Scope, Receive, Send], Awaitable[None]], lease: ServerLease | None = None
    ) -> None:
        self._app = app
        self._lease = lease or ServerLease()
        self._key = hashlib.sha256(key.encode()).digest() if (key := api_key()) else None
        self._incarnation = uuid.uuid4().hex
        self._core: LocalCore | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or hand it on."""
        if scope["type"] == "http" and scope["path"] != "/health":
            if refusal := self._refusal(scope):
                return await _answer(send, 401, {"error": refusal})
            if scope["path"].startswith(PREFIX):
                return await self._serve(scope, receive, send)
        elif scope["type"] == "websocket":
            return await send({"type": "websocket.close", "code": 1008})
        return await self._app(scope, receive, send)

    def _refusal(self, scope: Scope) -> str:
        """Why the request is not answered; empty if it is."""
        if self._key is None:
            client = scope.get("client")
            if client is not None and is_loopback(client[0]):
                return ""
            return f"this server answers its own machine only: start it with {KEY_VARIABLE} in its environment"
        scheme, _, token = dict(scope["headers"]).get(b"authorization", b"").partition(b" ")
        right = scheme.lower() == b"bearer" and hmac.compare_digest(hashlib.sha256(token).digest(), self._key)
        return "" if right else f"the key in {KEY_VARIABLE} is missing or not the server's"

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        name = scope["path"].removeprefix(PREFIX)
        run = dict(scope["headers"]).get(RUN_HEADER.lower().encode(), b"").decode("latin-1")
        try:
            llm = scope["app"].state.engine_client
            result = await self._answer_for(llm, run, scope["method"], name, await _body(receive))
        except _NoRouteError:
            await _answer(send, 404, {"error": f"there is no {scope['method']} {scope['path']}"})
        except CoreDiedError as error:
            await _answer(send, 503, {"error": str(error)})
        except NotHeldError as error:
            await _answer(send, 409, {"error": str(error)})
        except ValueError as error:
            await _answer(send, 400, {"error": str(error)})
        except Exception as error:
            log.exception("%s failed", scope["path"])
            await _answer(send, 500, {"error": f"{type(error).__name__}: {error}"})
        else:
            await _answer(send, 200, {"result": result})

    async def _answer_for(self, llm: Any, run: str, method: str, name: str, body: Mapping[str, Any]) -> Any:
        if (method, name) == ("POST", "claim"):
            return asdict(self._lease.claim(run, _text(body, "who")))
        if (method, name) == ("POST", "release"):
            return self._lease.release(run)
        if self._core is None:
            self._core = LocalCore(llm)
        if (method, name) == ("GET", "info"):
            return {
                "incarnation": self._incarnation,
                "alive": not llm.errored,
                **_facts(llm),
                "stages": self._core.stages,
                "workers": self._core.workers,
                "yours": self._lease.renew(run),
                "holder": self._lease.holder,
            }
        if method != "POST" or name not in CALLS:
            raise _NoRouteError
        with self._lease.call(run):
            return await self._call(self._core, name, body)

    async def _call(self, core: LocalCore, name: str, body: Mapping[str, Any]) -> Any:
        if name in ("stage", "connect"):
            return await getattr(core, name)(_mapping(body, "info"))
        if name == "load":
            # One call, so that a trainer that dies in the middle of it leaves no half-loaded model behind.
            return await core.load(_mapping(body, "info"), _text(body, "label"))
        return await getattr(core, name)()


def _facts(llm: Any) -> dict[str, Any]:
    config = llm.vllm_config
    model = config.model_config
    return {
        "model": str(model.model),
        "dtype": str(model.dtype).removeprefix("torch."),
        "weight_backend": str(config.weight_transfer_config.backend) if config.weight_transfer_config else "",
        "logprobs_mode": str(model.logprobs_mode),
        "generation_config": str(model.generation_config),
        "max_model_len": int(model.max_model_len),
    }


def _mapping(body: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = body.get(key)
    if not isinstance(value, Mapping):
        raise ValueError(f"{key!r} must be an object")
    return value


def _text(body: Mapping[str, Any], key: str) -> str:
    if not isinstance(value := body.get(key), str) or len(value) > MOST_TEXT:
        raise ValueError(f"{key!r} must be a text of at most {MOST_TEXT} characters")
    return value


async def _body(receive: Receive) -> Mapping[str, Any]:
    data = bytearray()
    while True:
        message = await receive()
        data += message.get("body", b"")
        if len(data) > MOST_BYTES:
            raise ValueError(f"the body has more than {MOST_BYTES} bytes")
        if not message.get("more_body"):
            break
    body = json.loads(data) if data else {}
    if not isinstance(body, Mapping):
        raise ValueError("the body must be a JSON object")
    return body


async def _answer(send: Send, status: int, content: Mapping[str, Any]) -> None:
    body = json.dumps(content).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
