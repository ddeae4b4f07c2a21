"""
Visitors of the page in headless Chromium, all at once; what each sees is printed as JSON.

    python -m support.browse URL CHROMIUM SCREENSHOT.png PROMPT ...
"""

import json
import sys

from playwright.sync_api import sync_playwright


COLUMNS = ("alone", "drafted")
DONE = """() => {
    const now = ["alone", "drafted"].map(id => document.querySelector(`#${id} .dflash`)?.innerText || "");
    const same = now[0] && now[0] == now[1] && now.join() == window.before;
    window.before = now.join();
    return same;
}"""


def main(url: str, chromium: str, screenshot: str, *prompts: str) -> None:
    """Ask each prompt on a page of its own, and print what the pages show in the end."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=chromium or None, args=["--no-sandbox", "--disable-gpu", "--headless=shell"]
        )
        pages = [browser.new_context(viewport={"width": 1100, "height": 800}).new_page() for _ in prompts]
        for page in pages:
            page.set_default_timeout(300_000)  # Playwright's half a minute is short on a busy machine
            page.goto(url, wait_until="domcontentloaded")
            page.wait_for_selector("#ask")
        for page, prompt in zip(pages, prompts, strict=True):
            page.fill("#prompt textarea", prompt)
        for page in pages:
            page.click("#ask")
        seen = []
        for page in pages:
            page.wait_for_function(DONE, polling=1000)
            columns = {name: page.inner_text(f"#{name} .dflash") for name in COLUMNS}
            figures = {f"{name}_figures": page.inner_text(f"#{name} .dflash-figures") for name in COLUMNS}
            colored = {f"{name}_colored": page.locator(f"#{name} .dflash i").all_inner_texts() for name in COLUMNS}
            seen.append({**columns, **figures, **colored})
        pages[0].screenshot(path=screenshot, full_page=True)
        browser.close()
    print(json.dumps(seen))


if __name__ == "__main__":
    main(*sys.argv[1:])
