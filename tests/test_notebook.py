"""The notebook: every cell runs, on a tiny pair and on the real one."""

import json
import os

import pytest
from support.guides import ROOT, save_stand_in
from support.notebook import execute

from dflash_hf.smollm2 import drafter_folder


NOTEBOOK = ROOT / "examples" / "how_dflash_works.ipynb"


def test_cells_run_on_a_tiny_pair(tmp_path, monkeypatch):
    target, draft = save_stand_in(tmp_path, ends=False)
    monkeypatch.setattr("dflash_hf.smollm2.smollm2_folder", lambda: target)
    monkeypatch.setattr("dflash_hf.smollm2.drafter_folder", lambda: draft)
    cells = [cell for cell in execute(NOTEBOOK)["cells"] if cell["cell_type"] == "code"]
    assert sum(bool(cell["outputs"]) for cell in cells) == len(cells)


@pytest.mark.slow
@pytest.mark.real
def test_cells_run_on_the_real_pair(real_target, tmp_path):
    """With `DFLASH_WRITE_NOTEBOOK=1` what they print and draw is written into the notebook."""
    try:
        drafter_folder()
    except FileNotFoundError as error:
        pytest.skip(str(error))
    notebook = execute(NOTEBOOK, figures=tmp_path)
    if os.environ.get("DFLASH_WRITE_NOTEBOOK") == "1":
        text = json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"
        NOTEBOOK.write_text(text, encoding="utf-8")


def test_notebook_is_small_and_has_pictures():
    assert NOTEBOOK.stat().st_size < 500_000
    outputs = [
        one for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"] for one in cell.get("outputs", ())
    ]
    assert sum("image/png" in one.get("data", {}) for one in outputs) >= 5
