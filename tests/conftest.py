"""A tiny target and its drafter."""

import gc
import importlib.util
import os
from unittest import mock

import pytest
from support.pairs import make_draft, make_target
from support.sampling import small_target
from torch.nn.attention.flex_attention import flex_attention
from transformers.integrations import flex_attention as upstream_flex
from transformers.utils import logging

from dflash_hf.decoding import packing as packing_dflash
from dflash_hf.pairs.packaged_targets import GEMMA3, SMOLLM2, PackagedTarget


def pytest_collection_modifyitems(items):
    """Tests of a real model come first: of two workers one runs them, and unpacks the weights, once."""
    items.sort(key=lambda item: item.get_closest_marker("real") is None)


def pytest_collection_finish():
    """Hundreds of thousands of imported objects stay to the end; the garbage collector need not look at them again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def warnings_anew():
    """A warning that is shown once in a process is shown once in each test."""
    logging.get_logger("dflash_hf").warning_once.cache_clear()


@pytest.fixture(autouse=True)
def environment_anew():
    """What a command sets for its process, such as `-q`, is set for one test."""
    with mock.patch.dict(os.environ):
        yield


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    """Nothing is left in the user's cache of datasets."""
    if importlib.util.find_spec("datasets"):
        monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture
def uncompiled_flex(monkeypatch):
    """Flex attention by its definition; compiled, it is tested where there is a CUDA device."""

    def attend(query, key, value, training=False, **arguments):
        assert query.dtype == key.dtype == value.dtype  # kernels take one, of half precision where they can
        return flex_attention(query, key, value, **arguments)

    monkeypatch.setattr(upstream_flex, "compile_friendly_flex_attention", attend)


@pytest.fixture(scope="module")
def small():
    return small_target()


@pytest.fixture(scope="session")
def target():
    return make_target()


@pytest.fixture
def draft(target):
    return make_draft(target)


def _folder_or_skip(target: PackagedTarget):
    """The folder of a real target; skipped, rather than downloaded, where its package is not installed."""
    if target.installed_parts() is None or importlib.util.find_spec("gguf") is None:
        pytest.skip(f"the weights of {target.title} are not here: {target.pip_line}")
    return target.folder()


@pytest.fixture(scope="session")
def real_target():
    """The folder of SmolLM2-135M-Instruct."""
    return _folder_or_skip(SMOLLM2)


@pytest.fixture(scope="session")
def real_gemma():
    """The folder of Gemma 3 270M."""
    return _folder_or_skip(GEMMA3)


@pytest.fixture
def packs_of_any_size(monkeypatch):
    monkeypatch.setattr(packing_dflash, "MIN_FP32_WEIGHTS", 0)


@pytest.fixture
def products(monkeypatch):
    """Collects the shapes of what is multiplied by packed weights."""
    seen = []
    multiply = packing_dflash._multiply_packed

    def collecting(x, *args):
        seen.append(tuple(x.shape))
        return multiply(x, *args)

    monkeypatch.setattr(packing_dflash, "_multiply_packed", collecting)
    return seen


@pytest.fixture
def packings(monkeypatch):
    """Counts how often a weight is packed."""
    seen = []
    pack = packing_dflash._packed_copy_of
    monkeypatch.setattr(packing_dflash, "_packed_copy_of", lambda *args: seen.append(1) or pack(*args))
    return seen
