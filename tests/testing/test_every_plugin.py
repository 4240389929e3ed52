"""No plugin of ours is shipped that no suite has judged."""

import re
from pathlib import Path

import pytest

from nanofw import PluginHost
from nanofw.component import KINDS
from nanofw.errors import PluginError
from nanofw.testing.session import SUITES

HOST = PluginHost.load()
SHIPPED = sorted((s.kind, s.name) for s in HOST.statuses() if s.distribution == "nanofw" and s.kind in KINDS)
JUDGED = re.compile(r"^class Test\w+\((\w+)\):\n(?:    .*\n|\n)*?    backend = (\w+)$", re.MULTILINE)


@pytest.mark.parametrize(("kind", "name"), SHIPPED, ids=["-".join(pair) for pair in SHIPPED])
def test_a_suite_judges_it(kind, name):
    try:
        backend = HOST.get(kind, name).load()
    except PluginError as error:
        pytest.skip(str(error))
    texts = [file.read_text() for file in Path(__file__).parents[1].glob("nanofw_*/test_*.py")]
    assert (SUITES[kind], backend.__name__) in {pair for text in texts for pair in JUDGED.findall(text)}
