"""From settings to an engine: what cannot work together is refused when it is built, with every reason."""

import pytest
import torch

from nanofw import Attention, Capabilities, Config, PluginHost, Runner, SamplingParams
from nanofw.build import build_engine, build_model, resolve_device, resolve_dtype
from nanofw.errors import CheckpointError, ConfigError, PluginError
from nanofw.testing.audited import host_with
from nanofw.testing.null import NullModel, NullSource
from nanofw.weights import resolve
from nanofw_basics.eager import EagerRunner
from nanofw_basics.paged_cache import PagedKVCache


@pytest.fixture
def build(host):
    """An engine with the null model: `build(host, **settings)`."""

    def run(with_host=None, **settings):
        source = NullSource()
        given = {"device": "cpu", "kv_blocks": 16} | settings
        return build_engine(Config.build(given), with_host or host, source, NullModel(source))

    return run


class Particular(Attention):
    capabilities = Capabilities(
        dtypes=(torch.float16, torch.bfloat16), devices=("cuda",), head_sizes=(64, 128), block_sizes=(32,)
    )

    def attend(self, q, kv, batch):
        return q


def test_an_attention_names_every_reason(build):
    with pytest.raises(PluginError) as caught:
        build(host_with("attention", Particular), attention="under-test")
    message = str(caught.value)
    assert message.startswith(
        "attention \"under-test\" (of (registered directly)) cannot serve model 'smollm2' on cpu:"
    )
    for reason in (
        "no dtype float32 (it takes float16, bfloat16)",
        "no device cpu (it takes cuda)",
        "no head size 1 (it takes 64, 128)",
        "no block size 16 (it takes 32)",
    ):
        assert reason in message


@pytest.mark.parametrize(
    ("name", "reason"),
    [("dummy:gemma-tiny", "no sliding windows; no capped scores"), ("dummy:llama-tiny", "no grouped-query attention")],
)
def test_an_attention_that_cannot_serve_the_model(llm, name, reason):
    """A window, a cap, shared key/value heads: refused by name, never ignored."""

    class Plain(Attention):
        capabilities = Capabilities(gqa="gemma" in name)

        def attend(self, q, kv, batch):
            return q

    with pytest.raises(PluginError, match=rf"cannot serve model '{name}' on cpu: .*{reason}"):
        llm(name, host=host_with("attention", Plain), attention="under-test")


def test_an_attention_that_does_not_know_the_layout(build):
    """A layout is named, never guessed from a shape."""
    host = host_with("kv_cache", type("Other", (PagedKVCache,), {"layout": "paged-hnd"}))
    with pytest.raises(PluginError, match=r"it has no cache layout paged-hnd \(it takes paged-nhd\)"):
        build(host, kv_cache="under-test")


def test_a_runner_that_cannot_run_the_others(build):
    class Fussy(EagerRunner):
        @classmethod
        def validate(cls, parts):
            return [f"attention {type(parts.attention).__name__}", "rows above 8"]

    with pytest.raises(PluginError, match=r"cannot serve these plugins together: it has no attention Naive.*; no rows"):
        build(host_with("runner", Fussy), runner="under-test", attention="naive-gather")


@pytest.mark.parametrize("kind", ["attention", "kv_cache", "scheduler", "runner", "sampler"])
def test_a_name_that_nobody_has(build, host, kind):
    known = getattr(Config(), kind)
    with pytest.raises(
        PluginError, match=rf"no {kind} named '{known}x' \(did you mean '{known}'\?\); available: .*{known}"
    ):
        build(**{kind: f"{known}x"})


def test_options_reach_their_plugin(build):
    assert build(options={"kv_cache": {"block_size": "4"}}).kv_cache.block_size == 4
    with pytest.raises(
        ConfigError, match=r"kv_cache 'paged' has no option 'block_sise' \(did you mean 'block_size'\?\)"
    ):
        build(options={"kv_cache": {"block_sise": 4}})
    with pytest.raises(ConfigError, match="kv_cache 'paged': option 'block_size' must be an integer, got 'x'"):
        build(options={"kv_cache": {"block_size": "x"}})
    with pytest.raises(ConfigError, match="scheduler 'continuous' has no option 'block_size'"):
        build(options={"scheduler": {"block_size": 4}})


def test_a_length_beyond_the_models_positions(build):
    assert build(max_model_len=2048).max_model_len == 2048
    with pytest.raises(ConfigError, match="max_model_len=2049 exceeds the 2048 positions of smollm2"):
        build(max_model_len=2049)


@pytest.mark.parametrize("name", ["nosuch", "cuda:99"])
def test_a_device_that_is_not_there(name):
    with pytest.raises(ConfigError, match=f"device '{name}' cannot be used here: .*; use 'cpu' or 'auto'"):
        resolve_device(name)


def test_auto_takes_what_is_there(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert resolve_device("auto") == torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto") == torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "device", "expected"),
    [
        ("auto", "cpu", torch.float32),
        ("auto", "cuda", torch.bfloat16),
        ("float16", "cpu", torch.float16),
        ("float32", "cuda", torch.float32),
    ],
)
def test_dtypes(name, device, expected):
    """ "auto" is the checkpoint's on a GPU, and float32 on a CPU, where half precision is slow."""
    source = NullSource()
    half = type("Half", (NullSource,), {"dtype": torch.bfloat16})()
    assert resolve_dtype(name, torch.device(device), half) == expected
    assert resolve_dtype("auto", torch.device(device), source) == torch.float32


def test_a_model_that_is_not_there():
    with pytest.raises(CheckpointError, match=r"no model 'dummy:tinny' \(did you mean 'dummy:tiny'\?\)"):
        resolve("dummy:tinny")


def test_two_engines_share_a_loaded_model(host):
    """Side by side in one process, with different plugins: the weights are there once, the caches twice."""
    source = resolve("dummy:tiny")
    config = Config(model="dummy:tiny", device="cpu", kv_blocks=8)
    model = build_model(config, host, source)
    one = build_engine(config, host, source, model)
    other = build_engine(config.replace(attention="naive-gather"), host, source, model)
    assert one.runner.parts.model is other.runner.parts.model is model
    assert one.kv_cache is not other.kv_cache
    for engine in (one, other):
        engine.add("x", [1, 2, 3], SamplingParams(temperature=0, max_tokens=5, ignore_eos=True))
    found = [[list(o.outputs[0].token_ids) for o in engine.run() if o.finished] for engine in (one, other)]
    assert found[0] == found[1]


def test_a_runner_is_warm_before_the_first_step(build):
    calls = []

    class Warms(EagerRunner):
        def warm_up(self):
            calls.append("warm")

        def submit(self, step):
            calls.append("step")
            return super().submit(step)

    engine = build(host_with("runner", Warms), runner="under-test")
    assert calls == ["warm"]
    engine.add("x", [1], SamplingParams(max_tokens=1))
    engine.step()
    assert calls == ["warm", "step"]


def test_a_component_of_the_wrong_kind():
    host = PluginHost.load(only=("basics", "gather"))
    with pytest.raises(PluginError, match=r"no runner named 'continuous'"):
        host.get("runner", "continuous")
    assert issubclass(host.get("runner", "eager").load(), Runner)
