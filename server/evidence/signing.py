"""Ed25519 over canonical JSON: the data directory's key signs, anybody checks.

The key is made on first use, for its owner alone. Its fingerprint is what an operator publishes beforehand: a document carries the
public key it was signed with, and the fingerprint says whose that is.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from unbind_core.canonical import canonical_json
from unbind_core.errors import UnbindError
from unbind_core.files import write_text

EVIDENCE_KEY = "evidence.key"  # in the data folder
FORMAT, ALGORITHM = "unbind-evidence/1", "ed25519"
_SIGNED = ("format", "payload", "html")
_SIGNATURE = {"algorithm", "public_key", "fingerprint", "value"}
PRIME = 2**255 - 19
# The y of all eight points whose order divides 8: under such a key one signature fits many documents. x is 0 for the first and the
# last, so that they also have a second form, with a sign that means nothing.
_EIGHTH = 0x05FC536D880238B13933C6D305ACDFD5F098EFF289F4C345B027B2C28F95E826
SMALL_ORDER = frozenset({1, 0, _EIGHTH, PRIME - _EIGHTH, PRIME - 1})


class BadEvidence(Exception):
    """A document that is not what it claims; the message says in which way."""


def signing_key(data_dir: Path) -> Ed25519PrivateKey:
    """The key of this data directory. Raises UnbindError where its file is there and holds none: what is signed must stay told by
    one fingerprint.
    """
    path = data_dir / EVIDENCE_KEY
    data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not path.exists():
        made = base64.b64encode(Ed25519PrivateKey.generate().private_bytes_raw()).decode()
        with contextlib.suppress(FileExistsError):  # somebody else made one meanwhile
            write_text(path, made + "\n", new=True)
    try:
        return Ed25519PrivateKey.from_private_bytes(base64.b64decode(path.read_bytes()))
    except ValueError:
        raise UnbindError(
            f"{path}: holds no Ed25519 key in base64; restore it from a backup, or move it away to have a new one made, whose "
            "fingerprint is another"
        ) from None


def fingerprint(public_key: bytes) -> str:
    """SHA-256 of a public key, in hex."""
    return hashlib.sha256(public_key).hexdigest()


def sign(payload: dict[str, Any], html: str, key: Ed25519PrivateKey) -> dict[str, Any]:
    """The whole document."""
    document = {"format": FORMAT, "payload": payload, "html": html}
    public = key.public_key().public_bytes_raw()
    signature = {
        "algorithm": ALGORITHM,
        "public_key": base64.b64encode(public).decode(),
        "fingerprint": fingerprint(public),
        "value": base64.b64encode(key.sign(canonical_json(document).encode())).decode(),
    }
    return {**document, "signature": signature}


def read(text: bytes | str) -> Any:
    """The JSON value of a document's text, where the text can be read in one way only. Raises BadEvidence.

    A name that comes twice, a number that is not written as it was signed, and what is no JSON (NaN) are refused: another
    reader would show something else than was signed.
    """
    try:
        plain = text.decode() if isinstance(text, bytes) else text
        return json.loads(
            plain, object_pairs_hook=_each_once, parse_int=_integer, parse_float=_float, parse_constant=_no_number
        )
    except (ValueError, RecursionError):
        raise BadEvidence("not JSON") from None


def verify(document: Any, expected: str | None = None) -> str:
    """The fingerprint of the key that signed the document. Raises BadEvidence, also where that is not ``expected``.

    ``document`` is what ``read`` gave: a reader that drops a doubled name has lost what is to be found here.
    """
    if not isinstance(document, dict) or set(document) != {*_SIGNED, "signature"}:
        raise BadEvidence("not an evidence document: fields are missing, or were added")
    if document["format"] != FORMAT:
        raise BadEvidence(f"format {document['format']!r} is not the one this version reads ({FORMAT})")
    if not isinstance(document["payload"], dict) or not isinstance(document["html"], str):
        raise BadEvidence("payload or html is of another kind than an evidence document has")
    signature = document["signature"]
    if not isinstance(signature, dict) or set(signature) != _SIGNATURE or signature["algorithm"] != ALGORITHM:
        raise BadEvidence("signature: fields are missing or were added, or it is of another kind")
    public, value = _bytes(signature, "public_key", 32), _bytes(signature, "value", 64)
    for field, point in (("public_key", public), ("value", value[:32])):
        _check_point(field, point)
    try:
        signed = canonical_json({name: document[name] for name in _SIGNED}).encode()
        Ed25519PublicKey.from_public_bytes(public).verify(value, signed)
    except (InvalidSignature, ValueError, RecursionError):
        raise BadEvidence("the signature does not fit: the document was changed after it was signed") from None
    found = fingerprint(public)
    if signature["fingerprint"] != found:
        raise BadEvidence(f"signature.fingerprint is not that of the key that signed, which is {found}")
    if expected is not None and found != expected.strip().lower():
        raise BadEvidence(f"signed by another key: {found}, not {expected}")
    return found


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise BadEvidence(
            f"the name {twice[:80]!r} comes twice in one object: readers would not agree on what it holds"
        )
    return found


def _integer(literal: str) -> int:
    return int(_as_written(literal, str(int(literal))))


def _float(literal: str) -> float:
    return float(_as_written(literal, repr(float(literal))))


def _as_written(literal: str, canonically: str) -> str:
    if literal != canonically:
        raise BadEvidence(f"the number {literal[:40]} is not written as it was signed ({canonically[:40]})")
    return literal


def _no_number(literal: str) -> Any:
    raise BadEvidence(f"{literal} is not JSON")


def _bytes(signature: dict[str, Any], field: str, length: int) -> bytes:
    """The bytes of a field in base64, which is written in one way only. Raises BadEvidence."""
    text = signature[field]
    try:
        found = base64.b64decode(text, validate=True) if isinstance(text, str) else b""
    except ValueError:
        found = b""
    if len(found) != length or base64.b64encode(found).decode() != text:
        raise BadEvidence(f"signature.{field}: not {length} bytes in plain base64")
    return found


def _check_point(field: str, encoded: bytes) -> None:
    """Refuse a point of Ed25519 that is written in a second way, or under which anything may seem signed. Raises BadEvidence."""
    y = int.from_bytes(encoded, "little") & ~(1 << 255)
    if y >= PRIME or y in SMALL_ORDER:
        raise BadEvidence(
            f"signature.{field}: not a point that an honest key has (of small order, or not in its one form)"
        )
