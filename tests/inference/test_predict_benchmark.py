"""benchmarks/predict.py at tiny size on a CPU: what it records, and that both sides answer the same."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "predict.py"


@pytest.mark.slow
def test_both_sides_answer_alike_and_everything_is_recorded(tmp_path: Path) -> None:
    texts = [f"a {'very ' * (i % 70)}good film number {i}" for i in range(60)]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))
    words = ["--tiny", "--texts", tmp_path / "texts.jsonl", "--count", 50, "--some", 20, "--rounds", 2]
    words += ["--batch-sizes", "4,8", "--workers", 0, "--json", tmp_path / "record.json"]
    done = subprocess.run(
        [sys.executable, SCRIPT, *map(str, words)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "record.json").read_text())
    assert record["texts"]["count"] == 50 and record["texts"]["source"] == "texts.jsonl"
    assert {"packages", "commit", "cpu"} <= set(record["environment"])
    gpt, bert = record["cases"]
    assert (gpt["model"], bert["model"]) == ("gpt", "bert")
    assert bert["same_label"] == 1 and bert["largest_difference"] < 1e-5
    for case in (gpt, bert):
        assert case["failed"] == {} and {len(values) for values in case["seconds"].values()} == {2}
        assert len(case["pipeline_settings"]) == 2 and case["precision"] == "fp32"
        assert set(case["ratio"]) == {"warm", "command"} and min(case["alone"].values()) > 0
    assert done.stdout.count("|") == 4 * 10, "a table, and nothing else"
