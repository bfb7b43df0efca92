"""End tokens and fill-in-the-middle markers within a prompt. A model reads on over them as if they were not there, and a gate does
not: between the tokens of a row they would keep it shut.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from server.engine.pinned import PinnedSet
from server.engine.request import Sampling
from server.errors import ApiError, invalid
from server.policy import labels
from server.service import Service
from unbind_core.module_checks import MAX_GATE_WINDOW as REACH  # what stands further from the end no gate has in mind

MOST_GAPS = 3  # whose markers may stand in REACH tokens: two as examples, and the one that is asked for


def refuse_separated(ids: Sequence[int], served: Service, pinned: PinnedSet, asked: Sampling) -> None:
    """Raise ApiError 400 where modules apply and a prompt's ids hold what keeps gates shut: an end token among the last REACH, or
    among all where each one's log-probability is ``asked`` for, but for those that it begins with; more than MOST_GAPS of
    one fill-in-the-middle marker within any REACH.
    """
    if labels(pinned):
        _refuse_ends(ids, served, asked.prompt_logprobs is not None)
        _refuse_markers(ids, served)


def _refuse_ends(ids: Sequence[int], served: Service, scored: bool) -> None:
    ends = served.separators
    begins = next((place for place, token in enumerate(ids) if token not in ends), len(ids))
    first = begins if scored else max(begins, len(ids) - REACH)
    place = next((place for place in range(first, len(ids)) if ids[place] in ends), None)
    if place is None:
        return
    where = f"none may stand within the last {REACH} tokens"
    if place < len(ids) - REACH:
        where = "none may stand within a prompt whose tokens' log-probabilities are asked for"
    raise _refused(ids, place, "an end token", where, "send the text behind it alone", "end_token_in_prompt", served)


def _refuse_markers(ids: Sequence[int], served: Service) -> None:
    if served.markers.isdisjoint(ids):  # nearly all, and at once
        return
    seen: defaultdict[int, list[int]] = defaultdict(list)
    for place, token in enumerate(ids):
        if token in served.markers:
            places = seen[token]
            places.append(place)
            if len(places) > MOST_GAPS and place - places[-1 - MOST_GAPS] < REACH:
                where = f"no fill-in-the-middle marker may stand more than {MOST_GAPS} times within {REACH} tokens"
                remedy = "send fewer gaps at once, or none"
                raise _refused(ids, place, "one too many", where, remedy, "markers_in_prompt", served)


def _refused(
    ids: Sequence[int], place: int, what: str, where: str, remedy: str, code: str, served: Service
) -> ApiError:
    spelt = served.loaded.tokenizer.decode([ids[place]])
    text = f"prompt: token {place + 1} of {len(ids)} is {what}, {spelt}; while modules are on {where}: {remedy}"
    return invalid(text, "prompt", code)
