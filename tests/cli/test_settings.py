"""The shared options: what they set, and who wins."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from nanofw.cli.settings import SHARED, Settings, with_settings
from nanofw.config import Config
from nanofw.errors import ConfigError

Resolve = Callable[..., Config]


@pytest.fixture
def resolve() -> Resolve:
    """The `Config` that a command gets for some arguments."""
    seen: list[Config] = []
    app = typer.Typer()

    @app.command()
    @with_settings()
    def command(settings: Settings) -> None:
        seen.append(settings.resolve())

    def run(*args: str) -> Config:
        result = CliRunner().invoke(app, list(args))
        if result.exception and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert result.exit_code == 0, result.output
        return seen.pop()

    return run


def test_nothing_given_is_the_defaults(resolve: Resolve) -> None:
    assert resolve() == Config()


def test_every_option_sets_its_field(resolve: Resolve) -> None:
    values: dict[str, Any] = {
        "attention": "a",
        "kv_cache": "k",
        "scheduler": "s",
        "runner": "r",
        "model_impl": "i",
        "sampler": "p",
        "model": "m",
        "device": "cpu",
        "dtype": "bfloat16",
        "max_model_len": 11,
        "max_num_seqs": 12,
        "max_batch_tokens": 13,
        "kv_memory": "1GiB",
        "steps_in_flight": 1,
        "seed": 14,
        "strict": True,
        "trust_remote_code": True,
        "allow_pickle": True,
    }
    args: list[str] = []
    for name, value in values.items():
        flag = f"--{name.replace('_', '-')}"
        args += [flag] if value is True else [flag, str(value)]
    config = resolve(*args, "--no-plugin", "x", "--no-plugin", "y", "--option", "kv_cache.block_size=8")
    expected = values | {"disable": ("x", "y"), "options": {"kv_cache": {"block_size": "8"}}}
    assert config == Config(**expected)
    untested = {s.name for s in SHARED} - set(expected) - {"config", "kv_blocks"}
    assert not untested
    assert resolve("--kv-blocks", "3").kv_blocks == 3


def test_command_line_over_environment_over_file(resolve: Resolve, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("nanofw.toml").write_text('attention = "file"\nscheduler = "file"\nrunner = "file"\nmax_num_seqs = 7\n')
    monkeypatch.setenv("NANOFW_SCHEDULER", "environment")
    monkeypatch.setenv("NANOFW_RUNNER", "environment")
    config = resolve("--runner", "line")
    assert (config.attention, config.scheduler, config.runner) == ("file", "environment", "line")
    assert config.max_num_seqs == 7


def test_a_flag_that_is_not_given_leaves_the_file_alone(resolve: Resolve) -> None:
    Path("nanofw.toml").write_text("strict = true\nsteps_in_flight = 1\nseed = 5\n")
    config = resolve()
    assert (config.strict, config.steps_in_flight, config.seed) == (True, 1, 5)
    assert resolve("--steps-in-flight", "0", "--seed", "0").steps_in_flight == 0


def test_named_config_file(resolve: Resolve) -> None:
    Path("other.toml").write_text('model = "named"\n')
    assert resolve("--config", "other.toml").model == "named"
    with pytest.raises(ConfigError, match=r"cannot read config file missing\.toml"):
        resolve("--config", "missing.toml")


def test_options_of_all_sources_are_merged_by_key(resolve: Resolve) -> None:
    Path("nanofw.toml").write_text("[options.kv_cache]\nblock_size = 4\nother = 1\n")
    config = resolve("--option", "kv_cache.block_size=8", "--option", "runner.buckets=2")
    assert config.options == {"kv_cache": {"block_size": "8", "other": 1}, "runner": {"buckets": "2"}}


@pytest.mark.parametrize("text", ["block_size=8", "kv_cache.block_size", "nosuch.key=1"])
def test_bad_option(resolve: Resolve, text: str) -> None:
    with pytest.raises(ConfigError):
        resolve("--option", text)


def test_merged_puts_defaults_of_a_command_below_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NANOFW_RUNNER", "environment")
    merged = Settings({"model": "line"}, None).merged({"model": "own", "runner": "own", "attention": "own"})
    assert merged == {"model": "line", "runner": "environment", "attention": "own", "options": {}}


def test_misspelt_variable_is_one_line(nanofw: Any) -> None:
    ran = nanofw("plugins", NANOFW_ATENTION="naive-gather")
    assert "did you mean 'NANOFW_ATTENTION'?" in ran.error_line
