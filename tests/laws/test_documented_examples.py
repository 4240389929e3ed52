"""The attentions that the documents begin with keep the laws that they declare."""

import re
import types
from pathlib import Path

import pytest

from nanofw.testing.laws import judge

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("document", ["README.md", "docs/how-to/attention-plugin.md"])
def test_example(document):
    fenced = re.findall(r"^```python\n(.*?)^```$", (ROOT / document).read_text(), re.MULTILINE | re.DOTALL)
    (code,) = [block for block in fenced if "class MyAttention" in block]
    module = types.ModuleType("my_attention")
    exec(code, vars(module))
    verdicts = judge(module.MyAttention)
    assert verdicts
    assert all(verdict.holds for verdict in verdicts), [verdict.text for verdict in verdicts]
