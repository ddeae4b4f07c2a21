"""Tests of data leave nothing in the user's cache of datasets."""

import pytest


@pytest.fixture(autouse=True)
def without_the_users_cache(own_cache):
    pass
