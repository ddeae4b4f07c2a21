"""A server with a pair, for the tests of this folder."""

import importlib.util
import sys
from pathlib import Path

import pytest
from support.serving import MAX_TOKENS, save_readable_target
from support.tiny_chat import TOOLS

from dflash_hf.serving import decoder


ROOT = Path(__file__).parents[2]
PROMPTS = [f"Say {number}" for number in range(12)]


@pytest.fixture(scope="session", autouse=True)
def small_batch_caches():
    """Zeroing a tenth of the memory takes longer than most tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoder, "_BATCH_CACHE_SHARE", 0.001)
        yield


@pytest.fixture(scope="session")
def bench():
    """`examples/benchmarks/serve_load.py`."""
    spec = importlib.util.spec_from_file_location("serve_load", ROOT / "examples" / "benchmarks" / "serve_load.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["serve_load"] = module  # its dataclasses look for it
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A readable target, each of whose letters is a token."""
    return save_readable_target(tmp_path_factory.mktemp("served") / "target", TOOLS)


@pytest.fixture(scope="session")
def own(bench, folder):
    """The target's own texts."""
    texts = bench.own_texts(str(folder), PROMPTS, MAX_TOKENS)
    assert len(set(texts.values())) == len(PROMPTS) and all(len(set(text)) > 5 for text in texts.values())
    return texts


@pytest.fixture(scope="session")
def server(bench, folder):
    """A server whose drafter knows these texts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT / "tests"))
        started = bench.Server([sys.executable, "-m", "support.serving", "serve", str(folder), *PROMPTS])
    with started as server:
        yield server
