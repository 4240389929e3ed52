"""Contract of a sampler: from logits to tokens, on the device, the whole batch at once."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nanofw.component import Component

if TYPE_CHECKING:
    import torch

    from nanofw.batch import Sampling


@dataclass(frozen=True, slots=True, eq=False)
class Sampled:
    """A step's tokens, on the device.

    Attributes:
        tokens: `[B]` int64.
        logprobs: `[B]` float32 of the chosen tokens, if asked for.
        top_ids, top_logprobs: `[B, K]`, the likeliest tokens in falling order, K the most that any row asked for.
    """

    tokens: torch.Tensor
    logprobs: torch.Tensor | None = None
    top_ids: torch.Tensor | None = None
    top_logprobs: torch.Tensor | None = None


class Sampler(Component):
    """Chooses tokens. A row's token depends only on its seed, its position and its logits: never on the company.

    Random numbers are counter-based, a function of (seed, position), so nothing is drawn from a shared stream and a
    request that is preempted and recomputed gets the same tokens again.

    Class attributes a plugin declares:
        batch_invariant_on: types of devices on which log-probabilities too have the same bits alone and in any company.

    Args:
        options: an instance of its `Options`.
    """

    batch_invariant_on: Collection[str] = ()

    def __init__(self, options: Any) -> None:
        self.options = options

    @abstractmethod
    def sample(self, logits: torch.Tensor, sampling: Sampling | None) -> Sampled:
        """Choose a token for each row.

        Args:
            logits: `[B, V]`, any floating type.
            sampling: the rows' parameters as tensors on the same device; None: arg-max for all, no logprobs.

        Returns:
            Tokens `[B]` int64 on the same device, and the log-probabilities that rows ask for.
        """
