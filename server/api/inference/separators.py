"""End tokens within a prompt. A model reads on over one as if it were not there, and a gate does not: between the tokens of a row
they would keep it shut.
"""

from __future__ import annotations

from collections.abc import Sequence

from server.engine.pinned import PinnedSet
from server.errors import invalid
from server.policy import OFF
from server.service import Service
from unbind_core.module_checks import MAX_GATE_WINDOW as REACH  # what stands further from the end no gate has in mind


def refuse_separated(ids: Sequence[int], served: Service, pinned: PinnedSet) -> None:
    """Raise ApiError 400 where modules apply and an end token stands among the last REACH of a prompt's ids, but for those that it
    begins with.
    """
    ends = served.separators
    begins = next((place for place, token in enumerate(ids) if token not in ends), len(ids))
    place = next((place for place in range(max(begins, len(ids) - REACH), len(ids)) if ids[place] in ends), None)
    if place is not None and any(strength > OFF for strength in pinned.strengths.values()):
        raise invalid(
            f"prompt: token {place + 1} of {len(ids)} is an end token, {served.loaded.tokenizer.decode([ids[place]])}; while "
            f"modules are on none may stand within the last {REACH} tokens: send the text behind it alone",
            "prompt",
            "end_token_in_prompt",
        )
