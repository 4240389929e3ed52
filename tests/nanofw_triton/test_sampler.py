"""The Triton sampler passes the conformance suite, and chooses what the arithmetic in torch chooses."""

import pytest
import torch

pytest.importorskip("triton")

from nanofw import draw
from nanofw.batch import Sampling
from nanofw.testing import SamplerSuite
from nanofw_triton.sampler import TritonSampler

ON_GPU = torch.cuda.is_available()


class TestTritonSampler(SamplerSuite):
    backend = TritonSampler
    device = "cuda" if ON_GPU else "cpu"
    thin = 1 if ON_GPU else 3
    draws = 4096 if ON_GPU else 256
    if not ON_GPU:
        test_count_laws = None  # counted in tests/laws


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("vocab", [10, 300, 4096, 10_000])
def test_tokens_equal_those_of_torch(vocab, dtype):
    torch.manual_seed(1)
    device = "cuda" if ON_GPU else "cpu"
    logits = (torch.randn(6, vocab) * 4).to(dtype).to(device)
    logits[0, 3:] = float("-inf")
    sampler = TritonSampler(None)
    assert torch.equal(sampler.sample(logits, None).tokens, logits.argmax(dim=-1))
    sampling = Sampling(
        temperature=torch.tensor([1.0, 0.5, 0.0, 1e-6, 2.0, 1e-4], device=device),
        top_k=torch.zeros(6, dtype=torch.int64, device=device),
        top_p=torch.ones(6, device=device),
        seed=torch.tensor([1, 2, 3, -4, 5, 2**62], device=device),
        position=torch.arange(6, device=device) * 3 + 1,
        greedy=False,
        truncated=False,
        logprobs=-1,
    )
    assert torch.equal(sampler.sample(logits, sampling).tokens, draw.sample(logits, sampling).tokens)


def test_ties_take_the_first():
    logits = torch.zeros(2, 9000)
    logits[1, [5000, 8999]] = 1.0
    assert TritonSampler(None).sample(logits, None).tokens.tolist() == [0, 5000]
