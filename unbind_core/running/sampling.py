"""Nucleus sampling without sorting the vocabulary, which takes the library longer than the pass before it.

A token is drawn from the whole distribution and stays if it lies in the nucleus, else another is drawn: what stays is distributed
as the nucleus is. Whether it does is told by one sum, of what is likelier.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import LogitsProcessor

from unbind_core.errors import UnbindError

LEAST = torch.finfo(torch.float32).tiny  # of the mass: the likeliest token is in every nucleus


class Nucleus(LogitsProcessor):
    """Draws a token of each row with torch's generator and leaves no other: greedy decoding takes it then. It comes last.

    A token is in the nucleus if what is likelier has less than ``top_p`` of the mass at ``temperature``; tokens as likely as its
    last one are.
    """

    def __init__(self, temperature: float, top_p: float) -> None:
        self._temperature, self._top_p = temperature, max(top_p, LEAST)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """``scores`` [B,V], any float -> [B,V], 0 at the token that was drawn and -inf elsewhere.

        Raises UnbindError where a row of them has no distribution: one is not a number, or all are -inf.
        """
        probabilities = torch.softmax(scores.float() / self._temperature, -1)
        below = probabilities.cumsum(-1)
        if not bool(below[:, -1].isfinite().all()):
            raise UnbindError(
                "the model's logits are not finite, so no token can be drawn; load it in float32 or bfloat16"
            )
        tokens, stay = self._drawn(probabilities, below)
        while not bool(stay.all()):
            again = (~stay).nonzero()[:, 0]
            tokens[again], stay[again] = self._drawn(probabilities[again], below[again])
        return torch.full_like(scores, -torch.inf).scatter_(1, tokens[:, None], 0.0)

    def _drawn(self, probabilities: Tensor, below: Tensor) -> tuple[Tensor, Tensor]:
        """A token of each row [B,V] of the whole distribution, int64 [B], and whether it lies in the nucleus, bool [B]."""
        at = torch.rand((len(below), 1), device=below.device) * below[:, -1:]
        tokens = torch.searchsorted(below, at, right=True).clamp(max=below.shape[1] - 1)
        likely = probabilities.gather(1, tokens)
        stay = likely[:, 0] > 0
        if self._top_p < 1:
            stay &= probabilities.where(probabilities > likely, 0).sum(-1) < self._top_p
        return tokens[:, 0], stay
