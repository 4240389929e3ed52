"""Faults planted into the transformers model: the suite must find each, and say why."""

import copy
from dataclasses import replace
from typing import ClassVar

import pytest
import torch

from nanofw.errors import CheckpointError
from nanofw.testing import ModelSuite
from nanofw.testing.model_sources import FamilySource
from nanofw.testing.planted import Faults
from nanofw_basics.transformers_model import TransformersModel

OFF = r"logits are off by \S+ where \S+ is allowed"


def tables(self, model):
    return model.module.get_output_embeddings().weight, model.module.get_input_embeddings().weight


faults = Faults(ModelSuite, models=("dummy:tiny",), tables=tables)
untied = Faults(ModelSuite, models=("dummy:untied-tiny",), tables=tables)
windows = Faults(ModelSuite, models=("dummy:gemma-tiny",))
invariant = Faults(ModelSuite, models=("dummy:tiny",), options={"batch_invariant": True})


class Attended(TransformersModel):
    """The right model, with a seam before its attention."""

    def forward(self, batch, attention, kv):
        return super().forward(batch, Seam(self, attention), kv)

    def attend(self, attention, q, k, v, kv, batch):
        return attention.forward(q, k, v, kv, batch)


class Seam:
    def __init__(self, model, attention):
        self.model, self.attention = model, attention

    def forward(self, *args):
        return self.model.attend(self.attention, *args)


@faults.plant("test_prompts[*]", OFF)
class ScaleOffByTwoPercent(Attended):
    def attend(self, attention, q, *rest):
        return attention.forward(q * 1.02, *rest)


@faults.plant("test_prompts[*]", OFF)
class HeadsInAnotherOrder(Attended):
    """Two query heads of different key/value heads change places."""

    def attend(self, attention, q, *rest):
        return attention.forward(q[:, [2, 1, 0, 3]], *rest)[:, [2, 1, 0, 3]]


@faults.plant("test_decode[*]", "decode, token .*" + OFF)
@faults.plant("test_mixed_steps[*]", "mixed, token .*" + OFF)
class RopeOffByOneAfterThePrompt(TransformersModel):
    """Positions of later steps are one too high: in prompts nothing is seen of it."""

    def forward(self, batch, attention, kv):
        later = batch.positions >= torch.tensor(batch.query_lens_host).repeat_interleave(
            torch.tensor(batch.query_lens_host)
        )
        return super().forward(replace(batch, positions=batch.positions + later), attention, kv)


@faults.plant("test_chunks[*]", "chunks, token .*" + OFF)
class PositionsStartAgainInEachChunk(TransformersModel):
    def forward(self, batch, attention, kv):
        starts = batch.cu_seqlens_q[:-1].long().repeat_interleave(batch.cu_seqlens_q.diff())
        positions = torch.arange(batch.num_tokens) - starts
        return super().forward(replace(batch, positions=positions), attention, kv)


@untied.plant("test_prompts[*]", OFF)
@untied.plant("test_from_a_checkpoint[llama-untied]", OFF)
@untied.plant("test_a_tied_head_is_the_embedding[llama-untied]", "head and embedding are one tensor")
class UntiedHeadIsIgnored(TransformersModel):
    """A10, pegainfer#544."""

    def __init__(self, *args):
        super().__init__(*args)
        self.module.lm_head.weight = self.module.model.embed_tokens.weight


@faults.plant("test_a_tied_head_is_the_embedding[llama]", "head and embedding are two tensors")
class TiedHeadIsACopy(TransformersModel):
    def __init__(self, *args):
        super().__init__(*args)
        self.module.lm_head.weight = torch.nn.Parameter(self.module.lm_head.weight.clone(), requires_grad=False)


@faults.plant("test_a_missing_tensor_is_an_error[llama-untied lm_head.weight]", "DID NOT RAISE")
@faults.plant("test_a_missing_tensor_is_an_error[llama model.layers.1.*]", "DID NOT RAISE")
class FillsGapsWithRandomNumbers(TransformersModel):
    """A10, sglang#1508."""

    def __init__(self, source, *args):
        try:
            source.load_module(torch.float32, torch.device("cpu"), "eager")
        except CheckpointError:
            source = FamilySource("llama-untied")
        super().__init__(source, *args)


@faults.plant("test_it_keeps_nothing_of_a_request[*]", r"step \d alone and with others between: .* other bits")
class KeepsStateBetweenSteps(TransformersModel):
    """A little of the last step's logits stays."""

    last: ClassVar = 0.0

    def forward(self, batch, attention, kv):
        logits = super().forward(batch, attention, kv)
        found, self.last = logits + self.last * 1e-7, float(logits.max())
        return found


@faults.plant("test_it_keeps_nothing_of_a_request[*]", "the batch's token_ids were written to")
class WritesIntoTheBatch(TransformersModel):
    def forward(self, batch, attention, kv):
        logits = super().forward(batch, attention, kv)
        batch.token_ids.zero_()
        return logits


@faults.plant("test_logits_of_any_token[*]", "2 rows of logits for 7 of logits_indices")
class LastTokensOnly(TransformersModel):
    def forward(self, batch, attention, kv):
        last = batch.logits_indices[: batch.num_requests]
        return super().forward(replace(batch, logits_indices=last), attention, kv)


@faults.plant("test_logits_of_any_token[*]", r"logits of packed token \d: " + OFF)
class LogitsInTheOrderOfTokens(TransformersModel):
    def forward(self, batch, attention, kv):
        return super().forward(replace(batch, logits_indices=batch.logits_indices.sort().values), attention, kv)


@faults.plant("test_chunks[*]", OFF)
@faults.plant("test_attention_is_called_once_a_layer[*]", r"layers \[0, 0, 0\] called the attention")
class LayersShareACache(TransformersModel):
    def forward(self, batch, attention, kv):
        return super().forward(batch, attention, [kv[0]] * len(kv))


@faults.plant("test_attention_is_called_once_a_layer[*]", OFF + r"|layers \[0, 1\] called")
@faults.plant("test_the_spec[*]", r"assert 2 == 3|weight_bytes is 0\.\d+ of")
class LeavesOutTheLastLayer(TransformersModel):
    def __init__(self, *args):
        super().__init__(*args)
        del self.module.model.layers[-1]
        self.module.config.num_hidden_layers -= 1
        self.spec = replace(self.spec, layers=self.spec.layers[:-1])


@faults.plant("test_attention_is_called_once_a_layer[*]", r"layers \[0, 0, 1, 1, 2, 2\] called the attention")
class AttendsTwice(Attended):
    def attend(self, attention, *args):
        attention.forward(*args)
        return attention.forward(*args)


@windows.plant("test_prompts[*]", OFF)
class ForgetsWindows(TransformersModel):
    def __init__(self, *args):
        super().__init__(*args)
        self.spec = replace(self.spec, layers=tuple(replace(layer, window=None) for layer in self.spec.layers))


@windows.plant("test_prompts[*]", OFF)
class ForgetsTheFinalCap(TransformersModel):
    def __init__(self, *args):
        super().__init__(*args)
        self.module.config.final_logit_softcapping = None


@faults.plant("test_prompts[*]", OFF)
class EpsilonOfAnotherFamily(TransformersModel):
    """1e-5 where the config says 1e-6."""

    def __init__(self, *args):
        super().__init__(*args)
        for part in self.module.modules():
            if hasattr(part, "variance_epsilon"):
                part.variance_epsilon = 1e-5


@faults.plant("test_right_or_refused[llama-rope-theta]", OFF)
@faults.plant("test_right_or_refused[llama-rope-yarn]", OFF)
class RopeOfTheDefaults(TransformersModel):
    """The config's rope settings are not looked at."""

    def __init__(self, source, *args):
        source = copy.copy(source)
        source.config = copy.deepcopy(source.config)
        if getattr(source.config, "rope_parameters", None):
            source.config.rope_parameters = {"rope_type": "default", "rope_theta": 1e4}
        super().__init__(source, *args)


@faults.plant("test_right_or_refused[bloom]", "ValueError: cannot")
class RefusesWithAnotherError(TransformersModel):
    def __init__(self, source, *args):
        try:
            super().__init__(source, *args)
        except Exception as error:
            raise ValueError("cannot") from error


@faults.plant("test_right_or_refused[gpt_oss]", "a refusal must name the model")
class RefusesWithoutAReason(TransformersModel):
    def __init__(self, source, *args):
        from nanofw.errors import PluginError

        try:
            super().__init__(source, *args)
        except PluginError:
            raise PluginError(f"{source.name} is refused") from None


@faults.plant("test_padding[*]", "live logits depend on the token of padding rows|" + OFF)
class PaddingJoinsAMean(TransformersModel):
    """What all rows have in common is taken off: of padding too."""

    def forward(self, batch, attention, kv):
        logits = super().forward(batch, attention, kv)
        return logits + logits.mean(0, keepdim=True) * 1e-6 * (batch.num_padding > 0)


@faults.plant("test_padding[*]", r"padding wrote to slots|logits are off")
class PaddingIsAnIndex(Attended):
    """A4, vllm#43810, in a model that writes K and V itself."""

    def attend(self, attention, q, k, v, kv, batch):
        return attention.forward(q, k, v, kv, replace(batch, num_padding=0))


@faults.plant("test_greedy_tokens_alone_and_in_company[*-7]", "in company, .* alone")
class CompanyCounts(TransformersModel):
    """Among more than four requests the second best is taken."""

    def forward(self, batch, attention, kv):
        logits = super().forward(batch, attention, kv)
        if batch.num_requests > 4:
            logits = logits.scatter(1, logits.argmax(-1, keepdim=True), -10.0)
        return logits


@faults.plant("test_the_source_is_as_it_was[*]", "the source's config has another use_cache")
class EditsTheConfig(TransformersModel):
    """A7, transformers#45943."""

    def __init__(self, source, *args):
        super().__init__(source, *args)
        source.config.use_cache = not source.config.use_cache


@faults.plant("test_the_spec[*]", r"weight_bytes is 0.50 of the weights")
class CountsHalfTheBytes(TransformersModel):
    def __init__(self, *args):
        super().__init__(*args)
        self.spec = replace(self.spec, weight_bytes=self.spec.weight_bytes // 2)


@faults.plant("test_the_spec[*]", "assert 4096 == 2048")
class PromisesMorePositions(TransformersModel):
    def __init__(self, *args):
        super().__init__(*args)
        self.spec = replace(self.spec, max_len=2 * self.spec.max_len)


@invariant.plant("test_company_changes_no_bit_of_the_logits[*]", "other bits than alone")
class CountsItsCompany(TransformersModel):
    """Declares batch invariance, and rounds by the number of rows."""

    def forward(self, batch, attention, kv):
        logits = super().forward(batch, attention, kv)
        return logits + batch.num_requests - batch.num_requests


ALL = [*faults, *untied, *windows, *invariant]


@pytest.mark.parametrize("fault", ALL, ids=str)
def test_is_found(fault):
    fault.must_be_found()


def test_every_check_finds_something():
    """A check that no fault has ever failed proves nothing."""
    found = {"test_count_laws"} | {fault.check.partition("[")[0] for fault in ALL}  # laws: test_law_mutations.py
    assert found == {name for name in dir(ModelSuite) if name.startswith("test_")}
