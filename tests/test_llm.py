"""`LLM`: order and count kept, calls that do not disturb one another, nothing left behind (fault case A7)."""

import copy
import sys

import pytest

from nanofw import SamplingParams
from nanofw.errors import EngineError, RequestError

PROMPTS = ["one", "two, longer", "three, and longer still", "four"]


def tokens(outputs):
    return [o.outputs[0].token_ids for o in outputs]


def greedy(count):
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)


def nothing_left(llm):
    engine = llm.engine
    assert not engine.requests
    assert engine.table.free_rows == engine.table.rows
    assert engine.kv_cache.free_blocks == engine.kv_cache.num_blocks - 1


@pytest.mark.parametrize("depth", [0, 1])
def test_generate_twice(llm, depth):
    """transformers#45943: the second call is as good as the first, and the model's config is as it was."""
    engine = llm(steps_in_flight=depth)
    before = copy.deepcopy(engine.source.config.to_dict())
    params = [greedy(n) for n in (9, 1, 5, 3)]
    first, second = engine.generate(PROMPTS, params), engine.generate(PROMPTS[:2], params[:2])
    assert [o.prompt for o in first] == PROMPTS
    assert [len(t) for t in tokens(first)] == [9, 1, 5, 3]
    assert tokens(second) == tokens(first)[:2]
    assert engine.source.config.to_dict() == before
    assert not {o.request_id for o in first} & {o.request_id for o in second}
    nothing_left(engine)


def test_models_do_not_change_each_other(llm):
    """Two engines over one loaded model, used in turn."""
    one, other = llm(attention="naive-gather"), llm(scheduler="static")
    expected = tokens(one.generate(PROMPTS, greedy(6)))
    streams = [engine.stream(PROMPTS, greedy(6)) for engine in (one, other)]
    found = [{}, {}]
    for pair in zip(*streams, strict=False):
        for mine, output in zip(found, pair, strict=True):
            mine[output.request_id] = output
    for stream, mine in zip(streams, found, strict=True):
        mine.update((o.request_id, o) for o in stream)
        assert tokens(mine.values()) == expected


@pytest.mark.parametrize("settings", [{}, {"steps_in_flight": 1}, {"scheduler": "static"}, {"kv_blocks": 4}])
def test_stream_and_generate_agree(llm, settings):
    engine = llm(**settings)
    params = SamplingParams(temperature=0.9, max_tokens=12, seed=5, stop=["o"], ignore_eos=True)
    whole = engine.generate(PROMPTS, params)
    text, last, seen = {}, {}, {}
    for output in engine.stream(PROMPTS, params):
        number = output.request_id
        text[number] = text.get(number, "") + output.delta
        count = len(output.outputs[0].token_ids)
        assert count == seen.get(number, 0) + 1, "one token a step"
        seen[number], last[number] = count, output
    ended = [last[number] for number in sorted(last, key=lambda n: int(n.split("-")[1]))]
    assert [o.outputs for o in ended] == [o.outputs for o in whole]
    assert [text[o.request_id] for o in ended] == [o.outputs[0].text for o in whole]
    nothing_left(engine)


def test_calls_inside_a_stream(llm):
    """A stream loses nothing to another call that steps the engine meanwhile."""
    engine = llm()
    (expected,) = engine.generate(["hello"], greedy(20))
    text, inner = "", []
    for output in engine.stream("hello", greedy(20)):
        text += output.delta
        inner += engine.generate(["other"], greedy(3))
    assert text == expected.outputs[0].text
    assert len(set(tokens(inner))) == 1
    nothing_left(engine)


def test_two_streams_take_turns(llm):
    engine = llm()
    expected = [o.outputs[0].text for o in engine.generate(["a", "b"], [greedy(9), greedy(4)])]
    one, other = engine.stream("a", greedy(9)), engine.stream("b", greedy(4))
    texts = [next(one).delta, next(other).delta]
    texts[1] += "".join(o.delta for o in other)
    texts[0] += "".join(o.delta for o in one)
    assert texts == expected


@pytest.mark.parametrize("depth", [0, 1])
def test_a_stream_that_nobody_reads_to_its_end(llm, depth):
    engine = llm(steps_in_flight=depth)
    stream = engine.stream(PROMPTS, greedy(50))
    for _ in range(6):
        next(stream)
    stream.close()
    nothing_left(engine)
    assert len(engine.generate(PROMPTS, greedy(2))) == len(PROMPTS)


def test_a_request_that_somebody_else_ends(llm):
    engine = llm()
    stream = engine.stream("hello", greedy(50))
    engine.engine.abort(next(stream).request_id)
    with pytest.raises(EngineError, match="ended by somebody else"):
        list(stream)


def test_an_error_leaves_nothing_behind(llm, monkeypatch):
    """Ctrl-C, or a model that fails: the call's requests are gone, and the next call works."""
    engine = llm()
    submit = type(engine.engine.runner).submit
    calls = []

    def failing(self, step):
        calls.append(step)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return submit(self, step)

    monkeypatch.setattr(type(engine.engine.runner), "submit", failing)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(PROMPTS, greedy(9))
    nothing_left(engine)
    assert len(engine.generate(PROMPTS, greedy(2))) == len(PROMPTS)


@pytest.mark.parametrize("way", ["generate", "stream"])
def test_ctrl_c_at_any_line_of_a_call(llm, way):
    """While requests are added, while they run, while outputs are gathered: nothing of the call is left."""
    engine = llm(steps_in_flight=1)
    expected = tokens(engine.generate(PROMPTS, greedy(3)))

    def run(at):
        lines = 0

        def interrupt(frame, event, arg):
            nonlocal lines
            mine = frame.f_code.co_filename.endswith(("nanofw/llm.py", "nanofw/engine.py", "nanofw/intake.py"))
            if not mine or frame.f_code.co_name in ("_leave", "abort", "_abort", "_put_back", "_mend"):  # a second one
                return None
            if event == "line":
                lines += 1
                if lines == at:
                    raise KeyboardInterrupt
            return interrupt

        before = sys.gettrace()
        sys.settrace(interrupt)
        try:
            list(getattr(engine, way)(PROMPTS, greedy(3)))
        except KeyboardInterrupt:
            sys.settrace(before)
            nothing_left(engine)  # and the error is still being handled
        finally:
            sys.settrace(before)
        return lines

    total = run(0)
    assert total > 200
    for at in range(1, total, 23):
        run(at)
        assert not engine._inboxes
    assert tokens(engine.generate(PROMPTS, greedy(3))) == expected


@pytest.mark.parametrize("number", [1, 3])
def test_an_error_while_requests_are_added(llm, monkeypatch, number):
    """None of the call is left, whichever of them the scheduler does not take."""
    engine, calls = llm(), []
    add = engine.engine.scheduler.add

    def failing(self, request):
        calls.append(request)
        if len(calls) == number:
            raise MemoryError("on purpose")
        add(request)

    monkeypatch.setattr(engine.engine.scheduler, "add", failing.__get__(engine.engine.scheduler))
    with pytest.raises(MemoryError) as caught:
        engine.generate(PROMPTS, greedy(2))
    assert caught.value.__notes__[0].startswith("raised by scheduler 'continuous' of nanofw")
    nothing_left(engine)
    assert len(engine.generate(PROMPTS, greedy(2))) == len(PROMPTS)


def test_one_bad_prompt_starts_none(llm):
    engine = llm()
    with pytest.raises(RequestError, match="prompt 1: the prompt has no tokens"):
        engine.generate(["fine", []], greedy(2))
    nothing_left(engine)


def test_forms_of_prompts(llm):
    engine = llm()
    ids = engine.tokenizer.encode("one")
    params = greedy(4)
    (text,) = engine.generate("one", params)
    (listed,) = engine.generate(["one"], params)
    (by_ids,) = engine.generate(ids, params)
    mixed = engine.generate(["one", ids], params)
    assert len({*tokens([text, listed, by_ids]), *tokens(mixed)}) == 1
    assert (text.prompt, by_ids.prompt) == ("one", None)
    assert by_ids.prompt_token_ids == tuple(ids)
    assert engine.generate([], params) == []


def test_as_many_params_as_prompts(llm):
    with pytest.raises(RequestError, match="2 prompts and 3 SamplingParams"):
        llm().generate(["a", "b"], [greedy(1)] * 3)


def test_chat_prompt(llm):
    engine = llm()
    asked = engine.chat_prompt("hi")
    assert asked == engine.chat_prompt([{"role": "user", "content": "hi"}])
    assert engine.tokenizer.decode(asked) == "user: hi\nassistant: "


def test_no_chat_template_is_said(llm, monkeypatch):
    engine = llm()
    monkeypatch.setattr(engine.tokenizer, "chat_template", None)
    with pytest.raises(RequestError, match="has no chat template"):
        engine.chat_prompt("hi")


def test_200_requests_give_everything_back(llm):
    """jjang-ai/vmlx#68."""
    engine = llm(max_num_seqs=16)
    outputs = engine.generate([f"{i}" for i in range(200)], [greedy(1 + i % 4) for i in range(200)])
    assert [len(t) for t in tokens(outputs)] == [1 + i % 4 for i in range(200)]
    nothing_left(engine)
