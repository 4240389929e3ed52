"""Batch invariance of a model, where it is declared: a part of the suite of models, and a suite by itself.

from nanofw.testing.model_invariance import ModelInvariance

class TestMyModel(ModelInvariance):
    backend = MyModel
    models = ("dummy:tiny",)
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import pytest

from nanofw.build import build_engine, build_model
from nanofw.config import Config
from nanofw.engine import Engine
from nanofw.model import Model
from nanofw.request import RequestOutput, SamplingParams
from nanofw.testing.audited import NAME, host_with, prompt
from nanofw.testing.suite import Suite, cases
from nanofw.weights import resolve

COMPANY = (1, 2, 6, 15)
"""Other requests in the step, of all lengths."""


class ModelInvariance(Suite):
    """The logits of a request, bit for bit, alone and in company.

    Attributes a subclass sets:
        backend: the model's class.
        models: what to load with it; small, since log-probabilities of the whole vocabulary are compared.
        device: where to test it; the environment's `NANOFW_TEST_DEVICE` if not given, else the CPU.
    """

    backend: ClassVar[type[Model]]
    models: ClassVar[Sequence[str]] = ("dummy:tiny",)
    device: ClassVar[str | None] = None

    @cases(lambda suite: suite.models)
    def test_company_changes_no_bit_of_the_logits(self, case: str) -> None:
        """First, last and in the middle of a step: the same log-probabilities, prompt and output, of all tokens."""
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
        if reason := self.backend.unavailable():
            pytest.skip(f"{self.backend.__name__} is unavailable here: {reason}")
        settings = {
            "model": name,
            "model_impl": NAME,
            "attention": "naive-gather",  # batch invariant itself
            "device": self.device or os.environ.get("NANOFW_TEST_DEVICE") or "cpu",
            "kv_blocks": 256,
            "max_model_len": 128,
            "options": {"model": dict(self.options)},
        }
        config, host, source = Config.build(settings), host_with("model", self.backend), resolve(name)
        model = build_model(config, host, source)
        if model.spec.device.type not in model.batch_invariant_on:
            pytest.skip(f"{self.backend.__name__} does not declare batch invariance on {model.spec.device.type}")
        return build_engine(config, host, source, model)


def _serve(engine: Engine, work: Sequence[tuple[Sequence[int], SamplingParams]], place: int) -> RequestOutput:
    """What the request at `place` gets."""
    for number, (tokens, how) in enumerate(work):
        engine.add(str(number), tokens, how, stream=False)
    return next(output for output in list(engine.run()) if output.request_id == str(place))
