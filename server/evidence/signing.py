"""Ed25519 over canonical JSON: the data directory's key signs, anybody checks.

The key is made on first use, for its owner alone. Its fingerprint is what an operator publishes beforehand: a document carries the
public key it was signed with, and the fingerprint says whose that is.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import hashlib
import json
import os
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

FORMAT = "unbind-evidence/1"
_SIGNED = ("format", "payload", "html")


class BadEvidence(Exception):
    """A document that is not what it claims; the message says in which way."""


def canonical(value: Any) -> bytes:
    """The one way of writing a JSON value that is signed."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


def signing_key(data_dir: Path) -> Ed25519PrivateKey:
    """The key of this data directory."""
    path = data_dir / "evidence.key"
    data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    with contextlib.suppress(FileExistsError):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(base64.b64encode(Ed25519PrivateKey.generate().private_bytes_raw()) + b"\n")
            file.flush()
            os.fsync(file.fileno())
    return Ed25519PrivateKey.from_private_bytes(base64.b64decode(path.read_bytes()))


def fingerprint(public_key: bytes) -> str:
    """SHA-256 of a public key, in hex."""
    return hashlib.sha256(public_key).hexdigest()


def sign(payload: dict[str, Any], html: str, key: Ed25519PrivateKey) -> dict[str, Any]:
    """The whole document."""
    document = {"format": FORMAT, "payload": payload, "html": html}
    public = key.public_key().public_bytes_raw()
    signature = {
        "algorithm": "ed25519",
        "public_key": base64.b64encode(public).decode(),
        "fingerprint": fingerprint(public),
        "value": base64.b64encode(key.sign(canonical(document))).decode(),
    }
    return {**document, "signature": signature}


def verify(document: Any, expected: str | None = None) -> str:
    """The fingerprint of the key that signed the document. Raises BadEvidence, also where that is not ``expected``."""
    try:
        if document["format"] != FORMAT:
            raise BadEvidence(f"format {document['format']!r} is not the one this version reads ({FORMAT})")
        signature = document["signature"]
        if set(document) != {*_SIGNED, "signature"} or signature["algorithm"] != "ed25519":
            raise BadEvidence("fields were added or taken away, or the signature is of another kind")
        public = base64.b64decode(signature["public_key"], validate=True)
        value = base64.b64decode(signature["value"], validate=True)
        Ed25519PublicKey.from_public_bytes(public).verify(value, canonical({name: document[name] for name in _SIGNED}))
    except (KeyError, TypeError, ValueError, binascii.Error):
        raise BadEvidence("not an evidence document, or parts of it are missing") from None
    except InvalidSignature:
        raise BadEvidence("the signature does not fit: the document was changed after it was signed") from None
    found = fingerprint(public)
    if expected is not None and found != expected.lower():
        raise BadEvidence(f"signed by another key: {found}, not {expected}")
    return found
