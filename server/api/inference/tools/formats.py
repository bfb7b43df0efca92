"""How each family of models writes its calls, a table: what opens one, what stands around it, and how a grammar spells it.

A model's format is told by its chat template; the setting ``tool_format`` overrides that.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class ToolFormat:
    """What ``reading`` needs to find calls, and ``grammar`` to demand them.

    ``opens`` begin a call; ``drops`` are no text wherever they stand. ``between``: single characters that part the calls of one
    opening; ``closes`` may stand behind an object. ``bare``: an answer that begins with an object calls a function that there is.
    ``name_of`` makes a name of what stands before the arguments, where a call is no object. ``around`` and ``call``: what a grammar
    puts before, between and behind calls, and before and behind the arguments of one. ``arguments_as_text``: its templates write
    the arguments of earlier calls as they are.
    """

    name: str
    tells: str  # a regular expression that its chat templates match
    opens: tuple[str, ...]
    around: tuple[str, str, str]
    call: tuple[str, str]
    drops: tuple[str, ...] = ()
    between: str = ""
    closes: str = ""
    bare: bool = False
    name_of: Callable[[str], str] | None = None
    id_length: int = 24
    several: bool = True
    arguments_as_text: bool = False

    @property
    def markers(self) -> tuple[str, ...]:
        """What may be a token of its own in the vocabulary."""
        return tuple(dict.fromkeys((*self.opens, *self.drops)))


def _mistral_name(head: str) -> str:
    return re.split(r"\[(?:CALL_ID|ARGS)\]", head)[0].strip()


def _deepseek_name(head: str) -> str:
    kind, _, name = head.partition("<｜tool▁sep｜>")
    return (name.strip().split("\n")[0] or kind).strip()


HERMES = ToolFormat(
    "hermes",
    r"<tool_call>(?!.*<function=)",
    opens=("<tool_call>",),
    drops=("</tool_call>",),
    around=("", "\n", ""),
    call=('<tool_call>\n{"name": NAME, "arguments": ', "}\n</tool_call>"),
)
LLAMA = ToolFormat(
    "llama",
    r"<\|python_tag\|>|Environment: ipython|\"parameters\": dictionary",
    opens=("<|python_tag|>",),
    around=("", "", ""),
    call=('{"name": NAME, "parameters": ', "}"),
    between=";",
    bare=True,
    several=False,
)
MISTRAL = ToolFormat(
    "mistral",
    r"\[TOOL_CALLS\](?!.*\[ARGS\])",
    opens=("[TOOL_CALLS]",),
    around=("[TOOL_CALLS][", ", ", "]"),
    call=('{"name": NAME, "arguments": ', "}"),
    between=",]",
    name_of=_mistral_name,
    id_length=9,
)
MISTRAL_NAMED = ToolFormat(
    "mistral-named",
    r"\[TOOL_CALLS\].*\[ARGS\]",
    opens=("[TOOL_CALLS]",),
    drops=("[ARGS]",),
    around=("", "", ""),
    call=("[TOOL_CALLS]BARE[ARGS]", ""),
    between=",]",
    name_of=_mistral_name,
    id_length=9,
)
DEEPSEEK = ToolFormat(
    "deepseek",
    r"<｜tool▁sep｜>.*```json",
    opens=("<｜tool▁call▁begin｜>",),
    drops=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"),
    around=("<｜tool▁calls▁begin｜>", "\n", "<｜tool▁calls▁end｜>"),
    call=("<｜tool▁call▁begin｜>function<｜tool▁sep｜>BARE\n```json\n", "\n```<｜tool▁call▁end｜>"),
    closes="```",
    name_of=_deepseek_name,
    arguments_as_text=True,
)
DEEPSEEK_NAMED = ToolFormat(
    "deepseek-named",
    r"<｜tool▁sep｜>",
    opens=("<｜tool▁call▁begin｜>",),
    drops=DEEPSEEK.drops,
    around=("<｜tool▁calls▁begin｜>", "", "<｜tool▁calls▁end｜>"),
    call=("<｜tool▁call▁begin｜>BARE<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
    name_of=_deepseek_name,
    arguments_as_text=True,
)
FORMATS = {one.name: one for one in (HERMES, LLAMA, MISTRAL, MISTRAL_NAMED, DEEPSEEK, DEEPSEEK_NAMED)}


def template_of(tokenizer: PreTrainedTokenizerBase) -> str:
    """The chat template that writes functions into a prompt; empty where there is none."""
    if not tokenizer.chat_template:
        return ""
    return str(tokenizer.get_chat_template(tools=[{}]))


def format_of(template: str, chosen: str = "") -> ToolFormat | None:
    """The format of a model's calls: the ``chosen`` one, else that of its chat template; None where it has none."""
    if chosen:
        return FORMATS.get(chosen)
    if "tools" not in template:
        return None
    return next((one for one in FORMATS.values() if re.search(one.tells, template, re.DOTALL)), None)


def shown_tokens(tokenizer: PreTrainedTokenizerBase, form: ToolFormat) -> dict[str, int]:
    """The format's markers that are special tokens, which texts leave out unless told otherwise."""
    special = {str(token): index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    markers = (*form.markers, "[ARGS]", "[CALL_ID]")
    return {marker: special[marker] for marker in markers if marker in special}


def lark(
    form: ToolFormat,
    functions: Sequence[tuple[str, dict[str, Any]]],
    special: dict[str, int],
    *,
    several: bool,
    or_answer: dict[str, Any] | None = None,
) -> str:
    """A grammar of calls of these functions, by name and schema; ``or_answer``: or else JSON of this schema."""
    first, parting, last = (_spelt(part, special) for part in form.around)
    rules = []
    for number, (name, schema) in enumerate(functions):
        before, behind = (
            _spelt(part.replace("NAME", json.dumps(name)).replace("BARE", name), special) for part in form.call
        )
        rules.append(f"call_{number}: {before} args_{number} {behind}\nargs_{number}: %json {json.dumps(schema)}")
    calls = f"{first} call ({parting} call)* {last}" if several and form.several else f"{first} call {last}"
    start = "calls | answer" if or_answer is not None else "calls"
    head = [f"start: {start}", f"calls: {calls}", "call: " + " | ".join(f"call_{i}" for i in range(len(functions)))]
    tail = [f"answer: %json {json.dumps(or_answer)}"] if or_answer is not None else []
    return "\n".join([*head, *rules, *tail])


def _spelt(text: str, special: dict[str, int]) -> str:
    """A text as a grammar has it: special tokens are named by their ids, as no text stands for them."""
    if not text:
        return ""
    parts = re.split("(" + "|".join(map(re.escape, special)) + ")", text) if special else [text]
    return " ".join(f"<[{special[part]}]>" if part in special else json.dumps(part) for part in parts if part)
