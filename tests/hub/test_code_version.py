"""Which code beside the weights is older."""

import pytest

from dflash_hf.hub.code_version import defects_of, is_older


@pytest.mark.parametrize(
    ("version", "than", "expected"),
    [
        ("0.2.9", "0.3.0", True),
        ("0.3.0", "0.3.0", False),
        ("0.10.0", "0.9.0", False),
        ("0.3.0.dev0", "0.3.0", True),  # was not: code of a development version was never renewed by the release
        ("0.3.0rc1", "0.3.0", True),
        ("0.3.0", "0.3.0.dev0", False),
        ("unreadable", "0.1.0", True),
        ("0.1.0", "unreadable", False),
    ],
)
def test_versions_are_ordered_as_packages_are(version, than, expected):
    assert is_older(version, than) is expected


def test_development_version_may_have_the_defect():
    assert defects_of("0.3.0.dev0") == defects_of("0.2.0")
    assert not defects_of("0.3.0")
