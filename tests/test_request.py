"""What one request asks for is checked when it is asked."""

import dataclasses
import re
from pathlib import Path

import pytest

from nanofw import SamplingParams
from nanofw.errors import RequestError


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"temperature": -0.1}, "temperature=-0.1 is out of range: it must be a finite number >= 0"),
        ({"temperature": float("inf")}, "temperature=inf is out of range"),
        ({"temperature": float("nan")}, "temperature=nan is out of range"),
        ({"top_k": -2}, r"top_k=-2 is out of range: it must be >= -1 \(0 and -1 mean off\)"),
        ({"top_p": 0}, r"top_p=0 is out of range: it must be in \(0, 1\]"),
        ({"top_p": 1.5}, "top_p=1.5 is out of range"),
        ({"n": 0}, "n=0 is out of range: it must be >= 1"),
        ({"max_tokens": 0}, "max_tokens=0 is out of range: it must be >= 1"),
        ({"max_tokens": -1}, "max_tokens=-1 is out of range"),
        ({"min_tokens": -1}, r"min_tokens=-1 is out of range: it must be 0 to 16 \(max_tokens\)"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens=5 is out of range: it must be 0 to 4"),
        ({"stop": ["x", ""]}, "must be non-empty strings"),
        ({"stop": ""}, "must be non-empty strings"),
        ({"prompt_logprobs": -1}, "prompt_logprobs=-1 is out of range: it must be None or >= 0"),
        ({"logprobs": -1}, "logprobs=-1 is out of range: it must be None or >= 0"),
        ({"max_tokens": 2.5}, "max_tokens=2.5 must be an integer"),
        ({"logprobs": True}, "logprobs=True must be an integer or None"),
        ({"seed": "lucky"}, "seed='lucky' must be an integer or None"),
    ],
)
def test_out_of_range(setting, message):
    """lm-evaluation-harness#3503: max_tokens=0 is refused, by one documented rule, like every other such value."""
    with pytest.raises(RequestError, match=message):
        SamplingParams(**setting)


def test_every_parameter_has_one_rule():
    """In docs/reference/sampling.md, no more and no less."""
    text = (Path(__file__).parents[1] / "docs" / "reference" / "sampling.md").read_text(encoding="utf-8")
    rules = re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)
    assert sorted(rules) == sorted(field.name for field in dataclasses.fields(SamplingParams))


def test_forms_of_stop():
    assert SamplingParams(stop="x").stop == ("x",)
    assert SamplingParams(stop=["x", "y"]).stop == ("x", "y")
    assert SamplingParams(stop_token_ids=[1, 2]).stop_token_ids == (1, 2)


def test_params_do_not_change():
    params = SamplingParams()
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.temperature = 0


def test_choosy():
    """What makes the engine carry sampling parameters to the device."""
    assert not SamplingParams(temperature=0).choosy
    assert SamplingParams(temperature=1e-6).choosy
    assert SamplingParams(temperature=0, logprobs=0).choosy
