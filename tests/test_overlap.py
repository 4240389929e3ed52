"""Planning a step while another one runs changes nothing that anybody sees, whatever happens meanwhile."""

from dataclasses import dataclass

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nanofw import PluginHost, SamplingParams
from nanofw.testing.audited import audited_engine, nothing_left, prompt

ENDS = (2, 17)
HOST = PluginHost.load(only=("basics", "gather"))


@dataclass(frozen=True)
class Life:
    """One request: when it comes, and, in some cases, when it is aborted (counted in steps)."""

    tokens: list[int]
    params: SamplingParams
    stream: bool
    comes: int
    goes: int | None


def params():
    """All that a request may ask for, on a model without text."""
    return st.builds(
        lambda least, more, **rest: SamplingParams(min_tokens=least, max_tokens=least + more, **rest),
        least=st.sampled_from((0, 0, 3)),
        more=st.integers(1, 9),
        temperature=st.sampled_from((0.0, 1e-5, 0.7, 1.5)),
        top_k=st.sampled_from((0, 0, 5)),
        top_p=st.sampled_from((1.0, 1.0, 0.8)),
        seed=st.integers(0, 99),
        n=st.sampled_from((1, 1, 1, 3)),
        logprobs=st.sampled_from((None, None, 0, 2)),
        prompt_logprobs=st.sampled_from((None, None, None, 1)),
        ignore_eos=st.booleans(),
        stop_token_ids=st.sampled_from(((), (), (9, 26))),
    )


def lives():
    """Prompts of two families, so that a prefix cache has something to find."""
    tokens = st.builds(
        lambda family, length, own: prompt(20, family)[:length] + own,
        st.integers(0, 1),
        st.integers(1, 20),
        st.lists(st.integers(0, 127), max_size=3),
    )
    return st.builds(
        Life, tokens, params(), st.booleans(), st.integers(0, 12), st.none() | st.integers(1, 20) | st.none()
    )


ENGINES = st.fixed_dictionaries(
    {
        "kv_cache": st.sampled_from(("paged", "prefix")),
        "scheduler": st.sampled_from(("continuous", "continuous", "static")),
        "kv_blocks": st.sampled_from((8, 12, 60)),
        "max_num_seqs": st.integers(1, 6),
        "max_batch_tokens": st.sampled_from((3, 8, 64)),
    }
)


def serve(work, depth, given):
    """All that is reported of each request, in order."""
    engine = audited_engine(HOST, ENDS, steps_in_flight=depth, options={"kv_cache": {"block_size": 4}}, **given)
    reported = {str(i): [] for i in range(len(work))}
    step = 0
    while step <= max(max(life.comes, life.goes or 0) for life in work) or engine.has_work:
        for i, life in enumerate(work):
            if life.comes == step:
                engine.add(str(i), life.tokens, life.params, stream=life.stream)
            if life.goes == step and (output := engine.abort(str(i))) is not None:
                reported[str(i)].append(output)
        for output in engine.step() if engine.has_work else ():
            reported[output.request_id].append(output)
        step += 1
        assert step < 4000
    nothing_left(engine)
    return [reported[str(i)] for i in range(len(work))]


def seen(outputs):
    """What a caller sees, but for how the engine came to it; of several samples one after another."""
    ordered = sorted(outputs, key=lambda output: (output.finished, output.outputs[0].index))
    return [(output.outputs, output.prompt_logprobs, output.finished) for output in ordered]


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(work=st.lists(lives(), min_size=1, max_size=7), engine=ENGINES)
def test_with_a_step_in_flight_all_outputs_are_the_same(work, engine):
    """Tokens, log-probabilities, reasons and every streamed report; of who is aborted, as far as both came."""
    for life, plain, ahead in zip(work, serve(work, 0, engine), serve(work, 1, engine), strict=True):
        if life.goes is None:
            assert seen(plain) == seen(ahead)
            continue
        if plain and ahead:
            for one, other in zip(plain[-1].outputs, ahead[-1].outputs, strict=True):
                shared = min(len(one.token_ids), len(other.token_ids))
                assert one.token_ids[:shared] == other.token_ids[:shared]
                assert (one.logprobs or ())[:shared] == (other.logprobs or ())[:shared]
