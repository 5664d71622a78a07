"""benchmarks/predict.py at tiny size on a CPU: what it records, and that both sides answer the same."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import predict

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


@pytest.mark.slow
def test_the_pipelines_workers_leave_the_tokenizers_of_other_arms_their_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (predict.PARALLELISM, "OELM_TOKENIZER_DIR"):
        monkeypatch.delenv(name, raising=False)
    texts = predict.made_texts(12)
    _, tokenizer = predict.make_tokenizer("gpt", texts)
    pipe = predict.make_pipeline(predict.make_models("gpt", tokenizer, True, tmp_path)[1])
    assert len(predict.classify(pipe, texts, 4, 2, 64)) == 12
    assert predict.PARALLELISM not in os.environ
