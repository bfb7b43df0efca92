"""``/tokenize`` and ``/detokenize``: exactly the ids that requests are computed with."""

from __future__ import annotations

from typing import Annotated, Self

from fastapi import APIRouter, Depends
from pydantic import AliasChoices, BaseModel, Field, StrictBool, StrictInt, model_validator
from starlette.responses import JSONResponse

from server.api.caller import inference
from server.api.inference.bodies.chat import TemplateOptions
from server.api.inference.bodies.fields import ModelName, Text
from server.api.inference.bodies.messages import Messages
from server.api.inference.logprobs import token_bytes
from server.api.inference.prompts import chat_prompt, chat_size, check_ids, size_of
from server.api.models import check_model
from server.errors import field_error
from server.service import Service, service
from unbind_core.encoding import beginning

router = APIRouter(tags=["tokens"], dependencies=[Depends(inference)])
MOST_TOKENS = 65_536  # taken at once, where requests may not have as many
Served = Annotated[Service, Depends(service)]


class TokenizeBody(TemplateOptions):
    """``content``, a text alone; ``prompt``, as a request has it; or ``messages``, as the chat template writes them."""

    model: ModelName = None
    content: Text | None = None
    prompt: Text | None = None
    messages: Messages | None = None
    add_special: Annotated[
        StrictBool | None,
        Field(
            validation_alias=AliasChoices("add_special", "add_special_tokens"),
            description="the beginning-of-text token in front, where the tokenizer puts one; by default before a prompt",
        ),
    ] = None
    with_pieces: Annotated[StrictBool, Field(description="each token as {id, piece}")] = False

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if sum(source is not None for source in (self.content, self.prompt, self.messages)) != 1:
            raise field_error("content", "give one of content, prompt and messages")
        return self


class DetokenizeBody(BaseModel):
    """Token ids."""

    model: ModelName = None
    tokens: Annotated[list[StrictInt], Field(max_length=1_000_000, fail_fast=True)]


@router.post("/tokenize")
async def tokenize(body: TokenizeBody, served: Served) -> JSONResponse:
    """Text -> token ids. A text may be longer than a request may, so that clients can ask by how much."""
    check_model(served, body.model)
    size = size_of(body.content or "", body.prompt or "") + chat_size(body.messages or ())
    return await served.encoder.run(size, _tokenized, served, body)


def _tokenized(served: Service, body: TokenizeBody) -> JSONResponse:
    tokenizer = served.loaded.tokenizer
    field = "messages" if body.messages is not None else "content" if body.prompt is None else "prompt"
    if body.messages is not None:
        ids = list(chat_prompt(served, body.messages, body, most_tokens(served)).ids)
    else:
        special = body.add_special if body.add_special is not None else body.prompt is not None
        ids = served.encoder.ids(body.prompt or body.content or "", field, most_tokens(served))
        ids = (beginning(tokenizer) if special else []) + ids
    served.encoder.check(ids, field, most_tokens(served))
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
    check_model(served, body.model)
    served.encoder.check(body.tokens, "tokens", most_tokens(served))
    check_ids(served, body.tokens, "tokens")
    decode = served.loaded.tokenizer.decode
    text = str(await served.encoder.run(len(body.tokens), decode, body.tokens, clean_up_tokenization_spaces=False))
    return {"content": text, "prompt": text}


def most_tokens(served: Service) -> int:
    """How many tokens a text may have that is only counted."""
    return max(MOST_TOKENS, served.settings.max_model_len)


def _piece(raw: bytes) -> str | list[int]:
    """Text, or the bytes of half a character."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return list(raw)
