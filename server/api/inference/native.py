"""What llama.cpp's clients ask beside ``/infill``: completions in its own shape, its properties, its template."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends
from starlette.responses import Response

from server.api.caller import inference
from server.api.health import show_version
from server.api.inference.answers import STREAMED
from server.api.inference.bodies.chat import TemplateOptions
from server.api.inference.bodies.completions import PromptBody
from server.api.inference.bodies.fields import DEFAULT_MAX_TOKENS, ModelName
from server.api.inference.bodies.messages import Messages
from server.api.inference.bodies.tools import ToolBody
from server.api.inference.call import Admitted
from server.api.inference.infill import NativeBody, native_answer
from server.api.inference.prompts import chat_prompt, chat_size, completion_prompts, size_of
from server.api.inference.tools.calling import calling_of
from server.api.models import check_model
from server.service import Service, service

router = APIRouter(tags=["completions"])
Served = Annotated[Service, Depends(service)]


class NativeCompletionBody(NativeBody, PromptBody):
    """``POST /completion``."""


class TemplateBody(TemplateOptions, ToolBody):
    """``POST /apply-template``."""

    model: ModelName = None
    messages: Messages


@router.post("/completion", responses=STREAMED)
@router.post("/completions", include_in_schema=False)
async def complete(body: NativeCompletionBody, call: Admitted) -> Response:
    """Continue the prompt, answered as by ``/infill``."""
    size = size_of(body.prompt)
    prompts = await call.served.encoder.run(size, completion_prompts, call.served, body.prompt, None, False)
    return await native_answer(call, body, prompts)


@router.post("/apply-template", dependencies=[Depends(inference)])
async def apply_template(body: TemplateBody, served: Served) -> dict[str, str]:
    """The text that a chat's prompt is made of, with what it tells of ``tools``."""
    check_model(served, body.model)
    calling_of(served, body)
    size = chat_size(body.messages, body.offered)
    prompt = await served.encoder.run(size, chat_prompt, served, body.messages, body, tools=body.offered)
    return {"prompt": prompt.text}


@router.get("/props", dependencies=[Depends(inference)])
async def properties(served: Served) -> dict[str, Any]:
    """What the server serves, and its defaults."""
    tokenizer, settings = served.loaded.tokenizer, served.settings
    defaults = NativeCompletionBody(prompt="").model_dump(
        include={
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "presence_penalty",
            "frequency_penalty",
            "ignore_eos",
            "stream",
        }
    )
    return {
        "default_generation_settings": {
            "n_ctx": settings.max_model_len,
            "params": {"n_predict": DEFAULT_MAX_TOKENS, **defaults},
        },
        "total_slots": settings.max_slots,
        "model_alias": settings.served_name,
        "model_path": settings.served_name,
        "modalities": {"vision": False, "audio": False},
        "chat_template": tokenizer.chat_template or "",
        "bos_token": tokenizer.bos_token or "",
        "eos_token": tokenizer.eos_token or "",
        "build_info": f"unbind {(await show_version())['version']}",
    }
