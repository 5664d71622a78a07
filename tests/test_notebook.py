"""docs/python.md in a notebook: its programs run as they stand, and progress is a line that changes."""

import os
import re
import sys
from pathlib import Path
from typing import Any

import nbclient
import nbformat
import pytest

from tests.data.made import labelled
from tests.data.test_plain_text import TEXTS

PAGE = (Path(__file__).parents[1] / "docs" / "python.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_page_in_a_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    labelled(tmp_path / "d.csv", 120)
    (tmp_path / "tales.txt").write_text("\n\n".join(TEXTS), encoding="utf-8")
    programs = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    assert len(programs) >= 4
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(program) for program in programs])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parents[1] / "src"), *sys.path]))
    client = nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    outputs = [output for cell in notebook.cells for output in cell.outputs]
    errors = "".join(output.text for output in outputs if output.get("name") == "stderr")
    ours = [line for line in errors.splitlines() if "tqdm" not in line]  # which asks for ipywidgets
    assert ours == []  # a notebook shows such lines as errors
    lines = [text for output in outputs if (text := _plain(output))]
    printed = "".join(output.text for output in outputs if output.get("name") == "stdout")
    assert "no conclusion may be drawn" in printed
    assert any(re.search(r"step 20/20", text) for text in lines)
    assert any(re.search(r"\d+ of \d+ runs", text) for text in lines)
    assert (tmp_path / "s" / "report.html").is_file() and (tmp_path / "lm" / "model").is_dir()


def _plain(output: Any) -> str:
    return str(output.get("data", {}).get("text/plain", ""))
