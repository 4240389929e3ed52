"""Settings, and where they come from: command line > `NANOFW_*` environment > config file > defaults.

The config file is `--config FILE`, else `nanofw.toml`, else the table `[tool.nanofw]` of `pyproject.toml`, the last two
looked for in the working directory. Keys are the fields of `Config`; options of a plugin go under `[options.KIND]`:

    attention = "vectorized-gather"
    disable = ["some-plugin"]

    [options.kv_cache]
    block_size = 32
"""

from __future__ import annotations

import dataclasses
import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_type_hints

from nanofw.component import KINDS
from nanofw.errors import ConfigError
from nanofw.options import convert, describe, listing, suggest

Depth = Literal[0, 1]
CACHE_SIZES = ("kv_blocks", "kv_memory")


@dataclass(frozen=True, slots=True)
class Config:
    """Everything a user can set for an engine.

    Attributes:
        model: a local transformers folder, a hub id, `smollm2`, or `dummy:NAME`.
        model_impl, attention, kv_cache, scheduler, runner, sampler: which plugin serves each kind.
        device: "auto" is "cuda" where there is one, else "cpu".
        dtype: "auto" is float32 on a CPU, where half precision is slow, else the checkpoint's.
        max_model_len: most tokens a request may reach; None takes the model's length, less if the cache holds less.
        max_num_seqs: most requests running at once.
        max_batch_tokens: most tokens in a step.
        kv_blocks: blocks of the KV cache.
        kv_memory: its size instead, e.g. "2GiB". With neither set it takes a share of the free memory.
        steps_in_flight: 0 waits for each step's tokens; 1 plans and starts the next step first.
        seed: of requests that bring none.
        trust_remote_code, allow_pickle: off unless asked for by name; both run code that comes with a checkpoint.
        options: plugin options by kind.
        disable: plugins to block before import, by entry-point name.
        plugins: if set, block all others.
        strict: a plugin that fails to load is an error.
    """

    model: str = "smollm2"
    model_impl: str = "transformers"
    attention: str = "vectorized-gather"
    kv_cache: str = "paged"
    scheduler: str = "continuous"
    runner: str = "eager"
    sampler: str = "default"
    device: str = "auto"
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_batch_tokens: int = 2048
    kv_blocks: int | None = None
    kv_memory: str | None = None
    steps_in_flight: Depth = 0
    seed: int = 0
    trust_remote_code: bool = False
    allow_pickle: bool = False
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    disable: tuple[str, ...] = ()
    plugins: tuple[str, ...] | None = None
    strict: bool = False

    def __post_init__(self) -> None:
        """Raises: ConfigError for a value out of range."""
        for name in ("max_model_len", "max_num_seqs", "max_batch_tokens", "kv_blocks"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")
        if self.kv_blocks is not None and self.kv_memory is not None:
            raise ConfigError("kv_blocks and kv_memory both set the size of the KV cache: give one of them")
        if self.kv_memory is not None:
            parse_bytes(self.kv_memory)
        for kind in self.options:
            if kind not in KINDS:
                raise ConfigError(f"options.{kind}: no such kind of plugin{suggest(kind, KINDS)}; {listing(KINDS)}")

    @classmethod
    def build(cls, *layers: Mapping[str, Any]) -> Config:
        """Merge layers of settings, later ones winning; unset (None) values and `options` are merged key by key.

        The size of the KV cache is one setting with two units: a later `kv_blocks` replaces `kv_memory`, and back.

        Raises: ConfigError for an unknown key or a wrong type.
        """
        merged: dict[str, Any] = {}
        options: dict[str, dict[str, Any]] = {}
        hints, known = get_type_hints(cls), [f.name for f in dataclasses.fields(cls)]
        for layer in layers:
            if _sizes_cache(layer):
                merged = {key: value for key, value in merged.items() if key not in CACHE_SIZES}
            for key, value in layer.items():
                if key not in known:
                    raise ConfigError(f"no setting {key!r}{suggest(key, known)}; settings are {listing(known)}")
                if value is None:
                    continue
                if key == "options":
                    for kind, table in _tables(value).items():
                        options.setdefault(kind, {}).update(table)
                else:
                    merged[key] = convert(value, hints[key], f"setting {key!r}")
        return cls(**merged, options=options)

    @classmethod
    def resolve(
        cls,
        given: Mapping[str, Any],
        *,
        file: str | os.PathLike[str] | None = None,
        directory: str | os.PathLike[str] = ".",
        environ: Mapping[str, str] | None = None,
    ) -> Config:
        """The settings of a run: `given` (the command line) over environment over file over defaults."""
        environ = os.environ if environ is None else environ
        return cls.build(read_file(file, directory, environ), read_environment(environ), given)

    def replace(self, **changes: Any) -> Config:
        """A copy with some settings changed."""
        unset: dict[str, Any] = dict.fromkeys(CACHE_SIZES) if _sizes_cache(changes) else {}
        return dataclasses.replace(self, **unset | changes)


def read_file(
    file: str | os.PathLike[str] | None, directory: str | os.PathLike[str], environ: Mapping[str, str]
) -> Mapping[str, Any]:
    """Settings of the config file, or none if there is no file. Raises ConfigError if it cannot be read."""
    chosen = file or environ.get("NANOFW_CONFIG")
    if chosen:
        return _read_toml(Path(chosen), nested=Path(chosen).name == "pyproject.toml")
    own, project = Path(directory, "nanofw.toml"), Path(directory, "pyproject.toml")
    if own.is_file():
        return _read_toml(own, nested=False)
    return _read_toml(project, nested=True) if project.is_file() else {}


def read_environment(environ: Mapping[str, str]) -> Mapping[str, Any]:
    """Settings from `NANOFW_*` variables, named after the fields of `Config`. Raises ConfigError for an unknown one."""
    known = [f.name for f in dataclasses.fields(Config) if f.name != "options"]
    found = {}
    for variable, value in environ.items():
        key = variable.removeprefix("NANOFW_").lower()
        if not variable.startswith("NANOFW_") or key in ("config", "cache"):
            continue
        if key not in known:
            variables = [f"NANOFW_{k.upper()}" for k in [*known, "config", "cache"]]
            raise ConfigError(f"no variable {variable}{suggest(variable, variables)}; known are {listing(variables)}")
        if value:
            found[key] = value
    return found


def parse_option(text: str) -> dict[str, dict[str, Any]]:
    """Read `kind.key=value`. Raises ConfigError if it has another form."""
    if match := re.fullmatch(r"(\w+)\.(\w+)=(.*)", text):
        kind, key, value = match.groups()
        return {kind: {key: value}}
    raise ConfigError(f"an option has the form KIND.KEY=VALUE, e.g. kv_cache.block_size=32; got {text!r}")


def merge_options(texts: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Several `kind.key=value` texts as one set of options."""
    merged: dict[str, dict[str, Any]] = {}
    for text in texts:
        for kind, table in parse_option(text).items():
            merged.setdefault(kind, {}).update(table)
    return merged


def parse_bytes(text: str) -> int:
    """Read "2GiB", "512 MiB", "1.5GB" or a plain number of bytes. Raises ConfigError for anything else."""
    units = {"": 1, "b": 1}
    for power, letter in enumerate("kmgt", start=1):
        units |= {f"{letter}ib": 1024**power, letter: 1024**power, f"{letter}b": 1000**power}
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", text.lower())
    if match and match[2] in units and float(match[1]) > 0:
        return int(float(match[1]) * units[match[2]])
    raise ConfigError(f"{text!r} is no amount of memory; write e.g. 512MiB or 2GiB")


def _sizes_cache(layer: Mapping[str, Any]) -> bool:
    return any(layer.get(key) is not None for key in CACHE_SIZES)


def _tables(value: Any) -> Mapping[str, Mapping[str, Any]]:
    if isinstance(value, Mapping) and all(isinstance(table, Mapping) for table in value.values()):
        return value
    raise ConfigError(f"'options' must be tables of options by kind, got {describe(type(value))} {value!r}")


def _read_toml(path: Path, *, nested: bool) -> Mapping[str, Any]:
    try:
        with path.open("rb") as handle:
            found = tomllib.load(handle)
    except OSError as error:
        raise ConfigError(f"cannot read config file {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {path} is not valid TOML: {error}") from error
    table: Any = found.get("tool", {}).get("nanofw", {}) if nested else found
    try:
        Config.build(table)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    return table  # type: ignore[no-any-return]
