"""Stop strings found as text streams by: one automaton for all of them, whose cost for a character does not grow with their number.

Aho and Corasick, 1975. ``TextStream`` feeds it; a request's choices share one automaton.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import lru_cache


class StopAutomaton:
    """A tree of the strings' beginnings. A state is a number, 0 where nothing has begun; it stands for the longest end of the
    text that is a beginning of some string.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        """``strings``: none of them empty."""
        self._next: dict[tuple[int, str], int] = {}
        self._depth, self._found = [0], [""]  # of each state: its length, and the longest string that ends there
        for string in strings:
            state = 0
            for character in string:
                if (state, character) not in self._next:
                    self._next[state, character] = len(self._depth)
                    self._depth.append(self._depth[state] + 1)
                    self._found.append("")
                state = self._next[state, character]
            self._found[state] = string
        self._back = [0] * len(self._depth)  # the longest shorter end of the same text that is a beginning too
        self._open = [False] * len(self._depth)  # some string goes on here
        self._link()

    def _link(self) -> None:
        children: list[list[tuple[str, int]]] = [[] for _ in self._depth]
        for (state, character), child in self._next.items():
            children[state].append((character, child))
            self._open[state] = True
        waiting = deque([0])
        while waiting:  # shorter ones first, as longer ones look back at them
            state = waiting.popleft()
            for character, child in children[state]:
                if state:
                    self._back[child] = self.step(self._back[state], character)
                self._found[child] = self._found[child] or self._found[self._back[child]]
                waiting.append(child)

    def step(self, state: int, character: str) -> int:
        """The state after one more character."""
        while (following := self._next.get((state, character))) is None:
            if not state:
                return 0
            state = self._back[state]
        return following

    def found(self, state: int) -> str:
        """The longest string that the text ends with; empty for none."""
        return self._found[state]

    def pending(self, state: int) -> int:
        """How many characters at the end of the text may still become a string."""
        while state and not self._open[state]:
            state = self._back[state]
        return self._depth[state]


@lru_cache(maxsize=16)
def automaton(strings: tuple[str, ...]) -> StopAutomaton:
    """The automaton of these strings, made once for the choices of a call and for clients that always send the same."""
    return StopAutomaton(strings)
