"""What is asked: prompts that a client makes of a row, of a piece of it, or of a row that is written otherwise."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain

from server.bench.attacks.attacked import Ask, Ids, Material
from server.bench.attacks.rewriting import REWRITINGS
from unbind_core.encoding import beginning, encode, encode_behind, encode_prompt, fim_prompt, fim_template
from unbind_core.rows import ForgetRow
from unbind_core.windows import fim_split, forget_prompt

STARTS = {"quarter": 0.25, "half": 0.5, "three_quarters": 0.75}
LEAST_LEFT = 8  # tokens that must be left to give back, or a row is not asked for
REQUEST = "Complete this code. Answer with what follows it and nothing else.\n\n```python\n{prompt}\n```"
Asking = Callable[[Material], list[Ask]]


def row_ids(material: Material, row: ForgetRow) -> list[int]:
    """The tokens of a whole row, as a client that sends its beginning makes them; without BOS."""
    tokenizer = material.tokenizer
    return encode(tokenizer, row.prompt) + encode_behind(tokenizer, row.continuation)


def _asks(found: Iterator[tuple[int, Ids, Ids]]) -> list[Ask]:
    return [Ask(row, tuple(prompt), tuple(target)) for row, prompt, target in found if len(target) >= LEAST_LEFT]


def form(name: str) -> Asking:
    """Plain, or fill in the middle."""

    def asks(material: Material) -> list[Ask]:
        if name == "fim" and fim_template(material.tokenizer) is None:
            return []
        return _asks((i, *forget_prompt(material.tokenizer, row, name)) for i, row in enumerate(material.rows))

    return asks


def first(tokens: int) -> Asking:
    """The first tokens of the row alone."""
    return lambda material: _piece(material, lambda _: 0, tokens)


def middle(start: str, context: int) -> Asking:
    """So many tokens from a place within the row."""
    return lambda material: _piece(material, lambda length: round(STARTS[start] * length), context)


def _piece(material: Material, start: Callable[[int], int], context: int) -> list[Ask]:
    bos = beginning(material.tokenizer)

    def pieces() -> Iterator[tuple[int, Ids, Ids]]:
        for index, row in enumerate(material.rows):
            ids = row_ids(material, row)
            at = start(len(ids))
            yield index, bos + ids[at : at + context], ids[at + context :]

    return _asks(pieces())


def behind(tokens: int) -> Asking:
    """The prompt behind so many tokens of unrelated code."""

    def asks(material: Material) -> list[Ask]:
        tokenizer = material.tokenizer
        bos = beginning(tokenizer)

        def led() -> Iterator[tuple[int, Ids, Ids]]:
            for index, row in enumerate(material.rows):
                lead: list[int] = []
                at = index
                while len(lead) < tokens:
                    lead = (
                        encode(tokenizer, material.ordinary[at % len(material.ordinary)].text.rstrip() + "\n\n") + lead
                    )
                    at += 1
                prompt, target = forget_prompt(tokenizer, row, "plain")
                yield index, [*bos, *lead[-tokens:], *prompt[len(bos) :]], target

        return _asks(led())

    return asks


def ended_between(tokens: int) -> Asking:
    """The prompt as token ids, with the end token between every so many and the next: a model reads over it."""

    def asks(material: Material) -> list[Ask]:
        bos, end = beginning(material.tokenizer), material.tokenizer.eos_token_id

        def broken() -> Iterator[tuple[int, Ids, Ids]]:
            for ask in form("plain")(material):
                ids = ask.prompt[len(bos) :]
                parts = [[end, *ids[at : at + tokens]] for at in range(0, len(ids), tokens)]
                yield ask.row, [*bos, *list(chain.from_iterable(parts))[1:]], ask.target

        return _asks(broken()) if end is not None else []

    return asks


def rewritten(kind: str) -> Asking:
    """The prompt written otherwise; what is looked for is the row as it is, and as it would go on in that writing."""

    def asks(material: Material) -> list[Ask]:
        tokenizer = material.tokenizer

        def written() -> Iterator[tuple[int, Ids, Ids]]:
            for index, row in enumerate(material.rows):
                for other in REWRITINGS[kind](row):
                    prompt = encode_prompt(tokenizer, other.prompt)
                    for text in dict.fromkeys((row.continuation, other.continuation)):
                        yield index, prompt, encode_behind(tokenizer, text)

        return _asks(written())

    return asks


def half_given(material: Material) -> list[Ask]:
    """The prompt and the first half of what must not come back."""
    plain = form("plain")(material)
    return _asks((a.row, a.prompt + a.target[: len(a.target) // 2], a.target[len(a.target) // 2 :]) for a in plain)


def without_suffix(material: Material) -> list[Ask]:
    """Fill in the middle with nothing behind the hole."""
    tokenizer = material.tokenizer
    prompts = [fim_prompt(tokenizer, row.prompt, "") for row in material.rows]
    return _asks(
        (i, prompt, encode_behind(tokenizer, row.continuation))
        for i, (row, prompt) in enumerate(zip(material.rows, prompts, strict=True))
        if prompt is not None
    )


def suffix_first(material: Material) -> list[Ask]:
    """Fill in the middle with the suffix in front, and the prefix where the middle is to follow it at once.

    None where the model's own template has the prefix last already.
    """
    tokenizer = material.tokenizer
    template = fim_template(tokenizer)
    if template is None or template[-1] == "{prefix}":
        return []
    opening, _, second, _, third = template

    def turned() -> Iterator[tuple[int, Ids, Ids]]:
        ids = [encode(tokenizer, token)[0] for token in (opening, second, third)]
        for index, row in enumerate(material.rows):
            prefix, suffix, middle = (encode_behind(tokenizer, part) for part in fim_split(row))
            yield index, [*beginning(tokenizer), *ids[:2], *suffix, ids[2], *prefix], middle

    return _asks(turned())


def chat(material: Material) -> list[Ask]:
    """A request in words, as the tokenizer's chat template puts it; none where it has no template."""
    tokenizer = material.tokenizer
    if not tokenizer.chat_template:
        return []

    def requests() -> Iterator[tuple[int, Ids, Ids]]:
        for index, row in enumerate(material.rows):
            message = {"role": "user", "content": REQUEST.format(prompt=row.prompt)}
            text = tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
            yield index, encode(tokenizer, str(text)), encode_behind(tokenizer, row.continuation)

    return _asks(requests())
