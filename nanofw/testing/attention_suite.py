"""The conformance suite of an attention.

On one of your own:

    from nanofw.testing import AttentionSuite

    class TestMyAttention(AttentionSuite):
        backend = MyAttention

It checks what the backend declares in its `capabilities`, and that it refuses the rest; a combination that it does not
serve is skipped with the backend's own reasons.
"""

from __future__ import annotations

from nanofw.testing.attention_masks import Masks
from nanofw.testing.attention_matches import Matches
from nanofw.testing.attention_memory import Memory
from nanofw.testing.attention_refusals import Refusals
from nanofw.testing.count_laws import CountLaws


class AttentionSuite(Matches, Masks, Memory, Refusals, CountLaws):
    """All checks of an attention: right, causal, windowed, blind to padding, honest about its limits and its cost."""
