"""Digests and signatures stay what they are, to the bit: of text beyond ASCII, of numbers that are not finite, of sets."""

from __future__ import annotations

import hashlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from torch import nn

from server.evidence.signing import sign
from server.registry.audit import digest_of
from unbind_core.canonical import canonical_json
from unbind_core.identity import fingerprint
from unbind_core.module_file import written
from unbind_core.rows import ForgetRow, forget_digest

TEXT = 'Zoë 🦉 \u2028 \x00 " ключ'
VALUE: dict[str, Any] = {"ö": [TEXT, None, True, 1e-7, 0.1, -0.0, 10**20], "a": {"z": 1, "b": {}}, "": ()}


def test_names_are_in_order_and_every_character_is_ascii() -> None:
    assert canonical_json({"b": "é", "a": [1.5, None]}) == '{"a":[1.5,null],"b":"\\u00e9"}'
    assert canonical_json(float("nan")) == "NaN"
    assert canonical_json(Path("x"), plain=str) == '"x"'
    with pytest.raises(ValueError, match="Out of range"):
        canonical_json(float("inf"), nan=False)
    with pytest.raises(TypeError):
        canonical_json({1, 2})


def test_audit_entries_keep_their_digests() -> None:
    assert digest_of(VALUE) == "d953f502ab68bec6d6021cab17bf4a4907268d5d7e0babfeb481d8a8b873c5f2"
    assert digest_of([float("nan"), float("inf")]) == "8960655bc1fec0921522bf9b81bbced999f8191b267e0ace88827614d3c44f4b"


def test_forget_sets_keep_their_digests() -> None:
    assert (
        forget_digest([ForgetRow(prompt=TEXT, continuation="é\n", language="ö"), ForgetRow("a", "b")])
        == "6099e864e6e608a5d482c6a323f17724544f491ab3a33b271dffff1f64add471"
    )


def test_models_keep_their_fingerprints() -> None:
    model = nn.Linear(2, 1)
    model.load_state_dict({"weight": torch.tensor([[0.5, -2.0]]), "bias": torch.tensor([0.25])})
    tokenizer: Any = SimpleNamespace(bos_token_id=1, eos_token_id=None, get_vocab=lambda: {TEXT: 0, "a": 1})
    config = {"é": TEXT, "of": {3, 1, 2}, "kind": Path("x/ü"), "limit": float("inf"), "none": None}
    assert fingerprint(model, config, tokenizer) == "f9e94ad5743e8b93b6569f3ec1dde81899978f7843ef525e592a90d82ccea6b6"


def test_module_files_keep_their_bytes() -> None:
    data = written({"w": torch.tensor([1.0]), "v": torch.tensor([-0.5])}, VALUE)
    assert hashlib.sha256(data).hexdigest() == "0c01ad9386d96e6cf8f1f0b52199ff4f36fdb3d683b3a86506b5473684f4422c"


def test_evidence_keeps_its_signature() -> None:
    document = sign(
        {**VALUE, "x": float("nan")}, f"<p>{TEXT}</p>", Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
    )
    assert (
        document["signature"]["value"]
        == "5UyT3zJPAhMn4NQvDeyDAGnwdkuhXvJXXWb220TJzLODUHyjWNtGFiAmfuETNrk/oDhxUVpMN1c5sume3j1fBg=="
    )
