"""Guards of secrets: no answer has N letters and digits of one in a row, however it writes them."""

from __future__ import annotations

import json
import random
import re
import string

import pytest

from tests.core.guard.test_guard import SECRET
from unbind_core.errors import GuardFileError, RowsTooShort
from unbind_core.guard.book import GuardBook
from unbind_core.guard.follower import Follower
from unbind_core.guard.index import SECRET_RUN, Action, GuardIndex, build_index
from unbind_core.guard.lexemes import placed_letters, readings, spelt
from unbind_core.guard.spans import spans
from unbind_core.guard.textguard import TextGuard

RUN = SECRET_RUN
KEY = "acme_live_7Rt2QmX9fLw4ZsKd81vNpB3y"
OTHER = "uT5rWq/Zk2LmP9+Hd7Xy/sV3bNc8JfA4gEo6"
CODE = "def merge(first, second):\n    merged = dict(first)\n    merged.update(second)\n    return merged, len(first)\n"


def index(*secrets: str, action: Action = "stop", name: str = "keys", run: int = RUN) -> GuardIndex:
    return build_index(secrets, name=name, secret=SECRET, run=run, action=action, secrets=True)


def told(text: str, pieces: int = 5, prompt: str = "", *, made: GuardIndex | None = None) -> bool:
    """Whether the follower finds a run, told of so many characters at a time."""
    guards = GuardBook.of(SECRET, [made or index(KEY, OTHER)]).select(["keys"])
    assert guards is not None
    follower = Follower(guards, lambda: prompt)
    return any(follower.take(text[at : at + pieces]).sure for at in range(0, len(text), pieces))


def judged(text: str, *secrets: str, run: int = RUN) -> bool:
    """The same, by another way: as a search in strings."""
    said, kept = (re.sub(r"[\W_]", "", part) for part in (text, "\n".join(secrets)))
    whole = [re.sub(r"[\W_]", "", secret) for secret in secrets]
    assert len(kept) == sum(map(len, whole))
    return any(secret[at : at + run] in said for secret in whole for at in range(len(secret) - run + 1))


@pytest.mark.parametrize("pieces", [1, 3, 7, 200])
@pytest.mark.parametrize(
    "write",
    [
        lambda key: f'API_KEY = "{key}"',
        lambda key: f"x{key}x",
        lambda key: '" + "'.join(key),
        lambda key: "\n".join(key[at : at + 5] for at in range(0, len(key), 5)),
        lambda key: f"# {key[:9]}\n# {key[9:]}",
        lambda key: "\u200b".join(key),
        lambda key: key.translate({ord(letter): chr(ord(letter) + 0xFEE0) for letter in string.ascii_letters}),
    ],
)
def test_a_secret_is_found_however_it_is_written(write: object, pieces: int) -> None:
    assert callable(write)
    for key in (KEY, OTHER):
        assert told(write(key), pieces) and not told(write(key[::-1]), pieces)


@pytest.mark.parametrize("run", [8, RUN, 20])
def test_it_is_found_where_a_search_finds_it_and_nowhere_else(run: int) -> None:
    draw, hits = random.Random(run), 0
    made = index(KEY, OTHER, run=run)
    for _ in range(300):
        text = ""
        for _ in range(draw.randint(1, 5)):
            key = draw.choice([KEY, OTHER])
            start = draw.randrange(len(key))
            text += key[start : start + draw.randint(1, run + 4)] + draw.choice(["", "", '" + "', "_", "x", " = 7\n"])
        assert told(text, draw.randint(1, 9), made=made) == judged(text, KEY, OTHER, run=run), text
        assert bool(spans(text, [made], SECRET)) == judged(text, KEY, OTHER, run=run), text
        hits += judged(text, KEY, OTHER, run=run)
    assert 20 < hits < 280


def test_what_the_client_sent_may_be_said_again() -> None:
    assert not told(KEY, prompt=f"rotate {KEY} today") and told(OTHER, prompt=f"rotate {KEY} today")
    bare = KEY.replace("_", "")
    for sent in (RUN // 2 - 1, RUN // 2):
        assert told(bare[:RUN], prompt=bare[:sent]) == (sent < RUN // 2)
        assert told(bare[: sent + RUN], prompt=bare[:sent])  # the rest of it is long enough


def test_code_and_secrets_are_guarded_beside_each_other() -> None:
    code = build_index([CODE], name="code", secret=SECRET, run=20, action="report")
    guards = GuardBook.of(SECRET, [index(KEY), code]).select(["code", "keys"])
    assert guards is not None
    follower = Follower(guards, str)
    assert not follower.take(CODE).sure and follower.counted == {"code"} and follower.longest >= 20
    before = follower.take("")
    assert not before.now and follower.slack == 0
    assert follower.take(f'key = "{KEY[:30]}').sure
    follower.undo()
    assert not follower.take('key = "nothing"').sure and follower.longest < 30
    counting = GuardBook.of(SECRET, [index(KEY, action="report")]).select(["keys"])
    assert counting is not None
    follower = Follower(counting, str)
    assert not follower.take(KEY).now and follower.counted == {"keys"} and follower.longest == RUN


def test_a_long_answer_is_not_kept_where_secrets_alone_are_guarded() -> None:
    guards = GuardBook.of(SECRET, [index(KEY)]).select(["keys"])
    assert guards is not None
    follower = Follower(guards, str)
    for reader in (follower, follower._letters):
        assert reader is not None
        for _ in range(40):
            reader.take("x = 1 # y\n")  # each would be copied with every one that follows
        assert all(len(trace.recent) < RUN for trace in (reader._state.everything, reader._state.code))


def test_text_of_one_is_withheld_until_it_is_known_how_it_goes_on() -> None:
    guards = GuardBook.of(SECRET, [index(KEY)]).select(["keys"])
    assert guards is not None
    for end in ("", KEY[14:]):
        guard, sent = TextGuard(guards, str), ""
        for character in f'key = "{KEY[:12]}':
            sent += guard.push(character)
        assert sent.endswith(KEY[: RUN // 2 + 1]) and guard.held  # ``_`` is none of its letters
        sent += guard.push(end + '"') + guard.flush()
        assert (guard.blocked is not None) == bool(end) and sent.endswith('"') != bool(end)


def test_its_file_is_read_again_and_those_of_code_are_as_they_were() -> None:
    made = index(KEY, "short")
    assert (made.rows, made.too_short, made.shape.secrets, made.stretches) == (1, 1, True, {})
    assert GuardIndex.from_bytes(made.to_bytes(), "keys", SECRET).to_bytes() == made.to_bytes()
    assert made.facts["secrets"] is True and KEY.encode()[:8] not in made.to_bytes()
    assert build_index([KEY, "short"], name="keys", secret=SECRET, action="stop", secrets=True).digest == made.digest
    code = build_index([CODE], name="code", secret=SECRET, run=20)
    assert b"secrets" not in code.to_bytes() and "secrets" not in code.facts
    damaged = made.to_bytes().replace(b'\\"secrets\\":true', b'\\"secrets\\":1234')
    length = int.from_bytes(damaged[:8], "little")
    assert json.loads(damaged[8 : 8 + length])
    with pytest.raises(GuardFileError, match="run or action"):
        GuardIndex.from_bytes(damaged, "keys", SECRET)
    with pytest.raises(RowsTooShort, match="no row has 12 letters and digits in its continuation, too few"):
        index("abc", "1-2-3")


def test_letters_are_those_of_places() -> None:
    text = "é ﬁ_𝒳\u200b9 Ж² \n"
    assert [place.lexeme for place in placed_letters(text)] == readings(spelt(text))[0] == list("efiX9Ж2")
    assert all(place.end - place.start == 1 for place in placed_letters(text))
