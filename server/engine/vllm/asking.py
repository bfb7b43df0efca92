"""A request's sampling in vLLM's words, and vLLM's log-probabilities in ours.

An answer is made in one leg or more: where a guard bars a token or holds a gate open, or a gate opens on a request that steers, the
rest is asked for anew from there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from server.engine.request import Flight, TokenLogprob

HOTTEST = 2.0  # the highest temperature that vLLM takes


def parameters(flight: Flight, leg: str, digest: str) -> SamplingParams:
    """What the next leg of an answer asks for; ``digest`` is its set of modules', "" for none."""
    sampling, done = flight.request.sampling, len(flight.output)
    steered = flight.steered
    barred = list(flight.barred)
    watched = flight.request.watches or flight.request.report
    extra: dict[str, Any] = {}
    if digest:
        extra |= {"unbind": digest, "flight": flight.serial}
        if watched:
            extra |= {"leg": leg, "report": flight.request.report}
        if flight.request.quiet:
            extra["quiet"] = True
        if flight.settled is not None:
            extra |= {"forced": [list(span) for span in flight.forced], "settled": flight.settled}
    if flight.request.grammar is not None:
        extra |= {"grammar": flight.request.grammar.source, "owner": flight.request.owner}
        extra |= {"done": done, "or_end": flight.opened is not None}
    most = 1 if barred else max(1, sampling.max_tokens - done)  # a barred token is barred in its own place alone
    least = max(0, min(sampling.min_tokens, sampling.max_tokens) - done) if steered else 0
    bias = dict(sampling.logit_bias) if steered and sampling.logit_bias else None
    asked = SamplingParams(
        max_tokens=most,
        min_tokens=min(least, most),
        temperature=min(max(0.0, sampling.temperature), HOTTEST),
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        seed=None if sampling.seed is None else (sampling.seed + done) % 2**63,
        presence_penalty=sampling.presence_penalty if steered else 0.0,
        frequency_penalty=sampling.frequency_penalty if steered else 0.0,
        repetition_penalty=sampling.repetition_penalty if steered else 1.0,
        logit_bias=bias,
        stop_token_ids=sorted(flight.ends),
        ignore_eos=True,  # the ends are said above
        logprobs=sampling.logprobs,
        prompt_logprobs=sampling.prompt_logprobs if not (done or flight.prompt_logprobs) else None,
        detokenize=False,
        skip_special_tokens=False,
        output_kind=RequestOutputKind.DELTA,
        extra_args=extra or None,
        # where gates open in a prompt is heard of where they are computed
        skip_reading_prefix_cache=True if flight.request.watches or sampling.prompt_logprobs is not None else None,
    )
    if barred:
        asked._bad_words_token_ids = [[token] for token in barred]
    return asked


def plain(tokens: int, digest: str) -> SamplingParams:
    """So many of the likeliest tokens and nothing else, under a set of modules, "" for none."""
    return SamplingParams(
        temperature=0,
        max_tokens=tokens,
        ignore_eos=True,
        detokenize=False,
        extra_args={"unbind": digest} if digest else None,
    )


def entry(token: int, found: Mapping[int, Any], count: int) -> TokenLogprob:
    """vLLM's log-probabilities of one position, of which ``count`` alternatives were asked for."""
    ranked = sorted(((one.rank, other, one.logprob) for other, one in found.items()), key=lambda each: each[0])
    top = tuple((other, logprob) for rank, other, logprob in ranked if rank <= count)[:count]
    own = found[token]
    return TokenLogprob(token, own.logprob, top, own.rank)
