"""A model from the Hugging Face hub, fetched into that library's own cache."""

from __future__ import annotations

from pathlib import Path

from nanofw.errors import CheckpointError

_PLAIN = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")


def fetch(name: str, *, trust_remote_code: bool, allow_pickle: bool) -> Path:
    """Fetch what is needed of `org/name`: config, tokenizer and weights, and code or pickles only if allowed.

    Without a network, what was fetched before is used. Raises CheckpointError if there is nothing.
    """
    from huggingface_hub import snapshot_download

    patterns = [*_PLAIN, *(("*.py",) if trust_remote_code else ()), *(("*.bin",) if allow_pickle else ())]
    # "/" keeps out copies in subfolders (onnx/, original/), "consolidated" those of Mistral's own format
    ignore = ["*/*", "consolidated*"]
    try:
        return Path(snapshot_download(name, allow_patterns=patterns, ignore_patterns=ignore))
    except Exception as error:  # a dozen kinds of network and repository errors
        lines = str(error).splitlines()
        reason = lines[0] if lines else type(error).__name__
        raise CheckpointError(
            f"cannot fetch model {name!r} from the Hugging Face hub: {reason.rstrip('.')}; check the name, the "
            "network, and the access token of a closed model"
        ) from error
