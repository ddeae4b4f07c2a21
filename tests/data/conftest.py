"""Tests of data leave nothing in the user's cache of datasets."""

import importlib.util

import pytest


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    if importlib.util.find_spec("datasets"):
        monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
