"""
The page of `examples/space` in headless Chromium, with several visitors at once:

    pip install gradio playwright && playwright install chromium-headless-shell
"""

import json
import os
import shutil
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


def test_four_visitors_at_once_get_their_own_texts(tmp_path):
    for package in ("gradio", "playwright"):
        pytest.importorskip(package)
    folder = save_readable_target(tmp_path / "target")
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), "")
    env = {"PYTHONPATH": str(ROOT / "tests"), "GRADIO_ANALYTICS_ENABLED": "False"}
    command = [sys.executable, "-m", "support.serving", "page", str(folder), *PROMPTS]
    server = subprocess.Popen(command, env={**os.environ, **env}, stderr=subprocess.PIPE, text=True)
    try:
        url = next(line.split()[-1] for line in server.stderr if line.startswith("serving "))
        picture = tmp_path / "page.png"
        words = [sys.executable, "-m", "support.browse", url, chromium, str(picture), *PROMPTS]
        done = subprocess.run(words, env={**os.environ, **env}, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        seen = json.loads(done.stdout.splitlines()[-1])
    finally:
        server.kill()
        server.wait()
    target = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for prompt, shown in zip(PROMPTS, seen, strict=True):
        ids = chat_ids(tokenizer, [{"role": "user", "content": prompt}])
        with torch.no_grad():
            output = target.generate(**ids, max_new_tokens=MAX_TOKENS, do_sample=False)
        text = tokenizer.decode(output[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)
        assert shown["alone"] == shown["drafted"] == text and len(text) > 20
        assert not shown["alone_colored"] and max(map(len, shown["drafted_colored"])) > 2
        assert "tau" not in shown["alone_figures"] and "tokens/s, tau " in shown["drafted_figures"]
        assert shown["drafted_figures"].endswith("x the speed")
    assert picture.stat().st_size > 10_000
