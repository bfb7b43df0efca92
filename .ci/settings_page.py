"""Print docs/settings.md from the settings class, so that the page cannot say anything else than the code."""

from __future__ import annotations

import sys
from pathlib import Path

from server.settings import FROM_FILES, HERE, PREFIX, Settings

FILES = ", ".join(f"`{name}`" for name in Settings.model_fields if name in FROM_FILES)
INTRODUCTION = f"""# Settings

Every setting can be given as a flag of `unbind serve` (`--max-slots 32`), in the environment
(`{PREFIX}MAX_SLOTS=32`) and in a TOML file (`max_slots = 32`) named by `{PREFIX}CONFIG`. A flag wins over the
environment, the environment over the file. A name that does not exist or a value that makes no sense stops the start
with a message that says which and where. `UNBIND_URL` is none: it is where commands that ask a server find it, without `--url`.
A path may begin with `~`; an empty one is none where the default is none, and an error elsewhere.

`unbind settings` shows those that are in force with its flags, in its environment and by that file, and which of them gives
each (`--all`: those that have their default, too); no secret is shown. It ends with code 2 where a setting is wrong, so it tries a
file before a server is started anew with it: `unbind settings --config unbind.toml`.

{FILES} may lie in a file that only the service reads, such
as a mounted secret: `{PREFIX}DATABASE_URL_FILE=/run/secrets/database_url` in the environment, `--database-url-file`, or
`database_url_file` in the TOML file. Giving a setting both ways stops the start.

This page is written by `make docs`.

| setting | environment | default | meaning |
|---|---|---|---|
"""


def shown(value: object) -> str:
    """A default as the page shows it; folders of the installation by their place in it."""
    if value is None or value in ("", (), {}):
        return "none"
    if isinstance(value, Path) and value.is_absolute():
        return f"`{value.relative_to(HERE.parent).as_posix()}`"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def main() -> None:
    """Print the page."""
    rows = [
        f"| `{name}` | `{PREFIX}{name.upper()}` | {shown(field.default)} | {field.description} |"
        for name, field in Settings.model_fields.items()
    ]
    sys.stdout.write(INTRODUCTION + "\n".join(rows) + "\n")


if __name__ == "__main__":
    main()
