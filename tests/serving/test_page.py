"""The page of `examples/space` in headless Chromium, with several visitors at once."""

import json
import os
import shutil
import site
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.serving import MAX_TOKENS, chat_ids, save_readable_target
from transformers import AutoModelForCausalLM, AutoTokenizer


ROOT = Path(__file__).parents[2]
PROMPTS = [f"Say {number}" for number in range(4)]
pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    return tmp_path_factory.mktemp("page")


def attempt(*command, cwd=None, seconds: float = 600, **more: str) -> str:
    """
    What a command prints.

    Raises:
        `OSError`: it fails, or cannot be run.
    """
    env = {**os.environ, **more}
    try:
        done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=seconds)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise OSError(f"{command[0]}: {error}") from error
    if done.returncode:
        raise OSError(f"{' '.join(map(str, command))}: {(done.stderr or done.stdout).strip()[-300:]}")
    return done.stdout


@pytest.fixture(scope="module")
def python(scratch) -> str:
    """An interpreter that has this one's packages, Gradio and Playwright."""
    try:
        attempt(sys.executable, "-m", "venv", str(scratch / "venv"))
        (packages,) = (scratch / "venv").glob("lib/python*/site-packages")
        ours = "; ".join(f"site.addsitedir({place!r})" for place in site.getsitepackages())
        (packages / "ours.pth").write_text(f"import site; {ours}\n")
        python = str(scratch / "venv" / "bin" / "python")
        attempt(python, "-m", "pip", "install", "-q", "gradio", "playwright")
    except OSError as error:
        pytest.skip(f"Gradio and Playwright cannot be had: {error}")
    return python


@pytest.fixture(scope="module")
def chromium(python, scratch) -> str:
    """The browser: this machine's, else Playwright's own (an empty name), else the one that npm has for servers."""
    if found := next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None):
        return found
    reasons = []
    try:
        attempt(python, "-m", "playwright", "install", "chromium-headless-shell")
        return ""
    except OSError as error:
        reasons.append(str(error))
    try:
        attempt("npm", "install", "--no-audit", "--no-fund", "--prefix", str(scratch), "@sparticuz/chromium")
        code = "import c from '@sparticuz/chromium'; console.log(await c.executablePath())"
        found = attempt("node", "--input-type=module", "-e", code, cwd=scratch).strip().splitlines()[-1]
        attempt(found, "--version")
        return found
    except OSError as error:
        reasons.append(str(error))
    pytest.skip(f"no browser can be had: {'; '.join(reasons)}")


def test_four_visitors_at_once_get_their_own_texts(python, chromium, scratch):
    folder = save_readable_target(scratch / "target")
    env = {"PYTHONPATH": str(ROOT / "tests"), "GRADIO_ANALYTICS_ENABLED": "False"}
    command = [python, "-m", "support.serving", "page", str(folder), *PROMPTS]
    server = subprocess.Popen(command, env={**os.environ, **env}, stderr=subprocess.PIPE, text=True)
    try:
        url = next(line.split()[-1] for line in server.stderr if line.startswith("serving "))
        picture = scratch / "page.png"
        seen = json.loads(
            attempt(python, "-m", "support.browse", url, chromium, str(picture), *PROMPTS, **env).splitlines()[-1]
        )
    finally:
        server.kill()
        server.wait()
    target, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    for prompt, one in zip(PROMPTS, seen, strict=True):
        ids = chat_ids(tokenizer, [{"role": "user", "content": prompt}])
        with torch.no_grad():
            output = target.generate(**ids, max_new_tokens=MAX_TOKENS, do_sample=False)
        text = tokenizer.decode(output[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)
        assert one["alone"] == one["drafted"] == text and len(text) > 20
        assert not one["alone_colored"] and max(map(len, one["drafted_colored"])) > 2
        assert "tau" not in one["alone_figures"] and "tokens/s, tau " in one["drafted_figures"]
        assert one["drafted_figures"].endswith("x the speed")
    assert picture.stat().st_size > 10_000
