"""TransformersWorker: the one thread that owns the model; everything it is asked for happens between two tokens."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from async_rl.engines.base import BusyClock, EngineError, EngineStats, Generation, GenerationRequest
from async_rl.engines.decode_batch import DecodeBatch, Row
from async_rl.weights.base import WeightSource

T = TypeVar("T")

# Contexts computed at once: bounds the memory of a burst of long prompts. One context may be longer.
MAX_CONTEXT_TOKENS_AT_ONCE = 16_384
# transformers reads one model at a time: of two at once, one is left without data.
_READING = threading.Lock()


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """What the worker needs to know; see :class:`~async_rl.engines.transformers.TransformersEngine`."""

    name: str
    model: str
    dtype: str
    device: str
    max_batch: int
    max_model_len: int | None
    kv_max_age: int | None
    threads: int | None


class LoadedModel:
    """A model directory, read: the model in inference form, its tokenizer, its end tokens and its length.

    Args:
        settings: Which model, where and how.
    """

    def __init__(self, settings: WorkerSettings) -> None:
        # Read in float32 and converted afterwards: reading in another dtype changes torch's default dtype for the whole
        # process meanwhile, and the trainer may be building its own model. Buffers (rotary frequencies) stay float32.
        with _READING:
            self.model: Any = AutoModelForCausalLM.from_pretrained(settings.model, dtype=torch.float32)
        dtype = (
            (self.model.config.dtype or torch.float32) if settings.dtype == "auto" else getattr(torch, settings.dtype)
        )
        for parameter in self.model.parameters():
            parameter.data = parameter.data.to(dtype)
            parameter.requires_grad_(False)
        self.device = find_device(settings.device)
        self.model.eval().to(self.device)
        self.tokenizer: Any = AutoTokenizer.from_pretrained(settings.model)
        ends = self.model.generation_config.eos_token_id
        ends = ends if isinstance(ends, list) else [ends]
        self.end_tokens = frozenset(i for i in [*ends, self.tokenizer.eos_token_id] if i is not None)
        limits = [settings.max_model_len, getattr(self.model.config, "max_position_embeddings", None)]
        self.max_context = min((n for n in limits if n is not None), default=None)
        self.max_len = self.max_context or 1 << 62

    def finish_reason(self, row: Row) -> str | None:
        """Why ``row`` is finished after its last token, ``None`` while it is not."""
        sampling = row.request.sampling
        if row.token_ids[-1] in self.end_tokens:
            return "stop"
        if sampling.stop:
            # A token is at least a byte of text, so the last stop string lies within this many tokens.
            window = max(len(s.encode()) for s in sampling.stop) + 8
            text = self.tokenizer.decode(row.token_ids[-window:], skip_special_tokens=True)
            if any(s in text for s in sampling.stop):
                return "stop"
        total = len(row.request.prompt_token_ids) + len(row.token_ids)
        return "length" if len(row.token_ids) >= sampling.max_tokens or total >= self.max_len else None

    def replace_weights(self, source: WeightSource) -> None:
        """Copy every parameter; checks all of them before it touches one.

        Raises:
            ValueError: a parameter is missing, unknown or of another shape.
        """
        mine = dict(self.model.named_parameters(remove_duplicate=False)) | dict(self.model.named_buffers())
        theirs = dict(source.tensors())
        for name, tensor in theirs.items():
            if name not in mine:
                raise ValueError(f"the weights have {name!r}, which the engine's model has not: is it another model?")
            if mine[name].shape != tensor.shape:
                raise ValueError(f"{name!r} is {tuple(tensor.shape)} in the weights, {tuple(mine[name].shape)} here")
        covered = {id(mine[name]) for name in theirs}  # of tied parameters one name is enough
        if missing := [n for n, p in self.model.named_parameters() if id(p) not in covered]:
            raise ValueError(f"the weights lack {missing[0]!r} and {len(missing) - 1} more of the engine's parameters")
        for name, tensor in theirs.items():
            mine[name].copy_(tensor)


def bind_threads(count: int) -> None:
    """Use ``count`` CPU threads for this thread's tensor operations, and as many as before for everybody else's."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    # The call also sets what threads born later start with; a thread that ends at once puts that back.
    restore = threading.Thread(target=torch.set_num_threads, args=(before,))
    restore.start()
    restore.join()


def find_dtype(settings: WorkerSettings) -> torch.dtype:
    """The dtype of that name; ``"auto"`` is the one the model directory was written in."""
    if settings.dtype == "auto":
        return AutoConfig.from_pretrained(settings.model).dtype or torch.float32
    dtype: torch.dtype = getattr(torch, settings.dtype)
    return dtype


def find_device(device: str) -> torch.device:
    """The device of that name; ``"auto"`` is the first accelerator, or the CPU."""
    if device != "auto":
        return torch.device(device)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator if accelerator is not None else torch.device("cpu")


@dataclass(slots=True)
class _Command:
    """Something to do between two tokens, and who waits for it."""

    function: Callable[[LoadedModel, DecodeBatch], Any]
    future: Future[Any] = field(default_factory=Future)


class TransformersWorker:
    """Decodes what is waiting, one token at a time for all of it; loads weights and scores in between.

    Args:
        settings: Which model, where and how.

    Attributes:
        ready: Gets the model once it is read, or what went wrong.
    """

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        self._wake = threading.Condition()
        self._waiting: deque[Row] = deque()
        self._commands: deque[_Command] = deque()
        self._in_flight: set[Row] = set()  # waiting or running
        self._why_closed = ""
        self._version: int | None = None
        self._busy = BusyClock()
        self._generated = 0
        self._loads = 0
        self._pauses_s = 0.0
        self._recomputes = 0
        self._kv_age = 0
        self.ready: Future[LoadedModel] = Future()
        self._thread = threading.Thread(target=self._run, name=settings.name, daemon=True)
        self._thread.start()

    def submit(self, request: GenerationRequest) -> Future[Generation]:
        """Queue a request. Cancelling the future ends it before the next token.

        Raises:
            EngineError: there are no weights yet, or the engine is closed or dead.
        """
        row = Row(request)
        with self._wake:
            self._check_open()
            if self._version is None:
                raise EngineError(f"engine {self._settings.name} serves nothing before its first load_weights")
            self._waiting.append(row)
            self._in_flight.add(row)
            self._wake.notify()
        return row.outcome

    def load(self, version: int, source: WeightSource) -> Future[None]:
        """Queue a weight load; once it is done every later token is sampled by ``version``."""
        return self._command(lambda model, batch: self._load(model, batch, version, source))

    def score(self, token_ids: tuple[int, ...]) -> Future[list[float]]:
        """Queue the scoring of a sequence."""
        return self._command(lambda model, batch: self._score(model, token_ids))

    def stop(self, timeout_s: float) -> bool:
        """End the thread after the token it is at; whether it ended in time."""
        self._shut(f"engine {self._settings.name} is closed")
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def stats(self) -> EngineStats:
        """Counters since the start."""
        with self._wake:
            return EngineStats(
                self._generated,
                self._busy.read(time.monotonic()),
                self._pauses_s,
                self._loads,
                self._recomputes,
                self._kv_age,
            )

    def _command(self, function: Callable[[LoadedModel, DecodeBatch], T]) -> Future[T]:
        command = _Command(function)
        with self._wake:
            self._check_open()
            self._commands.append(command)
            self._wake.notify()
        return command.future

    def _check_open(self) -> None:
        if self._why_closed:
            raise EngineError(self._why_closed)

    def _shut(self, why: str) -> None:
        with self._wake:
            self._why_closed = self._why_closed or why
            self._wake.notify()

    def _run(self) -> None:
        try:
            if self._settings.threads is not None:
                bind_threads(self._settings.threads)
            model = LoadedModel(self._settings)
            batch = DecodeBatch(model.model, model.device)
            self.ready.set_result(model)
            with torch.inference_mode():
                while self._take_turn(model, batch):
                    pass
        except BaseException as error:
            self._shut(f"engine {self._settings.name} died: {type(error).__name__}: {error}")
            if not self.ready.done():
                self.ready.set_exception(error)
        finally:
            self._fail_the_rest()

    def _take_turn(self, model: LoadedModel, batch: DecodeBatch) -> bool:
        """Do what was asked, then sample a token for every row; False when the engine is closed."""
        with self._wake:
            while not (self._commands or self._waiting or batch.rows or self._why_closed):
                self._wake.wait()
            commands = [self._commands.popleft() for _ in range(len(self._commands))]
        for command in commands:
            if command.future.set_running_or_notify_cancel():
                try:
                    command.future.set_result(command.function(model, batch))
                except Exception as error:
                    command.future.set_exception(error)
        if self._why_closed:
            return False
        self._drop_cancelled(batch)
        if fresh := self._admit(batch):
            self._sampled(model, batch, lambda version: batch.add(fresh, version))
        if batch.rows:
            self._sampled(model, batch, batch.step)
        return True

    def _admit(self, batch: DecodeBatch) -> list[Row]:
        limit = self._settings.max_batch if batch.joinable or not batch.rows else 0
        fresh: list[Row] = []
        prompts: set[tuple[int, ...]] = set()
        with self._wake:
            while self._waiting and len(batch.rows) + len(fresh) < limit:
                prompts.add(self._waiting[0].request.prompt_token_ids)
                if fresh and sum(map(len, prompts)) > MAX_CONTEXT_TOKENS_AT_ONCE:
                    break
                row = self._waiting.popleft()
                if row.outcome.cancelled():
                    self._in_flight.discard(row)
                else:
                    fresh.append(row)
                    self._busy.enter(time.monotonic())
        return fresh

    def _sampled(self, model: LoadedModel, batch: DecodeBatch, sample: Callable[[int], int]) -> None:
        """Sample with the served version, then hand out what is finished."""
        assert self._version is not None
        count = sample(self._version)
        with self._wake:
            self._generated += count
        kept = []
        for i, row in enumerate(batch.rows):
            if reason := model.finish_reason(row):
                self._leave(row)
                if row.outcome.set_running_or_notify_cancel():
                    row.outcome.set_result(row.generation(reason))
            else:
                kept.append(i)
        batch.keep(kept)

    def _drop_cancelled(self, batch: DecodeBatch) -> None:
        kept = []
        for i, row in enumerate(batch.rows):
            if row.outcome.cancelled():
                self._leave(row)
            else:
                kept.append(i)
        batch.keep(kept)

    def _leave(self, row: Row) -> None:
        with self._wake:
            self._in_flight.discard(row)
            self._busy.leave(time.monotonic())

    def _load(self, model: LoadedModel, batch: DecodeBatch, version: int, source: WeightSource) -> None:
        started_s = time.monotonic()
        try:
            model.replace_weights(source)
        except Exception as error:
            self._shut(f"engine {self._settings.name}: the load of version {version} failed: {error}")
            raise EngineError(self._why_closed) from error
        with self._wake:
            self._version = version
            self._loads += 1
            self._pauses_s += time.monotonic() - started_s
        oldest = min((row.kv_version for row in batch.rows), default=version)
        recompute = self._settings.kv_max_age is not None and version - oldest > self._settings.kv_max_age
        with self._wake:
            self._recomputes += recompute
            self._kv_age = 0 if recompute else version - oldest
        if recompute:
            rows = batch.clear()
            self._sampled(model, batch, lambda version: batch.add(rows, version))

    def _score(self, model: LoadedModel, token_ids: tuple[int, ...]) -> list[float]:
        if self._version is None:
            raise EngineError(f"engine {self._settings.name} serves nothing before its first load_weights")
        ids = torch.tensor([token_ids], device=model.device)
        logprobs = model.model(input_ids=ids).logits[0, :-1].float().log_softmax(-1)
        scores: list[float] = logprobs.gather(-1, ids[0, 1:, None]).squeeze(-1).tolist()
        return scores

    def _fail_the_rest(self) -> None:
        with self._wake:
            futures: list[Future[Any]] = [row.outcome for row in self._in_flight]
            futures += [command.future for command in self._commands]
            self._in_flight.clear()
            self._waiting.clear()
            self._commands.clear()
        for future in futures:
            if future.set_running_or_notify_cancel():
                future.set_exception(EngineError(self._why_closed))
