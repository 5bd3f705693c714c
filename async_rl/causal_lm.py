"""CausalLMScorer: log-probabilities of packed tokens under any Hugging Face causal language model."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from async_rl.algorithms.logprobs import token_logprobs
from async_rl.packing import MicroBatch, PackingSettings, ScoredSequence, pack

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)

ATTENTION_SLOWDOWN = 4.0
"""How much slower a FLOP of attention is than one of a matrix product (measured with SmolLM2-135M on a CPU)."""


def load_causal_lm(directory: str | Path) -> PreTrainedModel:
    """Load a model directory with float32 weights, as mixed precision training needs them.

    Raises:
        FileNotFoundError: the directory has no ``config.json``.
    """
    from transformers import AutoModelForCausalLM

    if not (Path(directory) / "config.json").is_file():
        raise FileNotFoundError(f"PolicyModule: model={str(directory)!r} has no config.json; give a model directory")
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)


def disable_dropout(model: nn.Module) -> None:
    """Set every dropout probability to 0.

    The engine that sampled has no dropout; with it, behaviour and current log-probabilities of the same weights
    would differ.
    """
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name, value in vars(module).items():
            if "dropout" in name and isinstance(value, float):
                setattr(module, name, 0.0)


def unique_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and persistent buffers under their Hugging Face names, tied ones once, detached."""
    seen: set[tuple[int, torch.Size, tuple[int, ...]]] = set()
    for name, tensor in model.state_dict().items():
        key = (tensor.data_ptr(), tensor.shape, tensor.stride())
        if tensor.numel() and key in seen:
            continue
        seen.add(key)
        yield name, tensor


class CausalLMScorer:
    """Scores tokens with a causal LM: packs, runs the model, takes logits only where a token is predicted.

    Args:
        model: A Hugging Face causal LM; its attention implementation may be switched here.
        share_prefixes: Compute common beginnings once: where the model can (``"auto"``), always, or never.
        micro_batch_tokens: Most tokens of a forward pass, padding included.

    Raises:
        ValueError: ``share_prefixes=True`` with a model that can't; the message says why.
    """

    def __init__(self, model: PreTrainedModel, share_prefixes: Literal["auto"] | bool, micro_batch_tokens: int) -> None:
        self._model = model
        if getattr(model.config.get_text_config(), "attn_logit_softcapping", None):
            model.set_attn_implementation("eager")  # sdpa leaves the soft-cap out; the engine does not
        self.packing = PackingSettings(micro_batch_tokens, bool(share_prefixes), _attention_width(model))
        if share_prefixes and (obstacle := self._obstacle_to_sharing()):
            if share_prefixes is not True:
                log.info("prompts are not shared between samples: %s", obstacle)
                self.packing = PackingSettings(micro_batch_tokens, False, self.packing.attention_width)
            else:
                raise ValueError(f'share_prefix=True: {obstacle}; use share_prefix="auto" or false')

    def pack(self, sequences: list[ScoredSequence]) -> list[MicroBatch]:
        """Micro-batches for :meth:`score`, on the CPU."""
        return pack(sequences, self.packing)

    def score(self, batch: MicroBatch, temperature: float) -> tuple[Tensor, Tensor]:
        """Log-probabilities of a micro-batch's tokens.

        Args:
            batch: On the model's device.
            temperature: Of the sampling, > 0.

        Returns:
            Log-probabilities with gradient, and entropies of the distributions without, float32 ``[tokens]`` each.
        """
        inputs: dict[str, Any] = {"input_ids": batch.input_ids, "use_cache": False}
        if batch.visible is not None:
            inputs |= {"position_ids": batch.position_ids, "attention_mask": self._attention_mask(batch.visible)}
        with _logits_only_at(self._model, batch.predictors):
            logits = self._model(**inputs).logits
        logits = logits.flatten(0, -2)
        if len(logits) != len(batch.predictors):  # the head is no module of its own
            logits = logits.index_select(0, batch.predictors)
        logprobs, entropy = token_logprobs(logits, batch.predictor, batch.targets, temperature)
        return logprobs, entropy[batch.predictor]

    def _attention_mask(self, visible: Tensor) -> Tensor:
        if self._model.config._attn_implementation != "eager":
            return visible
        device = visible.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else self._model.dtype
        return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(
            ~visible, torch.finfo(dtype).min
        )

    def _obstacle_to_sharing(self) -> str:
        """Why several sequences can't share a row, or "" where they can; the last word has a comparison."""
        model = self._model
        config = model.config.get_text_config()
        if (attention := model.config._attn_implementation) not in ("sdpa", "eager"):
            return f"attention implementation {attention!r} takes no mask of our own"
        if other := sorted(set(getattr(config, "layer_types", None) or ()) - {"full_attention"}):
            return f"{type(model).__name__} has {other[0]} layers"
        if getattr(config, "sliding_window", None) or getattr(config, "attention_chunk_size", None):
            return f"{type(model).__name__} has windowed attention"
        if getattr(model, "_is_stateful", False):
            return f"{type(model).__name__} is recurrent"
        if "position_ids" not in inspect.signature(model.forward).parameters:
            return f"{type(model).__name__} takes no position_ids"
        difference, allowed = self._sharing_error(), 1e-3 if model.dtype == torch.float32 else 0.25
        if not difference <= allowed:
            return f"log-probabilities of {type(model).__name__} change by {difference:.3g} when a prefix is shared"
        return ""

    @torch.no_grad()
    def _sharing_error(self) -> float:
        """Largest difference of log-probabilities between sequences that share a beginning and the same apart."""
        vocabulary = self._model.config.get_text_config().vocab_size
        ids = [(7919 * i + 13) % vocabulary for i in range(12)]
        examples = [
            ScoredSequence(ids[:4] + tail, range(1, 4 + len(tail)), first)
            for tail, first in ((ids[4:8], 0), (ids[8:11], 7), (ids[4:6] + ids[10:12], 13))
        ]
        scores = []
        for share in (True, False):
            (batch,) = pack(examples, PackingSettings(1000, share, 1e9))
            logprobs, _ = self.score(batch.to(self._model.device), 1.0)
            scores.append(torch.empty_like(logprobs).index_copy_(0, batch.tokens.to(logprobs.device), logprobs))
        return float((scores[0] - scores[1]).abs().max())


@contextmanager
def _logits_only_at(model: PreTrainedModel, places: Tensor) -> Iterator[None]:
    """Let the model's own head, scaling and soft-capping run, but on these flat places of the hidden states only."""
    head = model.get_output_embeddings()
    if head is None:
        yield
        return

    def select(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (args[0].flatten(0, 1).index_select(0, places).unsqueeze(0), *args[1:])

    handle = head.register_forward_pre_hook(select)
    try:
        yield
    finally:
        handle.remove()


def _attention_width(model: PreTrainedModel) -> float:
    """Row width in tokens at which attention takes as long as the rest of the model: 2 N / (4 d L), slowed down."""
    config = model.config.get_text_config()
    embeddings = {
        id(p) for m in (model.get_input_embeddings(), model.get_output_embeddings()) if m for p in m.parameters()
    }
    weights = sum(p.numel() for p in model.parameters() if id(p) not in embeddings)
    return max(weights / (2 * config.hidden_size * config.num_hidden_layers) / ATTENTION_SLOWDOWN, 1.0)
