"""What a request may not ask for where a module applies to it and ``when_open`` is ``refuse``, and what is not heeded there."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from server.engine.request import Sampling
from server.errors import ApiError
from server.rules import WhenOpen


def under_modules(sampling: Sampling, when_open: WhenOpen, form: str = "", markers: Collection[int] = ()) -> Sampling:
    """The sampling as modules let it be; ``form``: the field that says what the answer must look like, if one does.

    A form can demand end tokens or fill-in-the-middle ``markers`` between an answer's others, over which gates stay shut;
    ``refuse_separated`` refuses such prompts. So the first ends the answer. Raises ApiError, see ``unsteered``.
    """
    if when_open == "refuse":
        sampling = unsteered(sampling, form)
    if form:
        return replace(sampling, ignore_eos=False, stop_token_ids=(*sampling.stop_token_ids, *markers))
    return sampling


def unsteered(sampling: Sampling, form: str = "") -> Sampling:
    """The sampling without its penalties, which pass, as editors send them unasked, but are heeded nowhere: no open gate heeds them
    (``GenerationRequest.strips``), so a client could tell by what they do to an answer where one is open.

    Raise ApiError 403 for the first field that reads log-probabilities or steers the choice of tokens.
    ``form``: the field that says what the answer must look like, if one does.
    """
    for field, asked in (
        ("logprobs", sampling.logprobs is not None),
        ("prompt_logprobs", sampling.prompt_logprobs is not None),
        ("logit_bias", bool(sampling.logit_bias)),
        ("min_tokens", sampling.min_tokens > 0),
        ("ignore_eos", sampling.ignore_eos),
        (form, bool(form)),
    ):
        if asked:
            raise ApiError(
                403,
                f"{field}: is refused to requests under a module here (when_open); leave it out",
                param=field,
                code="refused_under_modules",
            )
    return replace(sampling, presence_penalty=0.0, frequency_penalty=0.0, repetition_penalty=1.0)
