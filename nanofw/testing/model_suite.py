"""The conformance suite of a model.

On one of your own:

    from nanofw.testing import ModelSuite

    class TestMyModel(ModelSuite):
        backend = MyModel

The oracle is transformers on the same weights: float64 says what is right, and its own error in the model's dtype how
much may be missing. The model attends with the plain attention of this package. What a plugin refuses is skipped with
its reasons, in all checks but the one that judges refusals.
"""

from __future__ import annotations

from nanofw.testing.count_laws import CountLaws
from nanofw.testing.model_contract import Contract
from nanofw.testing.model_invariance import ModelInvariance
from nanofw.testing.model_matches import Matches
from nanofw.testing.model_weights import Weights


class ModelSuite(Matches, Contract, Weights, ModelInvariance, CountLaws):
    """All checks of a model: the logits of transformers in every kind of step, from every weight, and no state."""
