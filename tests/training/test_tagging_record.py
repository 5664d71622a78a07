"""docs/tagging.md says what the records in results/ptb-pos say."""

import json
from pathlib import Path

from oelm.config import read_toml

ROOT = Path(__file__).parents[2]
RECORDS = ROOT / "results" / "ptb-pos"


def accuracy(folder: Path, reference: bool = False) -> float:
    results = json.loads((folder / "results.json").read_text())
    found = results["references"]["most_frequent_tag"] if reference else {"test": results["test"]["metrics"]}
    return 100 * float(found["test"]["token_accuracy"])


def test_every_figure_is_in_a_record() -> None:
    page = (ROOT / "docs" / "tagging.md").read_text()
    for method in ("baseline", "frozen", "oelm"):
        runs = sorted((RECORDS / "runs" / "ptb-pos" / method).glob("measured-*"))
        values = [accuracy(run) for run in runs]
        assert len(values) == 3
        row = f"| {method} | 5e-4 | {' | '.join(f'{v:.2f}' for v in values)} | {sum(values) / 3:.2f} ±"
        assert row in page
        assert f"reaches {accuracy(runs[0], reference=True):.1f};" in page
    whole = RECORDS / "all-sentences"
    assert (
        f"reaches {accuracy(whole):.1f}, the trivial baseline {accuracy(whole, reference=True):.1f}" in page
    )


def test_the_records_are_of_the_commands_shown() -> None:
    page = (ROOT / "docs" / "tagging.md").read_text()
    study = read_toml(RECORDS / "study.toml")
    assert study["study"]["methods"] == ["baseline", "frozen", "oelm"] and "baseline,frozen,oelm" in page
    assert study["study"]["lrs"] == [2e-4, 5e-4, 1e-3] and "--lrs 2e-4,5e-4,1e-3" in page
    assert (study["study"]["widen"], study["task"]["train_size"], study["training"]["epochs"]) == (0, 1000, 2)
