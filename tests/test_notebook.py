"""The notebook: every cell runs, on a tiny pair and on the real one."""

import base64
import contextlib
import io
import json
import os
import re

import pytest
from support.guides import ROOT, save_stand_in

from dflash_hf.smollm2 import drafter_folder


NOTEBOOK = ROOT / "examples" / "how_dflash_works.ipynb"


def execute(monkeypatch) -> dict:
    """Run all cells in one namespace; returns the notebook with what they print and draw."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    def show():
        stream = io.BytesIO()
        pyplot.gcf().savefig(stream, format="png", dpi=110, bbox_inches="tight")
        pyplot.close("all")
        data = {"image/png": base64.b64encode(stream.getvalue()).decode()}
        pictures.append({"data": data, "metadata": {}, "output_type": "display_data"})

    monkeypatch.setattr(pyplot, "show", show)
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    namespace = {"__name__": "__main__"}
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for count, cell in enumerate(cells, start=1):
        printed = io.StringIO()
        pictures = []
        with contextlib.redirect_stdout(printed):
            exec(compile("".join(cell["source"]), f"{NOTEBOOK.name}, code cell {count}", "exec"), namespace)
        text = printed.getvalue().splitlines(keepends=True)
        cell["execution_count"] = count
        cell["outputs"] = [{"name": "stdout", "output_type": "stream", "text": text}] * bool(text) + pictures
        assert cell["outputs"], count
    return notebook


def test_cells_run_on_a_tiny_pair(tmp_path, monkeypatch):
    target, draft = save_stand_in(tmp_path, ends=False)
    monkeypatch.setattr("dflash_hf.pairs.packaged_targets.PackagedTarget.folder", lambda self: target)
    monkeypatch.setattr("dflash_hf.smollm2.drafter_folder", lambda: draft)
    execute(monkeypatch)


@pytest.mark.slow
@pytest.mark.real
def test_cells_run_on_the_real_pair(real_target, monkeypatch):
    """With `DFLASH_WRITE_NOTEBOOK=1` what they print and draw is written into the notebook."""
    try:
        drafter_folder()
    except FileNotFoundError as error:
        pytest.skip(str(error))
    notebook = execute(monkeypatch)
    if os.environ.get("DFLASH_WRITE_NOTEBOOK") == "1":
        text = json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"
        NOTEBOOK.write_text(text, encoding="utf-8")


def test_notebook_names_files_that_exist():
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    text = "".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    names = re.findall(r"`((?:src|modeling)/[\w/]+\.py)`", text)
    links = re.findall(r"\]\((\w[\w/]*\.md)\)", text)
    assert names and links
    assert [name for name in names if not (ROOT / name).is_file()] == []
    assert [link for link in links if not (NOTEBOOK.parent / link).is_file()] == []


def test_notebook_is_small_and_has_pictures():
    assert NOTEBOOK.stat().st_size < 500_000
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    outputs = []
    for cell in cells:
        outputs += cell.get("outputs", ())
    assert sum("image/png" in output.get("data", {}) for output in outputs) >= 5
