"""Pictures of the console's pages for the documents: ``.venv/bin/python .ci/screenshots.py [ROUTE ...]``, all pages unless named.

Each at 1280 and 390 pixels, light and dark, of the demo world; needs Chromium. They are written to ``docs/images`` as palette PNGs.
"""

from __future__ import annotations

import base64
import json
import shutil
import struct
import sys
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
from playwright.sync_api import Browser, Page, Playwright, sync_playwright

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
IMAGES = ROOT / "docs" / "images"
KEY = "screenshots"
WIDTHS, THEMES, MOST = (1280, 390), ("light", "dark"), 120_000  # pixels, names, bytes of a picture
WAIT = 240_000  # milliseconds, for a machine that has other work


def playground(page: Page) -> None:
    """A memorised row, which a module makes go another way."""
    page.check("#modules input[value=demo-a]")
    page.select_option("#row", index=1)
    page.click("#go")
    page.locator("#legend").wait_for()
    page.mouse.move(0, 0)  # else it rests on whichever token came under it
    page.locator("#text1").focus()
    page.keyboard.press("ArrowRight")


def modules(page: Page) -> None:
    """What is loaded, after the requests of the playground."""
    page.get_by_role("region", name="Modules and guards").wait_for()


def takedowns(page: Page) -> None:
    """What was asked, and what each binds."""
    page.get_by_role("region", name="Takedowns").wait_for()


def takedown(page: Page) -> None:
    """The dry run of a new one."""
    from server.console.rows import demo_rows

    row = demo_rows()[1]
    page.get_by_label("Rows or code").fill(json.dumps({"text": row["prompt"] + row["expected"]}))
    page.get_by_label("Name", exact=True).fill("set-c")
    page.get_by_label("Whom it binds").select_option("global")
    page.get_by_role("button", name="Dry run").click()
    page.get_by_role("region", name="What it will take").wait_for()


def activity(page: Page) -> None:
    """A few seconds of requests."""
    page.locator(".empty").wait_for()
    for _ in range(3):
        for tokens in (16, 48):
            asked = {"prompt": "def add(first, second):", "max_tokens": tokens, "unbind": {"modules": ["demo-a"]}}
            page.request.post("/v1/completions", data=asked, headers={"Authorization": f"Bearer {KEY}"})
        page.wait_for_timeout(4000)
    page.get_by_role("region", name="Gates by module").wait_for()


def keys(page: Page) -> None:
    """Who may ask, and what applies to whom."""
    page.get_by_role("region", name="Policies").wait_for()


def audit(page: Page) -> None:
    """The newest entries."""
    page.get_by_role("region", name="Audit trail").wait_for()
    page.locator(".note.good").wait_for()


PAGES: dict[str, Callable[[Page], None]] = {
    "playground": playground,
    "modules": modules,
    "takedowns": takedowns,
    "takedowns/new": takedown,
    "activity": activity,
    "keys": keys,
    "audit": audit,
}


def prepared(playwright: Playwright, url: str) -> None:
    """Two guards, one of which binds every request, so that pages have something to tell."""
    from server.console.rows import demo_rows

    rows = demo_rows()
    api = playwright.request.new_context(base_url=url, extra_http_headers={"Authorization": f"Bearer {KEY}"})
    for name, row, options in (("set-a", rows[0], {}), ("set-b", rows[12], {"scope": "global"})):
        guarded = {"protect": "guard", "guard": {"run": 30}, **options}
        texts = [{"text": row["prompt"] + row["expected"]}]
        made = api.post("/admin/v1/takedowns", data={"name": name, "rows": texts, "options": guarded})
        assert made.ok, made.text()
    put, post = api.put, api.post
    put("/admin/v1/profiles/team", data={"modules": ["demo-a"], "allowed": []})
    post("/admin/v1/keys", data={"name": "editors", "profile": "team", "requests_per_minute": 600})
    post("/admin/v1/keys", data={"name": "prometheus", "scopes": ["metrics"]})
    api.dispose()


def main(routes: list[str]) -> None:
    """Take the pictures of these pages."""
    from server import demo
    from server.bench.server import served

    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    IMAGES.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        settings = {
            "model": demo.BASE,
            "adapter": demo.ADAPTER,
            "modules_dir": ROOT / "modules",
            "admin_key": KEY,
            "worker": False,
            "max_model_len": 512,
        }
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        with served(settings, Path(folder), cwd=ROOT) as running:
            prepared(playwright, running.url)
            for route in routes:
                for width in WIDTHS:
                    for theme in THEMES:
                        picture(browser, running.url, route, width, theme)
        browser.close()


def picture(browser: Browser, url: str, route: str, width: int, theme: str) -> None:
    """One page as a file."""
    context = browser.new_context(base_url=url, viewport={"width": width, "height": 800}, color_scheme=theme)
    page = context.new_page()
    page.set_default_timeout(WAIT)
    page.goto(f"{url}/#/{route}")
    page.locator("h1").wait_for()
    if not page.locator("#key").count():
        page.get_by_role("button", name="Sign in").click()
    page.fill("#key", KEY)
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Sign out").wait_for()
    PAGES[route](page)
    page.wait_for_timeout(300)
    path = IMAGES / f"{route.replace('/', '-')}-{width}-{theme}.png"
    path.write_bytes(with_palette(page, page.screenshot(full_page=True)))
    context.close()
    size = path.stat().st_size
    sys.stdout.write(f"{path.relative_to(ROOT)}: {size:,} bytes\n")
    if size > MOST:
        raise SystemExit(f"{path.name} has more than {MOST:,} bytes")


DECODED = """async told => {
    const image = new Image()
    image.src = "data:image/png;base64," + told
    await image.decode()
    const drawn = new OffscreenCanvas(image.width, image.height).getContext("2d")
    drawn.drawImage(image, 0, 0)
    const { data } = drawn.getImageData(0, 0, image.width, image.height)
    let text = ""
    for (let at = 0; at < data.length; at += 32768) text += String.fromCharCode(...data.subarray(at, at + 32768))
    return [image.height, image.width, btoa(text)]
}"""


def with_palette(page: Page, png: bytes) -> bytes:
    """The picture in at most 256 colours, which takes half the space; the browser decodes it."""
    height, width, told = page.evaluate(DECODED, base64.b64encode(png).decode())
    pixels = np.frombuffer(base64.b64decode(told), np.uint8).reshape(-1, 4)[:, :3]
    every, found, counts = np.unique(pixels, axis=0, return_inverse=True, return_counts=True)
    colours = every[np.argsort(-counts)[:256]]  # the commonest stay as they are; others are edges of letters
    nearest = [int(((colours.astype(int) - colour) ** 2).sum(axis=1).argmin()) for colour in every.astype(int)]
    rows = np.array(nearest, np.uint8)[found].reshape(height, width)
    rows = np.pad(rows, ((0, 0), (1, 0)))  # each row is said to have no filter
    header = struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)
    parts = [
        (b"IHDR", header),
        (b"PLTE", colours.tobytes()),
        (b"IDAT", zlib.compress(rows.tobytes(), 9)),
        (b"IEND", b""),
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in parts
    )


if __name__ == "__main__":
    main(sys.argv[1:] or list(PAGES))
