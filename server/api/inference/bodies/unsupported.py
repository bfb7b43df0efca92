"""Fields that would change what an answer means and that this server does not have: refused, never ignored.

A body's own fields are looked up first, so a name here concerns only the bodies that lack it. Hints (``user``, ``metadata``,
``reasoning_effort``, ``samplers``) are not here: an answer without them is still what was asked for.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from server.errors import field_error

# field -> the values that ask for nothing
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    # tools
    "tools": ([],),
    "tool_choice": ("none", "auto"),  # without tools both mean an answer in text
    "functions": ([],),
    "function_call": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "mcp_servers": ([],),
    "web_search_options": (),  # an empty object switches it on
    # answers of a given form
    "response_format": ({"type": "text"}, {}),
    "structured_outputs": ({},),
    "structural_tag": ("",),
    "json_schema": ("",),  # an empty object asks for any JSON
    "grammar": ("",),
    "regex": ("",),
    "ebnf": ("",),
    "format": ("",),
    "modalities": (["text"], []),
    "audio": (),
    "prediction": (),
    # what the prompt is made of
    "suffix": ("",),
    "prompt_embeds": ([],),
    "images": ([],),
    "image_data": ([],),
    "documents": ([],),
    "truncation_side": ("left",),
    "kv_transfer_params": ({},),
    "chat_template": ("",),
    "chat_template_kwargs": ({},),
    "add_special_tokens": (True,),
    # which tokens are chosen
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "best_of": (1,),
    "n_cmpl": (1,),
    "repeat_penalty": (1,),
    "typical_p": (1,),
    "mirostat": (0,),
    "dry_multiplier": (0,),
    "xtc_probability": (0,),
    "dynatemp_range": (0,),
    "top_n_sigma": (-1, 0),
    "bad_words": ([],),
    "allowed_token_ids": ([],),
    "logits_processors": ([],),
    "lora": ([],),
    # what the answer holds
    "echo": (False,),
    "logprobs": (False,),
    "n_probs": (0,),
    "logprob_token_ids": ([],),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "return_tokens_as_token_ids": (False,),
}
PREFIX = "guided_"  # guided_json, guided_regex, guided_choice, ...
NOTHING: tuple[Any, ...] = ("", [], {}, False)
OURS = "unbind"
MISPLACED = ("module", "modules")  # and whatever begins with "unbind", or with "x-unbind" as the header does
# arguments of openai's client for Python, which puts their contents where they belong; others send them as they are
CARRIERS = ("extra_body", "extra_headers", "extra_query")


def refuse_unsupported(body: Mapping[Any, Any], known: Collection[str]) -> None:
    """Raise PydanticCustomError for the first field that asks for what this server does not have; null asks for nothing."""
    guided = {name: NOTHING for name in body if isinstance(name, str) and name.startswith(PREFIX)}
    for name, harmless in {**UNSUPPORTED, **guided}.items():
        if name in body and name not in known and body[name] is not None and body[name] not in harmless:
            raise unsupported(name[:64])


def refuse_misplaced(body: Mapping[Any, Any], known: Collection[str]) -> None:
    """Raise PydanticCustomError for a field by which somebody meant to name modules: ignored, it would leave them out unnoticed."""
    if OURS not in known:
        return
    given = [(name, name, value) for name, value in body.items() if name not in known]
    for carrier in CARRIERS:
        carried = body.get(carrier)
        if isinstance(carried, dict):
            given += [(name, f"{carrier}.{name}", value) for name, value in carried.items()]
    for name, path, value in given:
        plain = name.lower().removeprefix("x-") if isinstance(name, str) else ""
        if (plain in MISPLACED or plain.startswith(OURS)) and value is not None and value not in NOTHING:
            raise field_error(
                path[:64],
                f'is not read here, and refused as it may name modules; write "{OURS}": {{"modules": ["NAME"]}} in the body itself',
            )


def unsupported(name: str) -> Exception:
    """The refusal, with its remedy."""
    return field_error(
        name, "is not supported here, and refused rather than ignored; leave it out", "unsupported_parameter"
    )
