"""The folder for what nanofw keeps between runs: pulled models, the bandwidth of this machine."""

from __future__ import annotations

import os
from pathlib import Path

from nanofw.errors import ConfigError


def cache_folder() -> Path:
    """`NANOFW_CACHE`, else nanofw's place in the user's cache. Raises ConfigError if unknown."""
    if chosen := os.environ.get("NANOFW_CACHE"):
        return Path(chosen)
    try:
        import platformdirs
    except ImportError as error:
        raise ConfigError("platformdirs, which knows the user's cache, is missing: set NANOFW_CACHE") from error
    return Path(platformdirs.user_cache_dir("nanofw"))
