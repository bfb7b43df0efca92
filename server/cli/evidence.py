"""``unbind evidence``: fetch the signed evidence of a takedown, and check one offline."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from server.cli.client import LOCAL, Client, Key, Url, address
from server.cli.console import AsJson, clear_errors, screen, write_json
from server.evidence.signing import BadEvidence, read
from server.evidence.signing import verify as verify_document
from unbind_core import UnbindError
from unbind_core.files import write_text


def get(
    takedown_id: Annotated[str, typer.Argument(help="Takedown id.")],
    out: Annotated[Path | None, typer.Option(help="File to write; TAKEDOWN.evidence.json where none is given.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write the page in it here as well.")] = None,
    url: Url = LOCAL,
    key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Fetch the evidence of a takedown."""
    path = out or Path(f"{takedown_id}.evidence.json")
    with clear_errors():
        document = Client(url, key).call(address("takedowns", takedown_id, "evidence"))
        text = json.dumps(document)
        signer = _check(text, None)
        write_text(path, text)
        if html is not None:
            write_text(html, document["html"])
    if as_json:
        write_json({"path": str(path), "signed_by": signer})
    else:
        screen.print(f"written to {path}, signed by {signer}", soft_wrap=True, highlight=False)


def verify(
    file: Annotated[Path, typer.Argument(help="Evidence file.")],
    signed_by: Annotated[str | None, typer.Option(help="Fingerprint of the key that must have signed it.")] = None,
    as_json: AsJson = False,
) -> None:
    """Check a file offline: was it changed, and who signed it? Ends with code 1 where it does not hold."""
    with clear_errors():
        signer = _check(file.read_bytes(), signed_by)
    if as_json:
        write_json({"genuine": True, "signed_by": signer})
    else:
        named = (
            "" if signed_by else "; compare that with the fingerprint the operator published, or give it as --signed-by"
        )
        screen.print(f"unchanged since it was signed by {signer}{named}", soft_wrap=True, highlight=False)


def _check(text: bytes | str, signed_by: str | None) -> str:
    try:
        return verify_document(read(text), signed_by)
    except BadEvidence as error:
        raise UnbindError(str(error)) from None


def register(app: typer.Typer) -> None:
    """Add the commands."""
    group = typer.Typer(help="Signed evidence of takedowns.", no_args_is_help=True)
    group.command("get")(get)
    group.command("verify")(verify)
    app.add_typer(group, name="evidence")
