"""Flags over environment over a file over defaults -> the settings, and these -> the environment of a child process.

First station of every process; nothing else reads these.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError

from server.settings import FROM_FILES, PREFIX, SECRETS, Settings

# An empty variable means "none" for these.
NULLABLE = {key for key, field in Settings.model_fields.items() if type(None) in get_args(field.annotation)}
# UNBIND_URL is where the server is, for those who ask it: in the shell that starts one it may stand as well.
CLIENTS = "url"
PATHS = {key for key, field in Settings.model_fields.items() if field.annotation in (Path, Path | None)}
# Read as paths too: what says where files are kept may be an address as well, and a file of a secret is no setting.
PLACES = PATHS | {"module_store", "private_store", "audit_log"} | {f"{key}_file" for key in FROM_FILES}
KNOWN = Settings.model_fields.keys() | {f"{key}_file" for key in FROM_FILES}


class SettingsError(Exception):
    """A setting that is unknown or has a bad value; the message names its source, the key and the remedy."""


def load_settings(
    flags: Mapping[str, Any] | None = None, environment: Mapping[str, str] | None = None, file: Path | None = None
) -> Settings:
    """Settings from flags (None: not given), environment and a TOML file, in that order of precedence.

    What is secret may also lie in a file, which a key such as ``database_url_file`` names. Raises SettingsError naming the
    source and the key.
    """
    return with_sources(flags, environment, file)[0]


def with_sources(
    flags: Mapping[str, Any] | None = None, environment: Mapping[str, str] | None = None, file: Path | None = None
) -> tuple[Settings, dict[str, str]]:
    """``load_settings``, and by key the source of each setting that one gives. Raises as that does."""
    values: dict[str, Any] = {}
    source: dict[str, str] = {}
    from_environment = {
        key.removeprefix(PREFIX).lower(): value for key, value in (environment or {}).items() if key.startswith(PREFIX)
    }
    config = from_environment.pop("config", None)
    from_environment.pop(CLIENTS, None)
    path = file or (Path(config) if config else None)
    path = path and Path(at_home(str(path)))
    for origin, given in (
        (f"file {path}", _read(path) if path else {}),
        ("environment", from_environment),
        ("flags", {key: value for key, value in (flags or {}).items() if value is not None}),
    ):
        for key, value in given.items():
            if key not in KNOWN:
                name = PREFIX + key.upper() if origin == "environment" else key
                raise SettingsError(f"{origin}: unknown setting '{name}'; known: {', '.join(sorted(KNOWN))}")
            values[key], source[key] = _text(key, value, origin), origin
    for key in sorted(FROM_FILES):
        named = f"{key}_file"
        if not (holding := values.pop(named, None)):
            continue
        where = f"{source[named]}: {named}"
        if values.get(key):
            raise SettingsError(f"{where}: given beside {key}; give one of the two")
        values[key], source[key] = _secret(Path(holding), where), f"{where} {holding}"
    try:
        return Settings(**values), {key: source[key] for key in values}
    except ValidationError as error:
        first = error.errors()[0]
        if not first["loc"]:  # of several settings together: its input is all of them, secrets too
            raise SettingsError(f"settings: {first['msg'].removeprefix('Value error, ')}") from None
        key = str(first["loc"][0])
        shown = "" if key in FROM_FILES else f" ({first.get('input')!r})"
        said = first["msg"].removeprefix("Value error, ")
        raise SettingsError(f"{source.get(key, 'settings')}: {key}{shown}: {said}") from None


def written_out(settings: Settings) -> dict[str, str]:
    """The settings as a child process reads them back; secrets stay here."""
    plain = settings.model_dump(mode="json", exclude=set(SECRETS))
    made = {
        PREFIX + key.upper(): json.dumps(value) if isinstance(value, dict) else _written(value)
        for key, value in plain.items()
        if value is not None
    }
    return made | {PREFIX + key.upper(): "" for key in NULLABLE if key in plain and plain[key] is None}


def _written(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))  # with or without a mark at its beginning
    except OSError as error:
        raise SettingsError(f"file {path}: cannot be read ({error.strerror})") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"file {path}: not TOML ({error})") from None


def _secret(path: Path, where: str) -> str:
    try:
        secret = path.read_text(encoding="utf-8-sig").strip()
    except OSError as error:
        raise SettingsError(f"{where} {path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise SettingsError(f"{where} {path}: not text; write the secret into it") from None
    if not secret:
        raise SettingsError(f"{where} {path}: is empty; write the secret into it")
    return secret


def _text(key: str, value: Any, origin: str) -> Any:
    """A value as it is meant: what is empty is none where a setting can be none, and a path may begin with ``~``, which no shell
    has resolved in a file, a unit of systemd or behind ``--data-dir=``. Raises SettingsError for an empty path: it would be the
    working directory.
    """
    if value == "" and key in NULLABLE:
        return None
    if value == "" and key in PATHS:
        raise SettingsError(f"{origin}: {key}: is empty; name a path, or leave it out")
    return at_home(value) if key in PLACES and isinstance(value, str) else value


def at_home(path: str) -> str:
    """The path, with the home that a ``~`` at its beginning stands for; addresses stay as they are."""
    return os.path.expanduser(path)  # noqa: PTH111 - Path would spoil addresses, and raises where a user is not known
