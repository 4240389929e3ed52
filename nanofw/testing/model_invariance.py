"""Batch invariance of a model, where it is declared: a part of the suite of models, and a suite by itself.

from nanofw.testing.model_invariance import ModelInvariance

class TestMyModel(ModelInvariance):
    backend = MyModel
    models = ("dummy:tiny",)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from nanofw.build import build_engine
from nanofw.config import Config
from nanofw.engine import Engine
from nanofw.request import RequestOutput, SamplingParams
from nanofw.testing.audited import NAME, host_with, prompt
from nanofw.testing.model_base import ModelBase, find
from nanofw.testing.suite import cases

COMPANY = (1, 2, 6, 15)
"""Other requests in the step, of all lengths."""


class ModelInvariance(ModelBase):
    """The logits of a request, bit for bit, alone and in company."""

    @cases(lambda suite: suite.models)
    def test_company_changes_no_bit_of_the_logits(self, case: str) -> None:
        """First, last and in the middle of a step: the same log-probabilities, prompt and output, of all tokens.

        Fails if `batch_invariant_on` names a device where a sum depends on the rows beside it. Source:
        transformers#25921.
        """
        engine = self._engine(case)
        mine, how = prompt(19, 1), SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
        wanted = replace(how, logprobs=engine.vocab_size, prompt_logprobs=engine.vocab_size)
        alone = _serve(engine, [(mine, wanted)], 0)
        for count in COMPANY:
            work = [(prompt(1 + 4 * i, i), how) for i in range(count)]
            for place in {0, count // 2, count}:
                found = _serve(engine, [*work[:place], (mine, wanted), *work[place:]], place)
                what = f"{case}: request {place} of {count + 1}"
                assert found.prompt_logprobs == alone.prompt_logprobs, f"{what}: other bits than alone, in the prompt"
                assert found.outputs == alone.outputs, f"{what}: other bits than alone"

    def _engine(self, name: str) -> Engine:
        model = self.model(name)
        if model.spec.device.type not in model.batch_invariant_on:
            pytest.skip(f"{self.backend.__name__} does not declare batch invariance on {model.spec.device.type}")
        settings = {
            "model": name,
            "model_impl": NAME,
            "attention": "naive-gather",  # batch invariant itself
            "device": str(model.spec.device),
            "kv_blocks": 256,
            "max_model_len": 128,
        }
        return build_engine(Config.build(settings), host_with("model", self.backend), find(name), model)


def _serve(engine: Engine, work: Sequence[tuple[Sequence[int], SamplingParams]], place: int) -> RequestOutput:
    """What the request at `place` gets."""
    for number, (tokens, how) in enumerate(work):
        engine.add(str(number), tokens, how, stream=False)
    return next(output for output in list(engine.run()) if output.request_id == str(place))
