"""The page of proposals that were tried quotes figures: each must stand in a file that its row links to."""

import re

import pytest
from support.guides import ROOT


PAGE = ROOT / "examples" / "guides" / "what_we_tried.md"
FIGURE = re.compile(r"(?<![\w.])\d+\.\d+(?:x|\b)")
ARXIV = re.compile(r"arXiv \d{4}\.\d{5}")


def cells_with_links():
    """The cells of the tables that link to files with figures, and those files."""
    cells = []
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        for cell in line.split(" | ") if line.startswith("|") else ():
            files = [(PAGE.parent / link).resolve() for link in re.findall(r"\]\(([^)#]+\.md)", cell)]
            if files:
                cells.append((re.sub(r"\]\([^)]*\)|`[^`]*`", "", cell), files))
    return cells


@pytest.mark.parametrize(
    "cell, files", cells_with_links(), ids=lambda value: value[:30] if isinstance(value, str) else ""
)
def test_figures_stand_in_the_linked_files(cell, files):
    text = "\n".join(file.read_text(encoding="utf-8") for file in files)
    figures = FIGURE.findall(ARXIV.sub("", cell.replace("planner of 0.2.0", "")))
    assert figures
    missing = [figure for figure in figures if figure.removesuffix("x") not in text]
    assert not missing
