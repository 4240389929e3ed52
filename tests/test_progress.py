"""What takes its time is told to whoever looks on, and to nobody else."""

import os
import pty
import subprocess
import sys

import pytest

from nanofw import LLM
from nanofw.progress import doing, watching

COMMAND = [sys.executable, "-c", "from nanofw.cli import main; main()"]
BENCH = ["bench", "--model", "dummy:tiny", "--prompt-tokens", "4", "--output-tokens", "2", "--rounds", "1"]


def test_building_an_engine_is_told():
    told = []
    with watching(told.append):
        LLM("dummy:tiny", device="cpu", kv_blocks=16, max_num_seqs=2, max_model_len=32)
    assert told == ["loading dummy:tiny", "choosing the size of the KV cache", "warming up eager"]
    doing("something else")
    assert len(told) == 3


def test_an_inner_watcher_takes_over():
    outer, inner = [], []
    with watching(outer.append):
        with watching(inner.append):
            doing("in")
        doing("out")
    assert (outer, inner) == (["out"], ["in"])


def shown(*arguments):
    """What a command writes to a terminal on stderr."""
    ours, theirs = pty.openpty()
    env = os.environ | {"TERM": "xterm", "COLUMNS": "100", "OMP_NUM_THREADS": "1"}
    done = subprocess.Popen([*COMMAND, *arguments], stdout=subprocess.PIPE, stderr=theirs, env=env, text=True)
    os.close(theirs)
    text = b""
    while True:
        try:
            part = os.read(ours, 4096)
        except OSError:  # how the end of a terminal reads
            break
        if not part:
            break
        text += part
    os.close(ours)
    out, _ = done.communicate(timeout=120)
    assert done.returncode == 0, text
    assert "loading" not in out
    return text.decode()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([*BENCH, "--batch-sizes", "1"], ["loading dummy:tiny", "warming up eager", "round 1/1", "batch 1"]),
        ([*BENCH, "--batch-sizes", "1", "--quiet"], []),
        (["generate", "Hi", "--model", "dummy:tiny", "--max-tokens", "2"], ["loading dummy:tiny"]),
    ],
    ids=["bench", "bench --quiet", "generate"],
)
def test_a_terminal_sees_it(arguments, says):
    text = shown(*arguments)
    for word in says:
        assert word in text
    assert says or "loading" not in text
    assert says or "round" not in text
