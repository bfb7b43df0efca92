"""The keys that a server keeps in its data folder, looked at before anything starts: one that cannot be used is told of at once."""

from __future__ import annotations

from server.evidence.signing import EVIDENCE_KEY, signing_key
from server.guarding import guard_secret
from server.registry.access import kept_admin_key
from server.settings import Settings
from unbind_core.errors import UnbindError


def check_keys(settings: Settings) -> None:
    """Read the admin key, the guard key and, where there is one, the evidence key; the first two are made where they are missing.

    Raises UnbindError naming the file and the remedy.
    """
    try:
        settings.data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not settings.admin_key:
            kept_admin_key(settings)
        guard_secret(settings)
        if (settings.data_dir / EVIDENCE_KEY).exists():
            signing_key(settings.data_dir)
    except OSError as error:
        raise UnbindError(
            f"data_dir: {error.filename}: {error.strerror}; the account that serves must own the folder and all in it: "
            "change their owner, or choose another data_dir"
        ) from None
