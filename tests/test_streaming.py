"""Streamed text, whatever becomes of the request meanwhile: whole characters, no part of a stop string (case A8)."""

import sys

import pytest
import torch

from nanofw import Config, SamplingParams
from nanofw.build import build_engine
from nanofw.testing.null import NullModel, NullSource
from nanofw.text import REPLACEMENT

TEXT = "Grüße, 你好 🇩🇪 👨‍👩‍👧‍👦 e\u0301nd of it"
PROMPT = [65]


class Scripted(NullModel):
    """Says the same text whatever it is asked: the token at each position is given."""

    def __init__(self, source, script):
        super().__init__(source)
        self.script = torch.tensor(script)

    def forward(self, batch, attention, kv):
        positions = batch.positions[batch.logits_indices] + 1 - len(PROMPT)
        return torch.nn.functional.one_hot(self.script[positions % len(self.script)], self.spec.vocab_size).float()


@pytest.fixture
def engine(host, byte_tokenizer):
    """An engine that says `text`, a token a byte, then an end id: `engine(text, **settings)`."""

    def build(text=TEXT, **settings):
        eos = byte_tokenizer.eos_token_id
        script = [*byte_tokenizer.encode(text, add_special_tokens=False), eos]
        source = NullSource(len(byte_tokenizer), eos_token_ids=(eos,))
        given = {"device": "cpu", "kv_blocks": 64, "max_model_len": 256} | settings
        built = build_engine(Config.build(given), host, source, Scripted(source, script))
        built.tokenizer = byte_tokenizer
        return built

    return build


def deltas(engine, *params):
    """For each of `params` a request: its deltas and its last output."""
    for i, how in enumerate(params):
        engine.add(str(i), PROMPT, how)
    found = {str(i): [] for i in range(len(params))}
    last = {}
    for output in engine.run():
        found[output.request_id].append(output.delta)
        last[output.request_id] = output
    return [(found[str(i)], last[str(i)]) for i in range(len(params))]


def greedy(count=200, **params):
    return SamplingParams(temperature=0, max_tokens=count, **params)


SETTINGS = pytest.mark.parametrize(
    "settings",
    [
        {},
        {"steps_in_flight": 1},
        {"kv_blocks": 20, "options": {"kv_cache": {"block_size": 4}}},
        {"kv_blocks": 20, "options": {"kv_cache": {"block_size": 4}}, "steps_in_flight": 1},
    ],
    ids=["plain", "in-flight", "put-back", "put-back-in-flight"],
)


@SETTINGS
def test_whole_characters(engine, settings):
    """vllm-mlx#109, through the engine: also when a request is put back in the middle of a character."""
    results = deltas(engine(**settings), *[greedy()] * 3)
    assert any(output.preemptions for _, output in results) == ("kv_blocks" in settings)
    for pieces, output in results:
        assert "".join(pieces) == output.outputs[0].text == TEXT
        assert not any(REPLACEMENT in piece for piece in pieces)
        assert output.outputs[0].finish_reason == "stop"


@SETTINGS
def test_cut_anywhere(engine, byte_tokenizer, settings):
    """max_tokens in the middle of a character: its bytes are flushed once, at the end."""
    counts = [3, 4, 10, 12, 17, 21]
    for count, (pieces, output) in zip(counts, deltas(engine(**settings), *map(greedy, counts)), strict=True):
        whole = byte_tokenizer.decode(output.outputs[0].token_ids)
        assert len(output.outputs[0].token_ids) == count
        assert "".join(pieces) == output.outputs[0].text == whole
        assert not any(REPLACEMENT in piece for piece in pieces[:-1])


@SETTINGS
@pytest.mark.parametrize(
    ("stop", "left"),
    [
        ("你", "Grüße, "),
        ("🇩🇪", "Grüße, 你好 "),
        ("ß", "Grü"),
        ("G", ""),
        (["nd of", "it"], "Grüße, 你好 🇩🇪 👨‍👩‍👧‍👦 e\u0301"),
        ("nothing like it", TEXT),
    ],
)
def test_stop_strings(engine, settings, stop, left):
    """Cut before the match, never shown in part, with reason "stop"; the tokens that made it stay in `token_ids`."""
    (pieces, output), (_, other) = deltas(engine(**settings), greedy(stop=stop), greedy())
    assert "".join(pieces) == output.outputs[0].text == left
    assert output.outputs[0].finish_reason == "stop"
    assert other.outputs[0].text == TEXT, "the company goes on"
    assert len(output.outputs[0].token_ids) <= len(TEXT.encode()) + 1


@SETTINGS
@pytest.mark.parametrize(
    ("least", "left"), [(0, "ab "), (7, "ab "), (8, "ab STOP cd "), (15, "ab STOP cd "), (16, "ab STOP cd STOP ef")]
)
def test_stop_strings_before_min_tokens(engine, settings, least, left):
    """Passed over, and shown as text; the next one that becomes whole counts. A token here is a byte."""
    running = engine("ab STOP cd STOP ef", **settings)
    (pieces, output), *_ = deltas(running, *[greedy(stop="STOP", min_tokens=least)] * 3)
    assert "".join(pieces) == output.outputs[0].text == left
    assert output.outputs[0].finish_reason == "stop"


def test_a_stop_string_that_never_comes_is_shown_at_the_end(engine):
    """What was held back as its possible beginning is text after all."""
    (pieces, output) = deltas(engine("abc STO"), greedy(stop="STOP"))[0]
    assert "".join(pieces) == output.outputs[0].text == "abc STO"


@pytest.mark.parametrize("depth", [0, 1])
def test_abort_in_the_middle_of_a_character(engine, depth):
    """What is there is given out, unfinished bytes as a mark, and the deltas still join to it."""
    running = engine("a你", steps_in_flight=depth)
    running.add("x", PROMPT, greedy())
    pieces = []
    while len(running.requests["x"].output_ids) < 2:
        pieces += [output.delta for output in running.step()]
    output = running.abort("x")
    assert "".join([*pieces, output.delta]) == output.outputs[0].text == "a" + REPLACEMENT


@pytest.mark.parametrize("depth", [0, 1])
def test_ctrl_c_at_any_line(engine, depth):
    """While tokens become text and text becomes outputs: nothing is lost, told twice, or shown that must not be."""
    ways = {
        "stop": greedy(stop="END"),
        "all": greedy(),
        "logprobs": greedy(logprobs=1),
        "quiet": greedy(),
        "least": greedy(stop="STOP", min_tokens=8),
        "two": greedy(9, n=2),
    }

    def run(at):
        running, lines = engine("ab STOP é你 END", steps_in_flight=depth), 0

        def interrupt(frame, event, arg):
            nonlocal lines
            mine = frame.f_code.co_filename.endswith(("nanofw/text.py", "nanofw/request.py", "nanofw/engine.py"))
            if not mine or frame.f_code.co_name in ("step", "_broke_off", "_mend", "_put_back"):
                return None
            if event == "line":
                lines += 1
                if lines == at:
                    raise KeyboardInterrupt
            return interrupt

        for name, how in ways.items():
            running.add(name, PROMPT, how, stream=name != "quiet")
        shown, last = {}, {}
        while running.has_work:
            before = sys.gettrace()
            sys.settrace(interrupt)
            try:
                outputs = running.step()
            except KeyboardInterrupt:
                outputs = []
            finally:
                sys.settrace(before)
            for output in outputs:
                key = output.request_id, output.outputs[0].index
                shown[key] = shown.get(key, "") + output.delta
                if output.finished:
                    last[output.request_id] = output
        for name, output in last.items():
            assert [c.text for c in output.outputs] == [shown[name, c.index] for c in output.outputs]
        return lines, {name: output.outputs for name, output in last.items()}

    total, expected = run(0)
    assert expected["stop"][0].text == "ab STOP é你 "
    assert expected["least"][0].text == expected["all"][0].text == "ab STOP é你 END"
    for at in range(1, total, 61):
        assert run(at)[1] == expected, f"line {at} of {total}"


def test_abort_from_an_observer_with_text_ready(engine):
    """What the step was about to report is in the delta of the abort, once."""
    running, aborted = engine(), []

    def abort(*, event):
        if event.output.request_id == "first":
            aborted.append(running.abort("second"))

    running.observers["nanofw_request_finished"] = abort
    for name, count in (("first", 2), ("second", 9)):
        running.add(name, PROMPT, greedy(count))
    pieces = [output.delta for output in running.run() if output.request_id == "second"]
    assert (pieces, aborted[0].delta, aborted[0].outputs[0].text) == (["G"], "r", "Gr")


def test_not_streamed_is_the_same_text(engine):
    """Stop strings are watched for, and text is complete, whether anybody listens or not."""
    quiet = engine()
    for name, how in (("stop", greedy(stop="你")), ("all", greedy()), ("cut", greedy(4))):
        quiet.add(name, PROMPT, how, stream=False)
    found = {o.request_id: o for o in quiet.run()}
    assert found["stop"].delta == found["stop"].outputs[0].text == "Grüße, "
    assert found["all"].delta == found["all"].outputs[0].text == TEXT
    assert found["cut"].outputs[0].text == "Grü"


def test_the_end_id_is_a_token_without_text(engine, byte_tokenizer):
    (pieces, output) = deltas(engine("ab"), greedy(skip_special_tokens=False))[0]
    assert output.outputs[0].token_ids[-1] == byte_tokenizer.eos_token_id
    assert "".join(pieces) == output.outputs[0].text == "ab"
