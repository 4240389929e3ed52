"""From tokens to text: no half characters, no part of a stop string (fault case A8)."""

import functools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanofw.text import REPLACEMENT, Detokenizer

TEXTS = {
    "accents": "Ça été, naïveté, Ångström, ñandú",
    "combining": "e\u0301a\u0308 Zu\u0308rich",
    "cjk": "软件工程师 と 소프트웨어",
    "flags": "🇩🇪🇯🇵🏴\U000e0067\U000e0062\U000e0073\U000e0063\U000e0074\U000e007f",
    "family": "👨‍👩‍👧‍👦 and 👩🏽‍🚀",
    "right-to-left": "שלום עולם",
    "replacement": "a \ufffd b\ufffd",
    "mixed": "x🇫🇷y好é\n\t z",
}


@pytest.fixture(scope="session")
def ids_of(byte_tokenizer):
    """A token a byte."""
    return functools.partial(byte_tokenizer.encode, add_special_tokens=False)


def stream(detokenizer, pieces):
    """Deltas of one growing sequence; the last one is what the end brings."""
    deltas = []
    for piece in pieces:
        deltas.append(detokenizer.add(piece))
        if detokenizer.stopped:
            break
    return [*deltas, detokenizer.finish()]


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_every_byte_a_token(byte_tokenizer, ids_of, text):
    """vllm-mlx#109: each token holds part of a character; the deltas hold whole ones."""
    ids = ids_of(text)
    assert len(ids) == len(text.encode())
    assert byte_tokenizer.decode(ids) == text
    detokenizer = Detokenizer(byte_tokenizer)
    deltas = stream(detokenizer, [[i] for i in ids])
    assert "".join(deltas) == text == detokenizer.text
    if REPLACEMENT not in text:
        assert not any(REPLACEMENT in delta for delta in deltas)
        assert len([d for d in deltas if d]) == len(text), "each character is shown as soon as it is whole"


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_unfinished_bytes_are_flushed_once(byte_tokenizer, ids_of, text):
    """A sequence that ends inside a character: its bytes come at the end, as the tokenizer shows them at once."""
    ids = ids_of(text)
    for end in range(len(ids) + 1):
        detokenizer = Detokenizer(byte_tokenizer)
        deltas = stream(detokenizer, [[i] for i in ids[:end]])
        assert "".join(deltas) == byte_tokenizer.decode(ids[:end])
        if REPLACEMENT not in text:
            assert not any(REPLACEMENT in delta for delta in deltas[:-1])
        assert detokenizer.finish() == ""


def test_any_bytes(byte_tokenizer):
    """Whatever a model generates, valid or not, in pieces of any size: the deltas join to the one-shot text."""

    @settings(max_examples=150, deadline=None)
    @given(st.lists(st.lists(st.integers(0, 256), max_size=4), max_size=12))
    def check(pieces):
        detokenizer = Detokenizer(byte_tokenizer)
        deltas = stream(detokenizer, pieces)
        whole = byte_tokenizer.decode([i for piece in pieces for i in piece], skip_special_tokens=True)
        assert "".join(deltas) == whole == detokenizer.text
        if REPLACEMENT not in whole:
            assert not any(REPLACEMENT in delta for delta in deltas)

    check()


def test_special_tokens(byte_tokenizer, ids_of):
    ids = [*ids_of("é"), byte_tokenizer.eos_token_id, *ids_of("!")]
    assert "".join(stream(Detokenizer(byte_tokenizer), [[i] for i in ids])) == "é!"
    shown = Detokenizer(byte_tokenizer, skip_special_tokens=False)
    assert "".join(stream(shown, [[i] for i in ids])) == "é<eos>!"


STOPS = [
    # text, stop strings, what is left
    ("one STOP two", ["STOP"], "one "),
    ("STOP", ["STOP"], ""),
    ("nothing here", ["STOP"], "nothing here"),
    ("ends in STO", ["STOP"], "ends in STO"),
    ("aaab", ["aab"], "a"),
    ("abcabd", ["abd"], "abc"),
    ("one two", ["two", "one two"], ""),
    ("x\n\ny", ["\n\n", "\n"], "x"),
    ("über好🇩🇪 end", ["好🇩"], "über"),
    ("a<|end|>b", ["<|end|>", "|"], "a<"),
    ("abcd", ["abcd", "bcd", "cd"], ""),
]


@pytest.mark.parametrize("size", [1, 2, 5, 100])
@pytest.mark.parametrize(("text", "stops", "left"), STOPS)
def test_stop_strings(byte_tokenizer, ids_of, text, stops, left, size):
    """Cut before the first whole match, however it is split over tokens, and no delta ever holds a part of one."""
    ids = ids_of(text)
    detokenizer = Detokenizer(byte_tokenizer, stops)
    deltas = stream(detokenizer, [ids[i : i + size] for i in range(0, len(ids), size)])
    assert "".join(deltas) == detokenizer.text
    assert detokenizer.text == left
    assert detokenizer.stopped == any(stop in text for stop in stops)
    assert not any(stop in detokenizer.text for stop in stops)


def test_stop_strings_of_any_kind(byte_tokenizer, ids_of):
    """Never shown and then taken back: what was shown stays a beginning of the final text, free of stop strings."""

    @settings(max_examples=200, deadline=None)
    @given(
        st.text("abé", max_size=12),
        st.lists(st.text("abé", min_size=1, max_size=4), min_size=1, max_size=3),
        st.lists(st.integers(1, 4), min_size=12, max_size=12),
    )
    def check(text, stops, sizes):
        ids, pieces = ids_of(text), []
        for size in sizes * 3:
            pieces.append(ids[:size])
            ids = ids[size:]
        detokenizer = Detokenizer(byte_tokenizer, stops)
        shown = ""
        for delta in stream(detokenizer, pieces):
            shown += delta
            assert not any(stop in shown for stop in stops)
            assert text.startswith(shown)
        assert shown == detokenizer.text
        if detokenizer.stopped:
            assert any(text[len(shown) :].startswith(stop) for stop in stops)
        else:
            assert shown == text

    check()


def test_a_text_read_at_once_is_decoded_once():
    class Counting:
        decoded = 0

        def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
            self.decoded += len(ids)
            return bytes(ids).decode()

    tokenizer = Counting()
    text = Detokenizer(tokenizer)
    assert text.add(list(b"hello there")) + text.finish() == "hello there"
    assert tokenizer.decoded == len(b"hello there")
