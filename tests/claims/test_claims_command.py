"""oelm claims on folders of studies, runs and benchmark records, as a user has them."""

import json
import shutil
from pathlib import Path

import pytest
from rich.cells import cell_len
from typer.testing import CliRunner

from oelm.claims.collect import Collection, collect
from oelm.claims.data import claim_data
from oelm.claims.verdicts import judge
from oelm.cli.main import app
from oelm.errors import UserError
from oelm.study.analysis import analyse_records
from tests.claims.claim_records import pairs

ROOT = Path(__file__).parents[2]
FREEZING = ROOT / "benchmarks" / "h200-freezing-long.json"


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["claims", *map(str, arguments)])
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.parametrize(("lang", "verdict"), [("en", "Not decided"), ("zh", "未判定")])
def test_every_claim_has_a_row_of_80_columns(lang, verdict):
    shown = run(ROOT / "results" / "imdb-one-rate", ROOT / "benchmarks", "--lang", lang)
    assert max(map(cell_len, shown.splitlines())) <= 80
    rows = [line for line in shown.splitlines() if line.startswith("C")]
    assert [row.split()[0] for row in rows] == [f"C{i}" for i in range(1, 11)]
    assert verdict in rows[0] and "-0.16 (-0.74 .. 0.42)" in rows[0] and "n = 5" in rows[0]
    assert f"{claim_data()['rules']['date']:%Y-%m-%d}" in shown.splitlines()[0]
    assert "oelm study fair-classification" in " ".join(shown.split())


def test_json_has_all_and_old_benchmark_records_are_read():
    found = json.loads(run(ROOT / "results" / "demo", FREEZING, "--json"))
    assert found["rules"]["version"] == 3 and found["benchmarks"] == [FREEZING.name]
    assert found["runs"]["undated"] == 0 and sum(found["runs"].values()) == 38
    claims = {claim["id"]: claim for claim in found["claims"]}
    assert list(claims) == [f"C{i}" for i in range(1, 11)]
    (detail,) = claims["C2"]["details"]
    # 20.34 ms against 20.98 ms: certainly more than half of 3.6 %, certainly less than all of it.
    assert detail["verdict"] == "in part" and detail["number"] == pytest.approx(3.0, abs=0.1)
    assert (detail["n"], detail["source"]) == (12, FREEZING.name)
    assert claims["C2"]["verdict"] == "not decided" and "bert" in claims["C2"]["why"]


def test_a_folder_is_searched_and_nothing_counts_twice(tmp_path):
    shutil.copytree(ROOT / "results" / "demo", tmp_path / "a" / "demo")
    shutil.copytree(ROOT / "results" / "imdb_medium_512_cudnn", tmp_path / "loose")
    shutil.copy(FREEZING, tmp_path / "speed.json")
    (tmp_path / "other.json").write_text("[1, 2]")
    whole = collect([tmp_path])
    assert len(whole.analyses) == 2 and [one.name for one in whole.benchmarks] == ["speed.json"]
    assert [analysis.study is None for analysis in whole.analyses] == [False, True]
    again = collect([tmp_path, tmp_path / "a" / "demo", tmp_path / "loose", tmp_path / "speed.json"])
    assert len(again.analyses) == 2 and len(again.benchmarks) == 1
    shutil.copytree(tmp_path / "a", tmp_path / "copy")
    shutil.copy(FREEZING, tmp_path / "copy" / "other name.json")
    copied = collect([tmp_path])
    assert copied.ages == whole.ages and len(copied.benchmarks) == 1
    assert [len(v.details) for v in judge(copied.analyses)] == [len(v.details) for v in judge(whole.analyses)]


def test_what_cannot_be_used_is_named_and_the_rest_judged(tmp_path):
    shutil.copytree(ROOT / "results" / "demo", tmp_path / "demo")
    bad = tmp_path / "bad"
    shutil.copytree(ROOT / "results" / "demo", bad)
    (bad / "study.toml").write_text("[study]\nmethods = 3\n")
    found = collect([tmp_path])
    assert len(found.analyses) == 1 and len(found.left_out) == 1 and "bad" in found.left_out[0]
    shutil.rmtree(tmp_path / "demo")
    with pytest.raises(UserError, match="no study, run or record of oelm bench that can be used in"):
        collect([tmp_path])


@pytest.mark.parametrize("path", ["nowhere", "empty", "text.json"])
def test_a_users_mistake_is_one_line(tmp_path, path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.json").write_text("{}")
    with pytest.raises(UserError, match=path) as error:
        collect([tmp_path / path])
    assert "\n" not in str(error.value)


def test_runs_are_counted_by_when_they_ended():
    records = pairs(0)
    ends = ["2026-11-01T00:00:00+00:00", "2099-01-01T00:00:00+00:00", "2026-11-01", "soon", None]
    for record, ended in zip(records, ends, strict=False):
        record.results["ended"] = ended
    assert Collection([analyse_records(records, None)]).ages == {"before": 1, "after": 1, "undated": 8}
