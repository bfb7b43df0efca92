"""``/admin/v1/guards``: what the guards find in a text that somebody who may see it has at hand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StrictStr

from server.api.admin.routes import Served, admin_router
from server.base_service import BaseService
from server.registry.refusals import NotAllowed
from server.registry.tables import Kind
from unbind_core.guard.spans import spans

router = admin_router()
MOST = 100_000  # characters: a second or so of a processor


class TextBody(BaseModel):
    """A text to look at."""

    model_config = ConfigDict(extra="forbid")
    text: Annotated[StrictStr, Field(max_length=MOST)]


@router.post("/guards/runs")
def runs(body: TextBody, served: Served) -> dict[str, Any]:
    """Where the text holds runs that the loaded guards protect, those in shadow included: ``start`` and ``end`` in characters
    (Unicode code points), ``lexemes`` of the stretch, or what their ``unit`` is. Nothing of the text is kept.
    """
    book = served.guards
    found = spans(body.text, book.indexes.values(), book.secret)
    data = [
        {
            "guard": book.indexes[span.name].label,
            "module": span.name,
            "start": span.start,
            "end": span.end,
            "lexemes": span.lexemes,
            "unit": book.indexes[span.name].shape.unit,
        }
        for span in found
    ]
    return {"object": "list", "data": data, "guards": len(book.names)}


def check_key(served: BaseService, record: Mapping[str, Any]) -> None:
    """A guard that could not be loaded here may not come into force: what it applies to would be 503. Raises NotAllowed."""
    if record["kind"] == Kind.GUARD and record.get("mark") not in (None, served.guard_secret.mark):
        raise NotAllowed(
            f"guard '{record['name']}' version {record['version']} was made under another guard key, so that what it applies to "
            "would be 503: give this server that key (guard_key), or post the takedown again with --replace"
        )
