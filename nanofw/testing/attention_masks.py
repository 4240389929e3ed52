"""Which keys a query sees: probes without a tolerance, windows, and capped scores."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from nanofw.testing import tolerance
from nanofw.testing.attention_base import AttentionBase, one_at_a_time
from nanofw.testing.cases import DTYPES, Case, Dense
from nanofw.testing.suite import cases
from nanofw.testing.tolerance import bits, check_same_bits

WINDOW = 4


def saturated_cases(suite: type[AttentionBase]) -> Iterator[Case]:
    """Per dtype: contexts of one token, one block, one more, and three blocks and one; decode and prefill."""
    block = min(suite.block(), 16)
    for dtype in DTYPES:
        for context in (1, block, block + 1, 3 * block + 1):
            yield suite.case((context,), dtype=dtype)


def windowed(suite: type[AttentionBase]) -> Iterator[Case]:
    """A prompt of 16 with a window of 4, in blocks of 1, 3 and 16 (and what else is declared)."""
    declared = suite.can().block_sizes
    for block in (1, 3, 16) if declared is None else sorted(declared)[:3]:
        for dtype in ("fp32", "bf16"):
            yield suite.case((16,), (16,), dtype=dtype, block_size=block, window=WINDOW)


def capped(suite: type[AttentionBase]) -> Iterator[Case]:
    """Large logits, in each dtype."""
    for dtype in DTYPES:
        yield suite.case((1, 40, 17), (1, 1, 17), dtype=dtype, profile="sharp", seed=5)


class Masks(AttentionBase):
    """Each query sees the keys it must see, and no other."""

    @cases(saturated_cases)
    def test_one_key_dominates(self, case: Case) -> None:
        """Saturated softmax: one key in turn gets all the weight, and the output must be its value.

        Fails if a key is lost at a block's edge or at either end: without it the output is some other value altogether,
        where a tolerance would pass one key of many. Source: the contract.
        """
        context = case.contexts[0]
        one = self.numbers(replace(case, queries=(context,)))
        sign = torch.ones(case.head_size, device=one.q[0].device, dtype=one.q[0].dtype)
        sign[1::2] = -1
        length = (30 / case.head_size**0.5) ** 0.5  # scores of +30 and -30
        for start in range(0, context, 16):
            targets = range(start, min(start + 16, context))
            keys = []
            for target in targets:
                k = (-length * sign).expand_as(one.k[0]).clone()
                k[target] = length * sign
                keys.append(k)
            q = (length * sign).expand_as(one.q[0])
            for queries in {1, context}:
                many = replace(case, contexts=(context,) * len(keys), queries=(queries,) * len(keys))
                dense = Dense([q[:queries]] * len(keys), keys, [one.v[0]] * len(keys))
                out = self.attend(many, dense).split_with_sizes([queries] * len(keys))
                for target, got in zip(targets, out, strict=True):
                    self._check_saturated(many, target, got, one.v[0])

    @staticmethod
    def _check_saturated(case: Case, target: int, got: torch.Tensor, v: torch.Tensor) -> None:
        """Every query at or after `target` must give its value."""
        context, queries = len(v), len(got)
        got = got[max(0, target - (context - queries)) :]
        expected = v[target].repeat_interleave(case.heads // case.kv_heads, dim=0).expand_as(got)
        error = (got.double() - expected.double()).abs().max().item()
        eps = max(torch.finfo(got.dtype).eps, 4 * torch.finfo(torch.float32).eps)  # exponential and division round
        allowed = eps * v.abs().max().item()
        if not error <= allowed:
            raise AssertionError(
                f"{case}: key {target} of {context} has all the weight, but its value is not the output of "
                f"{queries} queries: off by {error:.3g}"
            )

    def test_no_query_sees_the_future(self) -> None:
        """Causality: with key and value j changed, queries before j keep their bits and query j does not.

        Fails if the mask is off by one, or counted from the wrong end of the context. Source: the contract.
        """
        self.check_visibility(self.case((self.block() + 5,), (self.block() + 5,)), None)

    @cases(windowed)
    def test_window_in_prefill(self, case: Case) -> None:
        """Query i sees exactly keys max(0, i-3)..i: within the yardstick, and key by key.

        Fails if the window has a wrong sign, is not applied, or leaves out the token itself. Source:
        transformers#41184.
        """
        self.check(case)
        self.check_visibility(case, WINDOW)

    @cases(windowed)
    def test_window_in_decode(self, case: Case) -> None:
        """20 one-token steps after the prompt: key i-3 counts, key i-4 does not.

        Fails if decode never got the window, or loses its oldest key. Sources: sglang#32087, mistral.rs#2094.
        """
        steps = range(17, 37)
        case = replace(case, contexts=tuple(steps), queries=None)
        dense = self.numbers(case)
        self.check(case, dense)
        before = self.attend(case, dense)
        for age, seen in ((WINDOW, False), (WINDOW - 1, True)):
            after = self.attend(case, changed(dense, [s - 1 - age for s in steps]))
            for row, length in enumerate(steps):
                same = bool((bits(before[row]) == bits(after[row])).all())
                if same == seen:
                    raise AssertionError(
                        f"{case}: key {length - 1 - age} {'is lost to' if seen else 'reaches'} the query at position "
                        f"{length - 1}, with a window of {WINDOW}"
                    )

    @cases(windowed)
    def test_window_in_chunks(self, case: Case) -> None:
        """A windowed prompt in chunks equals the reference of the whole, as one shot does.

        Fails if the window is counted from the first token of the chunk. Source: transformers#41184.
        """
        block = case.block_size
        self.check_chunks(  # type: ignore[attr-defined]
            case, (5, 3, *((block,) if 1 < block < 20 else (7,)), *(1,) * 20)
        )

    def test_wide_window_is_none(self) -> None:
        """A window as long as the context, or longer, changes no bit (in prefill and in decode).

        Fails if the window hides a key at the beginning, where it reaches beyond it. Source: transformers#41184.
        """
        length = 2 * self.block() + 1
        for queries in (1, length):
            case = self.case((length,), (queries,))
            dense, plain = self.numbers(case), self.attend(case)
            for window in (length, length + 1, 10 * length):
                got = self.attend(replace(case, window=window), dense)
                tolerance.check(got, dense.q[0], dense.k[0], dense.v[0], case.layer, f"{case}: window of {window}")
                error = (got.double() - plain.double()).abs().max().item()
                if error > torch.finfo(got.dtype).eps * plain.abs().max().item():
                    raise AssertionError(f"{case}: a window of {window} on {length} tokens changes the output")

    @cases(capped)
    def test_soft_cap(self, case: Case) -> None:
        """Caps of 5 and 50 on large logits match `cap*tanh(score/cap)`, and all three differ.

        Fails if the cap is accepted and not applied, or applied to unscaled scores. Source: sgl-kernel-xpu#491.
        """
        dense, outputs = self.numbers(case), []
        for cap in (None, 5.0, 50.0):
            self.check(replace(case, soft_cap=cap), dense)
            outputs.append(self.attend(replace(case, soft_cap=cap), dense))
        for one, other in ((0, 1), (0, 2), (1, 2)):
            if torch.equal(outputs[one], outputs[other]):
                raise AssertionError(f"{case}: two different soft caps give the same output: the cap is ignored")

    def test_soft_cap_comes_before_the_mask(self) -> None:
        """A cap must not make hidden keys visible: with a cap and a window at once, both hold.

        Fails if masked scores are capped: minus infinity becomes minus the cap. Source: sgl-kernel-xpu#491.
        """
        case = self.case((20, 37), (20, 1), window=WINDOW, soft_cap=5.0, profile="sharp")
        self.check(case)
        self.check_visibility(one_at_a_time(case, 0), WINDOW)

    def check_visibility(self, case: Case, window: int | None) -> None:
        """Change each key and value in turn: exactly the queries that see it change, all others keep their bits."""
        dense = self.numbers(case)
        before, length = self.attend(case, dense), case.contexts[0]
        for key in range(length):
            after = self.attend(case, changed(dense, [key]))
            until = length if window is None else min(length, key + window)
            hidden = [*range(key), *range(until, length)]
            check_same_bits(after[hidden], before[hidden], f"{case}: key {key} is hidden from queries {hidden}")
            for query in range(key, until):
                if torch.equal(after[query], before[query]):
                    raise AssertionError(f"{case}: key {key} is lost to the query at position {query}")


def changed(dense: Dense, keys: list[int]) -> Dense:
    """The same numbers, with one key and value of each request replaced: `keys[i]` of request i."""
    k, v = [t.clone() for t in dense.k], [t.clone() for t in dense.v]
    for request, key in enumerate(keys):
        k[request][key] = -k[request][key]
        v[request][key] = 3 - v[request][key]
    return Dense(dense.q, k, v)
