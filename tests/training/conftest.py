"""What tests of whole runs share."""

import pytest
from support.tiny_chat import THINKING, save_target


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder of a tiny target that thinks."""
    return save_target(tmp_path_factory.mktemp("target"), THINKING)
