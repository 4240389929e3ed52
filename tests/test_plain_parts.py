"""What suites of runners and models judge with: an attention that is right itself, and a model that misses nothing."""

import pytest
import torch

from nanofw.testing import AttentionSuite
from nanofw.testing.model_base import Served
from nanofw.testing.plain_attention import PlainAttention
from nanofw.testing.small_model import SmallModel

CPU = torch.device("cpu")
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]


class TestPlainAttention(AttentionSuite):
    backend = PlainAttention
    thin = 12
    max_examples = 5


def logits(model, tokens, chunks):
    served = Served(model)
    row = served.open(tokens)
    for count in chunks:
        found = served.run({row: count})
    return found[0]


@pytest.mark.parametrize("at", range(len(TOKENS)))
def test_every_token_of_the_context_matters(at):
    other = [*TOKENS[:at], 50, *TOKENS[at + 1 :]]
    model = SmallModel(CPU)
    assert (logits(model, TOKENS, (8,)) - logits(model, other, (8,))).abs().max() > 1e-3


def test_places_matter():
    model = SmallModel(CPU)
    swapped = [TOKENS[1], TOKENS[0], *TOKENS[2:]]
    assert (logits(model, TOKENS, (8,)) - logits(model, swapped, (8,))).abs().max() > 1e-3


@pytest.mark.parametrize("chunks", [(8,), (3, 5), (1,) * 8])
def test_chunks_do_not(chunks):
    model = SmallModel(CPU)
    torch.testing.assert_close(logits(model, TOKENS, chunks), logits(model, TOKENS, (7, 1)), atol=1e-9, rtol=0)


def test_greedy_tokens_are_not_all_the_same():
    """Else a runner that repeats one token would pass."""
    model = SmallModel(CPU)
    tokens = list(TOKENS)
    for _ in range(20):
        tokens.append(int(logits(model, tokens, (len(tokens),)).argmax()))
    assert len(set(tokens[len(TOKENS) :])) > 10
