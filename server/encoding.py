"""Text to token ids within bounds: what cannot fit is refused before it is tokenised, and large texts leave the event loop.

A tokenizer takes a microsecond and a hundred bytes for each character or token: a text of megabytes would hold up every
other client, and its ids would fill the memory. The fast tokenizers release Python's lock while they work.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from server.errors import ApiError, invalid
from unbind_core.encoding import encode, encode_behind

P = ParamSpec("P")
T = TypeVar("T")
INLINE = 16_384  # characters or ids that the event loop tokenises itself: some 20 ms
PIECE = 65_536  # characters that are tokenised at a time where nobody knows yet whether the whole fits
THREADS = 2
WAITING = 32  # large texts that wait for a thread
# A text has about as many tokens as its pieces, never half as many: only over this share is it refused unread.
MARGIN = 2


def separators(tokenizer: PreTrainedTokenizerBase, ends: Collection[int]) -> frozenset[int]:
    """Of the tokens that end an answer those that the chat template, where there is one, does not set between messages."""
    if not tokenizer.chat_template:
        return frozenset(ends)
    talk = [{"role": role, "content": "a"} for role in ("user", "assistant", "user")]
    try:
        text = str(tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True))
    except (TemplateError, TypeError, ValueError):
        return frozenset(ends)
    return frozenset(ends).difference(encode(tokenizer, text))


class Encoder:
    """A tokenizer behind bounds. ``length`` is how many tokens a request may have, ``vocabulary`` how many the model knows."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, length: int, vocabulary: int | None = None) -> None:
        known = tokenizer.get_vocab()
        self._tokenizer, self.length, self._vocabulary = tokenizer, length, vocabulary or len(known)
        self.longest = max(map(len, known))  # characters; bytes where tokens are made of them
        # as where tokens were added to the tokenizer and the model was not made larger
        self._more = vocabulary is not None and max(known.values()) >= vocabulary
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="unbind-tokens")
        self._room = threading.BoundedSemaphore(THREADS + WAITING)
        encode(tokenizer, "a")  # the first call sets its truncation; later ones, in threads, change nothing

    async def run(self, size: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """``work(...)``, in a thread where ``size`` characters and ids are many. Raises ApiError 429 where many wait."""
        if size <= INLINE:
            return work(*args, **kwargs)
        if not self._room.acquire(blocking=False):
            text = "too many large prompts wait to be tokenised; try again"
            raise ApiError(429, text, code="queue_full", headers={"Retry-After": "2"})
        done = self._pool.submit(work, *args, **kwargs)
        done.add_done_callback(lambda _: self._room.release())
        return await asyncio.wrap_future(done)

    def ids(self, text: str, field: str, most: int | None = None, *, behind: bool = False) -> list[int]:
        """The ids of ``text``, alone or ``behind`` other tokens. Raises ApiError 400 where they are more than ``most``, by default
        what a request may have.

        That is certain where the characters are more than so many of the longest token can spell; else pieces are tried.
        It is not said of a text that is a little too long: whoever computes with the ids checks that.
        """
        limit = self.length if most is None else most
        if len(text) > limit * self.longest:
            raise self._too_long(f"{len(text)} characters", field, most)
        if len(text) > PIECE:
            counted = 0
            for piece in _pieces(text):
                counted += len(encode(self._tokenizer, piece))
                if counted > MARGIN * limit:
                    raise self._too_long(f"{len(text)} characters", field, most)
        return self._known((encode_behind if behind else encode)(self._tokenizer, text), field)

    def _known(self, ids: list[int], field: str) -> list[int]:
        """These ids. Raises ApiError 400 where the tokenizer made one that the model has no embedding for."""
        if self._more and (foreign := max(ids, default=0)) >= self._vocabulary:
            token = str(self._tokenizer.convert_ids_to_tokens(foreign))
            raise invalid(
                f"{field}: the tokenizer has the token {token!r}, and the model does not: it knows {self._vocabulary}, and this is "
                f"number {foreign}; leave it out",
                field,
            )
        return ids

    def check(self, ids: Sequence[int], field: str, most: int | None = None) -> None:
        """Raise ApiError 400 where there are more than ``most`` ids, by default what a request may have."""
        if len(ids) > (self.length if most is None else most):
            raise self._too_long(f"{len(ids)} tokens", field, most)

    def last(self, text: str, count: int) -> tuple[list[int], bool]:
        """The last ``count`` ids of a text of any length, and whether that is all of it."""
        count = max(count, 0)
        ids: list[int] = []
        left = text
        while left and len(ids) < count:
            start = _line_start(left, max(0, len(left) - PIECE))
            ids = (encode_behind if start else encode)(self._tokenizer, left[start:]) + ids
            left = left[:start]
        return self._known(ids[max(0, len(ids) - count) :], "prompt"), not left and len(ids) <= count

    def first(self, text: str, count: int) -> tuple[list[int], bool]:
        """The first ``count`` ids of a text of any length that stands behind other tokens, and whether that is all of it."""
        count = max(count, 0)
        ids: list[int] = []
        pieces = _pieces(text)
        piece = next(pieces, None)
        while piece is not None and len(ids) < count:
            ids += encode_behind(self._tokenizer, piece)
            piece = next(pieces, None)
        return self._known(ids[:count], "prompt"), piece is None and len(ids) <= count

    def close(self) -> None:
        """End the threads; what waits is dropped."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _too_long(self, what: str, field: str, most: int | None) -> ApiError:
        if most is not None:
            return invalid(f"{field}: {what} are more than the {most} tokens that are taken at once; split it", field)
        return invalid(
            f"This model's maximum context length is {self.length} tokens, and {field} has {what}; shorten it",
            field,
            "context_length_exceeded",
        )


def _pieces(text: str) -> Iterator[str]:
    """The text in pieces of about ``PIECE`` characters, cut where a line begins."""
    start = 0
    while start < len(text):
        end = min(start + PIECE, len(text))
        if end < len(text):
            end = max(text.rfind("\n", start, end), start) + 1 if "\n" in text[start:end] else end
        yield text[start:end]
        start = end


def _line_start(text: str, at: int) -> int:
    """The first beginning of a line from ``at`` on, or ``at`` where the rest is one line."""
    found = text.find("\n", at) if at else -1
    return found + 1 if 0 <= found < len(text) - 1 else at
