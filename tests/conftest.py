"""What several test files share: loaded plugins, loaded dummy models, and a byte-level tokenizer."""

import functools
import os
import types

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before any kernel is defined
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from nanofw import LLM, PluginHost
from nanofw.build import build_model
from nanofw.config import Config
from nanofw.engine import Engine
from nanofw.measure import sweep
from nanofw.weights import resolve


@functools.cache
def plain_host():
    return PluginHost.load(only=("basics", "gather"))


@functools.cache
def loaded(name):
    """A dummy model's source and the model itself, in float32 on the CPU, loaded once for all tests."""
    source = resolve(name)
    return source, build_model(Config(model=name, device="cpu", dtype="float32"), plain_host(), source)


def make_llm(name="dummy:tiny", **settings):
    """An engine of its own over a model that is loaded once."""
    source, model = loaded(name)
    settings = {"device": "cpu", "dtype": "float32", "kv_blocks": 256, "max_num_seqs": 64} | settings
    return LLM(name, host=settings.pop("host", plain_host()), source=source, loaded=model, **settings)


@pytest.fixture(scope="session")
def host():
    """The plain plugins."""
    return plain_host()


@pytest.fixture(scope="session")
def llm():
    """`make_llm`."""
    return make_llm


@pytest.fixture(scope="session")
def module_of():
    """A dummy model as plain transformers, with the same weights."""

    @functools.cache
    def load(name):
        source, _ = loaded(name)
        return source.load_module(torch.float32, torch.device("cpu"), "eager")

    return load


@pytest.fixture(scope="session")
def byte_tokenizer():
    """Byte-level BPE without merges: every token is one byte, so each accent, CJK sign and emoji is split."""
    alphabet = sorted(ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={sign: i for i, sign in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


@pytest.fixture
def clock(monkeypatch):
    """The clock that sweeps read, moved by engines: a step takes 1 s, and 10 ms for each token it computes."""
    clock = types.SimpleNamespace(now=100.0)
    collect = Engine._collect

    def slow(engine, flight):
        clock.now += 1 + 0.01 * flight.step.num_tokens
        return collect(engine, flight)

    monkeypatch.setattr(Engine, "_collect", slow)
    monkeypatch.setattr(sweep, "time", types.SimpleNamespace(perf_counter=lambda: clock.now))
    return clock
