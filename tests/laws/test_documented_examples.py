"""The attentions that the documents begin with keep the laws that they declare."""

import re
import textwrap
import types
from pathlib import Path

import pytest

from nanofw.testing.laws import judge

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("document", ["README.md", "docs/how-to/attention-plugin.md"])
def test_example(document):
    indented = re.findall(r"(?:^ {4}.*\n|^\n)+", (ROOT / document).read_text(), re.MULTILINE)
    (code,) = [block for block in indented if "class MyAttention" in block]
    module = types.ModuleType("my_attention")
    exec(textwrap.dedent(code), vars(module))
    verdicts = judge(module.MyAttention)
    assert verdicts
    assert all(verdict.holds for verdict in verdicts), [verdict.text for verdict in verdicts]
