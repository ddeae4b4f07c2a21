"""Runs the cells of a notebook in this process, and keeps what they print and draw as a notebook does."""

import base64
import contextlib
import io
import json
from pathlib import Path


def execute(path: Path, figures: Path | None = None) -> dict:
    """
    Run all cells in one namespace.

    Args:
        path (`Path`): The notebook.
        figures (`Path`, *optional*): Folder for the pictures, one file each.

    Returns:
        `dict`: The notebook with its outputs.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    notebook = json.loads(path.read_text(encoding="utf-8"))
    namespace, count = {"__name__": "__main__"}, 0
    shown = pyplot.show
    for cell in notebook["cells"]:
        if cell["cell_type"] != "code":
            continue
        count += 1
        printed, pictures = io.StringIO(), []

        def show(pictures=pictures):
            stream = io.BytesIO()
            pyplot.gcf().savefig(stream, format="png", dpi=110, bbox_inches="tight")
            pyplot.close("all")
            pictures.append(stream.getvalue())

        pyplot.show = show
        try:
            with contextlib.redirect_stdout(printed):
                exec(compile("".join(cell["source"]), f"{path.name}, code cell {count}", "exec"), namespace)
        finally:
            pyplot.show = shown
        text = printed.getvalue().splitlines(keepends=True)
        cell["execution_count"] = count
        cell["outputs"] = [{"name": "stdout", "output_type": "stream", "text": text}] if text else []
        for number, png in enumerate(pictures):
            if figures is not None:
                (figures / f"{count}-{number}.png").write_bytes(png)
            data = {"image/png": base64.b64encode(png).decode()}
            cell["outputs"].append({"data": data, "metadata": {}, "output_type": "display_data"})
    return notebook
