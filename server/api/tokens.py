"""``/tokenize`` and ``/detokenize``: exactly the ids that requests are computed with."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends
from pydantic import AliasChoices, BaseModel, Field, StrictBool, StrictInt, model_validator

from server.api.caller import inference
from server.api.logprobs import token_bytes
from server.api.prompts import chat_prompt, check_ids
from server.api.schemas import Message, Text
from server.service import Service, service
from unbind_core.encoding import beginning, encode

router = APIRouter(tags=["tokens"], dependencies=[Depends(inference)])
Served = Annotated[Service, Depends(service)]


class TokenizeBody(BaseModel):
    """``content`` or ``prompt``, whichever the client says; or ``messages``, as the chat template writes them."""

    content: Annotated[Text | None, Field(validation_alias=AliasChoices("content", "prompt"))] = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=4096)] | None = None
    add_special: Annotated[
        StrictBool,
        Field(
            validation_alias=AliasChoices("add_special", "add_special_tokens"),
            description="with the beginning-of-text token in front, where the tokenizer has one",
        ),
    ] = False
    with_pieces: Annotated[StrictBool, Field(description="each token as {id, piece}")] = False

    @model_validator(mode="after")
    def _one_source(self) -> TokenizeBody:
        if (self.content is None) == (self.messages is None):
            raise ValueError("content: give either content (or prompt) or messages")
        return self


class DetokenizeBody(BaseModel):
    """Token ids."""

    tokens: Annotated[list[StrictInt], Field(max_length=1_000_000)]


@router.post("/tokenize")
async def tokenize(body: TokenizeBody, served: Served) -> dict[str, Any]:
    """Text -> token ids."""
    tokenizer = served.loaded.tokenizer
    if body.messages is not None:
        ids = list(chat_prompt(served, [message.plain for message in body.messages]).ids)
    else:
        ids = (beginning(tokenizer) if body.add_special else []) + encode(tokenizer, body.content or "")
    tokens = [{"id": token, "piece": _piece(token_bytes(tokenizer, token))} for token in ids]
    return {
        "tokens": tokens if body.with_pieces else ids,
        "count": len(ids),
        "max_model_len": served.settings.max_model_len,
    }


@router.post("/detokenize")
async def detokenize(body: DetokenizeBody, served: Served) -> dict[str, str]:
    """Token ids -> text, under both names that clients read."""
    check_ids(served, body.tokens, "tokens")
    text = str(served.loaded.tokenizer.decode(body.tokens, clean_up_tokenization_spaces=False))
    return {"content": text, "prompt": text}


def _piece(raw: bytes) -> str | list[int]:
    """Text, or the bytes of half a character."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return list(raw)
