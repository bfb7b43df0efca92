"""``unbind key create|list|revoke``: keys straight in the registry's database, with the server running or not."""

from __future__ import annotations

import re
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from server.cli.audit import OPERATOR
from server.cli.console import clear_errors, screen, show_lines, write_json
from server.cli.flags import settings_from
from server.cli.takedown.shown import warn
from server.registry.access import SCOPES, Access, Key, NoSuchKey, Scope, left_behind
from server.registry.registry import open_registry
from server.rules import Rules, WhenOpen
from server.settings import Settings
from unbind_core.errors import UnbindError

commands = typer.Typer(help="Keys for clients.", no_args_is_help=True)
Config = Annotated[Path | None, typer.Option("--config", help="TOML file of settings")]
DataDir = Annotated[Path | None, typer.Option("--data-dir", help="the server's data folder; else as set, else .unbind")]
AsJson = Annotated[bool, typer.Option("--json", help="as JSON")]
MOST_DAYS = 100_000.0  # the API's bounds, as those of rates are: a time that no calendar has can be shown nowhere


def _access(settings: Settings) -> Access:
    # not made here: of a key in a registry that no server has, none would know
    return Access(open_registry(settings, existing=True).transactions)


@commands.command("create")
def create(
    name: Annotated[str, typer.Argument(help="whom it is for")],
    scope: Annotated[
        list[str] | None, typer.Option("--scope", help=f"one of {', '.join(SCOPES)}; may be repeated; else inference")
    ] = None,
    enforce: Annotated[
        list[str] | None, typer.Option("--enforce", help="a module that is always on; may be repeated")
    ] = None,
    allow: Annotated[
        list[str] | None, typer.Option("--allow", help="a module that requests may add; may be repeated; else all")
    ] = None,
    when_open: Annotated[
        str | None,
        typer.Option("--when-open", help=f"{', '.join(get_args(WhenOpen))}: log-probabilities where a gate is open"),
    ] = None,
    profile: Annotated[str | None, typer.Option("--profile", help="the profile it always runs under")] = None,
    days: Annotated[float | None, typer.Option("--days", min=0.0, max=MOST_DAYS, help="days until it expires")] = None,
    per_minute: Annotated[
        float | None,
        typer.Option("--per-minute", min=0.001, max=1e6, help="requests a minute; each prompt of a call is one"),
    ] = None,
    burst: Annotated[int | None, typer.Option("--burst", min=1, max=1_000_000, help="requests at once")] = None,
    tokens_per_minute: Annotated[
        float | None,
        typer.Option("--tokens-per-minute", min=0.001, max=1e12, help="tokens of prompts and answers a minute"),
    ] = None,
    config: Config = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Make a key and print it, once: only its hash is kept."""
    with clear_errors():
        wanted = scope or ["inference"]
        scopes: list[Scope] = [known for known in get_args(Scope) if known in wanted]
        if wrong := set(wanted) - set(SCOPES):
            raise UnbindError(f"--scope: '{min(wrong)}' is unknown; choose from {', '.join(SCOPES)}")
        if when_open not in (None, *get_args(WhenOpen)):
            raise UnbindError(f"--when-open: '{when_open}' is unknown; choose from {', '.join(get_args(WhenOpen))}")
        try:
            rules = Rules.model_validate({"enforced": enforce or [], "allowed": allow, "when_open": when_open})
        except ValueError as error:
            raise UnbindError(f"--enforce, --allow: not the name of a module ({error})") from None
        if not re.fullmatch(r"[^\x00-\x1f\x7f]{1,100}", name):
            raise UnbindError("NAME: give 1 to 100 characters, none of them a control character")
        if days == 0.0:
            raise UnbindError("--days: the key would have expired already; give more, or leave it out")
        if burst is not None and per_minute is None:
            raise UnbindError("--burst: goes with --per-minute; give that too, or no burst")
        settings = settings_from(config, data_dir=data_dir)
        access = _access(settings)
        if profile is not None and profile not in (known := access.current.profiles(settings)):
            raise UnbindError(
                f"--profile: '{profile}' does not exist; there are: {', '.join(known) or 'none'} (those of a settings file "
                "are known with its --config)"
            )
        now = time.time()
        key, text = access.create_key(
            name,
            OPERATOR,
            now,
            scopes=tuple(scopes),
            rules=rules,
            profile=profile,
            expires_at=now + days * 86_400 if days is not None else None,
            per_minute=per_minute,
            burst=burst,
            tokens_per_minute=tokens_per_minute,
        )
    if as_json:
        write_json({**_view(key), "key": text})
        return
    screen.print(f"{text}   ({key.id}; it is not shown again)", highlight=False, soft_wrap=True)


@commands.command("list")
def list_keys(config: Config = None, data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """Every key, revoked ones too."""
    with clear_errors():
        keys = sorted(
            _access(settings_from(config, data_dir=data_dir)).current.keys.values(), key=lambda key: key.created_at
        )
    if as_json:
        write_json([_view(key) for key in keys])
        return
    rows = []
    now = time.time()
    for key in keys:
        state = "revoked" if key.revoked_at is not None else "usable" if key.usable(now) else "expired"
        expires = _day(key.expires_at) if key.expires_at is not None else ""
        rates = ("" if rate is None else f"{rate:g}" for rate in (key.per_minute, key.tokens_per_minute))
        rows.append([key.id, key.name, ",".join(sorted(key.scopes)), key.profile or "", *rates, expires, state])
    show_lines(("id", "name", "scopes", "profile", "requests a minute", "tokens a minute", "expires", "state"), rows)


@commands.command("revoke")
def revoke(
    key_id: Annotated[str, typer.Argument(help="its id, from unbind key list")],
    config: Config = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Make a key useless for good; running servers refuse it within two seconds."""
    with clear_errors():
        try:
            access = _access(settings_from(config, data_dir=data_dir))
            key = access.revoke_key(key_id, OPERATOR, time.time())
            warnings = left_behind(key_id, access.bound_to(f"key:{key_id}"))
        except NoSuchKey as error:
            raise UnbindError(f"{error}; unbind key list shows them") from None
    if as_json:
        write_json({**_view(key), "warnings": warnings})
        return
    screen.print(f"revoked {key.id} ({key.name})", highlight=False)
    warn({"warnings": warnings})


def _day(at: float) -> str:
    """A time, also one that no calendar has: a key that was made so must not hide the others."""
    try:
        return datetime.fromtimestamp(at, UTC).isoformat(timespec="minutes")
    except (ValueError, OverflowError, OSError):
        return "after 9999"


def _view(key: Key) -> dict[str, Any]:
    return {
        "id": key.id,
        "name": key.name,
        "scopes": sorted(key.scopes),
        "profile": key.profile,
        "requests_per_minute": key.per_minute,
        "tokens_per_minute": key.tokens_per_minute,
        "expires_at": key.expires_at,
        "revoked_at": key.revoked_at,
    }


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.add_typer(commands, name="key")
