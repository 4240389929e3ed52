"""The example in each hook's docstring is a whole plugin module, and does what the hook is for."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable
from types import ModuleType

import pytest

from nanofw import LLM, PluginHost, SamplingParams, hookspecs
from nanofw.component import KINDS
from nanofw.plugins import kind_of

HOOKS = [name for name in vars(hookspecs) if name.startswith("nanofw_")]
PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6], [5, 3, 5, 8, 9, 7, 9]]


def example(hook: str) -> str:
    """The literal block of a hook's docstring."""
    section = inspect.getdoc(getattr(hookspecs, hook)).partition("\nExample:\n")[2]
    intro, _, code = textwrap.dedent(section).partition("::\n")
    assert intro, f"{hook} has no example"
    return textwrap.dedent(code).lstrip()


def with_example(hook: str) -> PluginHost:
    """The plain plugins and the example's module."""
    module = ModuleType(f"example_of_{hook}")
    exec(compile(example(hook), f"<example of {hook}>", "exec"), vars(module))
    host = PluginHost.load(only=("basics", "gather"))
    host.register(module, "example")
    return host


def tokens(llm: LLM) -> list[tuple[int, ...]]:
    """What it generates."""
    params = SamplingParams(max_tokens=6, seed=7, ignore_eos=True)
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params)]


@pytest.mark.parametrize("kind", KINDS)
def test_registered_by_the_example(kind: str, llm: Callable[..., LLM]) -> None:
    """It is selected by its name, an engine runs it, and but for the model tokens are those of the plain plugins."""
    host = with_example(f"nanofw_register_{kind}")
    (mine,) = [status for status in host.statuses() if status.plugin == "example"]
    assert (mine.kind, mine.status) == (kind, "ok")
    if kind == "model":
        settings = {"device": "cpu", "dtype": "float32", "kv_blocks": 64, "max_num_seqs": 4}
        found = LLM("dummy:tiny", host=host, model_impl=mine.name, **settings)
    else:
        found = llm(host=host, max_num_seqs=4, **{kind: mine.name})
    assert found.engine.resolved[kind].name == mine.name
    parts = {kind_of(type(part)): type(part) for part in found.engine._parts().values()}
    assert parts[kind] is host.get(kind, mine.name).load()
    assert [len(each) for each in tokens(found)] == [6, 6, 6]
    if kind != "model":
        assert tokens(found) == tokens(llm())


SAYS = {
    "nanofw_engine_created": r"{'model': 'transformers', 'attention': 'vectorized-gather', .*'sampler': 'default'}\n",
    "nanofw_step_finished": r"step 0: 15 tokens, 0\.\d{6} s\n(step [1-5]: 3 tokens, 0\.\d{6} s\n){5}",
    "nanofw_request_finished": r"llm-0 length\nllm-1 length\nllm-2 length\n",
}


def test_every_hook_is_tried() -> None:
    assert {*SAYS, *(f"nanofw_register_{kind}" for kind in KINDS)} == {*HOOKS}


@pytest.mark.parametrize("hook", SAYS)
def test_observed_by_the_example(hook: str, llm: Callable[..., LLM], capsys: pytest.CaptureFixture[str]) -> None:
    """It is told of the engine, of each step, of each end, and prints what the event holds."""
    tokens(llm(host=with_example(hook)))
    assert re.fullmatch(SAYS[hook], capsys.readouterr().out)
