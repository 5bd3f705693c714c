"""Turns the model a user names into a plain Hugging Face directory that engine and trainer both load."""

from __future__ import annotations

import os
import shutil
import string
import tempfile
from collections.abc import Callable
from pathlib import Path

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def build_tiny_model(directory: str | os.PathLike[str], seed: int = 0) -> Path:
    """Write a Llama of about 1M random parameters and a character tokenizer as a Hugging Face directory.

    The tokenizer has one token for each printable ASCII character and the newline; anything else becomes
    ``<|endoftext|>``. Weights are float32, embeddings are tied, the chat template is ChatML. The same seed gives the
    same bytes, and the global random state is left alone.

    Args:
        directory: Where to write; created when missing.
        seed: Seed of the random weights.

    Returns:
        The directory.
    """
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    characters = [*SPECIAL_TOKENS, "\n", *(c for c in string.printable if c.isprintable())]
    backend = Tokenizer(models.WordLevel({c: i for i, c in enumerate(characters)}, unk_token=SPECIAL_TOKENS[0]))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    unk, bos, eos = SPECIAL_TOKENS
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=bos, eos_token=eos, pad_token=eos, unk_token=unk, model_max_length=4096
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    config = LlamaConfig(
        vocab_size=len(characters),
        hidden_size=128,
        intermediate_size=448,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).float()
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def write_once(directory: Path, build: Callable[[Path], object]) -> Path:
    """Build a directory aside and rename it into place, so that it is complete or absent.

    Several processes may build at once; the first to finish wins and the others take its result.

    Args:
        directory: Where the result shall be.
        build: Fills the empty directory it is given.

    Returns:
        ``directory``.
    """
    if directory.is_dir():
        return directory
    directory.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    try:
        build(aside)
        aside.chmod(0o755)
        try:
            aside.rename(directory)
        except OSError:
            if not directory.is_dir():
                raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return directory
