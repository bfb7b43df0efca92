"""Tokens -> text as it streams: whole characters only, and never a part of a stop string.

Sits between the sampler and the answer: one ``TextStream`` for each request.
"""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Collection, Sequence
from itertools import islice

from transformers import PreTrainedTokenizerBase

from server.engine.pieces import pieces_of
from server.engine.stops import automaton

REPLACEMENT = "\ufffd"


class TextStream:
    """Turns one request's tokens into text, a piece at a time.

    A piece is held back while it ends in half a character or in what may become a stop string. ``min_tokens``: what the first
    so many tokens complete stops nothing. ``shown``: special tokens that the text spells. ``prompt``: what the text goes on
    from. Many tokenizers strip the blank that a text begins with, which an answer's first one is not.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stop: Sequence[str],
        min_tokens: int = 0,
        shown: Collection[int] = (),
        prompt: Sequence[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._pieces = pieces_of(tokenizer)
        self._utf8 = getincrementaldecoder("utf-8")("replace") if self._pieces.byte_level else None
        self._stops = automaton(strings) if (strings := tuple(one for one in stop if one)) else None
        self._state = 0
        self._stop_ids = {self._pieces.by_text[text]: text for text in stop if text in self._pieces.by_text}
        self._shown = {token: str(tokenizer.convert_ids_to_tokens(token)) for token in shown}
        self._unstopped = min_tokens  # tokens that are still to come before anything stops
        self._ids = [] if self._pieces.byte_level else self._before(prompt)
        self._from = 0  # decoding starts here: the tokenizer may need what stands before to place a space
        self._done = len(self._ids)  # tokens before this index are in the text already
        self._held = ""

    def push(self, token: int) -> tuple[str, str]:
        """Text that is now certain, and the stop string that was met (which is not part of the text), or nothing."""
        self._unstopped -= 1
        if token in self._stop_ids and self._unstopped < 0:
            return self.flush(), self._stop_ids[token]
        if token in self._shown:
            return self._release(self._late() + self._shown[token])
        if self._utf8 is not None:
            return self._release(self._utf8.decode(self._pieces.spell(token)))
        if token in self._pieces.special:
            return "", ""  # and what stood before it is what the next one goes on from
        self._ids.append(token)
        before = self._decode(self._ids[self._from : self._done])
        now = self._decode(self._ids[self._from :])
        end = len(self._ids)
        if now.endswith(REPLACEMENT):
            if end - self._done <= 4:  # no character has more than 4 bytes
                return "", ""
            end, now = self._settled(now)
        self._from, self._done = self._done, end
        return self._release(now[len(before) :])

    def _settled(self, now: str) -> tuple[int, str]:
        """How many tokens no later one changes, and their part of the text ``now``, which ends in bytes that are no character.

        The last three tokens may be the beginning of one, unless a whole character reaches among them.
        """
        for end in range(len(self._ids) - 3, len(self._ids)):
            text = self._decode(self._ids[self._from : end])
            if now.startswith(text):
                return end, text
        return len(self._ids), now

    def peek(self, token: int) -> str:
        """The text that ``token`` would add, stop strings or not; nothing changes."""
        if token in self._shown:
            return self._shown[token]
        if self._utf8 is not None:
            state, spelt = self._utf8.getstate(), self._pieces.spell(token)
            if spelt.isascii() and not state[0]:
                return spelt.decode("ascii")
            text = self._utf8.decode(spelt)
            self._utf8.setstate(state)
            return text
        if token in self._pieces.special:
            return ""
        ids = [*self._ids[self._from :], token]
        before, now = self._decode(ids[: self._done - self._from]), self._decode(ids)
        return "" if now.endswith(REPLACEMENT) else now[len(before) :]

    def flush(self) -> str:
        """What is still held back, at the end of the answer."""
        text, _ = self._release(self._late())
        text, self._held, self._state = text + self._held, "", 0
        return text

    def _late(self) -> str:
        """Half a character that no token completes any more; what comes next is decoded by itself."""
        if self._utf8 is not None:
            return self._utf8.decode(b"", final=True)
        late = ""
        if self._done < len(self._ids):
            before = self._decode(self._ids[self._from : self._done])
            late = self._decode(self._ids[self._from :])[len(before) :]
        self._ids, self._from = self._ids[self._from : self._done], 0
        self._done = len(self._ids)
        return late

    def _before(self, prompt: Sequence[int]) -> list[int]:
        """The last tokens of the prompt that are whole characters, if any: half a one would take what follows it along."""
        last = list(islice((token for token in reversed(prompt) if token not in self._pieces.special), 8))[::-1]
        for end in range(len(last), max(len(last) - 4, 0), -1):
            for start in range(end - 1, max(end - 5, -1), -1):
                if REPLACEMENT not in self._decode(last[start:end]):
                    return last[start:end]
        return []

    def _decode(self, ids: list[int]) -> str:
        return (
            str(self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))
            if ids
            else ""
        )

    def _release(self, new: str) -> tuple[str, str]:
        """Take in new text. Of the stop strings that it completes, the one that begins first cuts it."""
        if self._stops is None:
            return new, ""
        state, start = self._state, len(self._held)
        text = self._held + new
        cut, met = len(text), ""
        for end, character in enumerate(new, start + 1):
            state = self._stops.step(state, character)
            found = self._stops.found(state)
            if found and self._unstopped < 0 and end - len(found) < cut:
                cut, met = end - len(found), found
        keep = 0 if met else self._stops.pending(state)
        self._state, self._held = (0, "") if met else (state, text[len(text) - keep :])
        return text[: cut - keep], met
