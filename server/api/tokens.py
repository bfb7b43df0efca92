"""``/tokenize`` and ``/detokenize``: exactly the ids that requests are computed with."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends
from pydantic import AliasChoices, BaseModel, Field, StrictBool, StrictInt, model_validator
from starlette.responses import JSONResponse

from server.api.caller import inference
from server.api.logprobs import token_bytes
from server.api.prompts import chat_prompt, check_ids, size_of
from server.api.schemas import Message, Text
from server.service import Service, service
from unbind_core.windows import beginning

router = APIRouter(tags=["tokens"], dependencies=[Depends(inference)])
MOST_TOKENS = 65_536  # taken at once, where requests may not have as many
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

    tokens: Annotated[list[StrictInt], Field(max_length=1_000_000, fail_fast=True)]


@router.post("/tokenize")
async def tokenize(body: TokenizeBody, served: Served) -> JSONResponse:
    """Text -> token ids. A text may be longer than a request may, so that clients can ask by how much."""
    size = size_of(body.content or "", *(message.plain["content"] for message in body.messages or ()))
    return await served.encoder.run(size, _tokenized, served, body)


def _tokenized(served: Service, body: TokenizeBody) -> JSONResponse:
    tokenizer = served.loaded.tokenizer
    if body.messages is not None:
        ids = list(chat_prompt(served, [message.plain for message in body.messages], _most(served)).ids)
    else:
        ids = served.encoder.ids(body.content or "", "content", _most(served))
        ids = (beginning(tokenizer) if body.add_special else []) + ids
    pieces = {token: _piece(token_bytes(tokenizer, token)) for token in set(ids)} if body.with_pieces else {}
    return JSONResponse(
        {
            "tokens": [{"id": token, "piece": pieces[token]} for token in ids] if body.with_pieces else ids,
            "count": len(ids),
            "max_model_len": served.settings.max_model_len,
        }
    )


@router.post("/detokenize")
async def detokenize(body: DetokenizeBody, served: Served) -> dict[str, str]:
    """Token ids -> text, under both names that clients read."""
    served.encoder.check(body.tokens, "tokens", _most(served))
    check_ids(served, body.tokens, "tokens")
    decode = served.loaded.tokenizer.decode
    text = str(await served.encoder.run(len(body.tokens), decode, body.tokens, clean_up_tokenization_spaces=False))
    return {"content": text, "prompt": text}


def _most(served: Service) -> int:
    return max(MOST_TOKENS, served.settings.max_model_len)


def _piece(raw: bytes) -> str | list[int]:
    """Text, or the bytes of half a character."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return list(raw)
