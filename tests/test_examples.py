"""The examples run as they stand, and end with a passed audit."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))
# One process for all of a kind: it waits for its imports once.
RUN = "import runpy, sys\nfor path in sys.argv[1:]:\n    runpy.run_path(path, run_name='__main__')"


@pytest.mark.parametrize("lightning", [False, True])
def test_examples(lightning, tmp_path):
    paths = [path for path in EXAMPLES if ("lightning" in path.name) == lightning]
    words = [sys.executable, "-c", RUN, *map(str, paths)]
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    audits = [line for line in done.stdout.splitlines() if line.startswith("Audit(frozen_tensors=")]
    assert len(audits) == len(paths) and done.stdout.splitlines()[-1] == audits[-1]
