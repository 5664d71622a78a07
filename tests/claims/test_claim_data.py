"""The claims as data: the published figures, and sentences in two languages."""

import re
import string
import subprocess
import tomllib
from pathlib import Path

import pytest

from oelm.claims import cases as claim_cases
from oelm.claims import data as claim_data
from oelm.claims import remarks as claim_remarks
from oelm.claims import speed as claim_speed
from oelm.claims import verdicts as claims
from oelm.cli import claims as claims_command
from oelm.study.catalogue import get_experiment
from oelm.study.decide import FEWEST_SEEDS
from oelm.study.design import shipped_studies
from tests.claims.claim_records import MEDIUM, QK


def published(id: str, key: str) -> float:
    return float(get_experiment(id).published[key])


def test_the_published_figures_are_those_of_the_reports():
    known = {claim.id: claim for claim in claim_data.read_claims()}
    figures = {
        "C1": {"imdb": 7.14, "ag_news": 5.69, "xnli": 11.60},
        "C3": {"xnli": 1.08, "sst2": 98.0, "mnli": 98.5},
        "C4": {"tinystories": 9.8, "openwebtext": 14.9, "wikitext-103": 15.5, "any": None},
        "C5": {"any": 6.0},
    }  # fmt: skip
    for id, parts in figures.items():
        assert {task: part.published for task, part in known[id].parts.items()} == parts
    every = [part for claim in known.values() for part in claim.parts.values()]
    assert {part.share for part in every if part.measure in ("points", "saving")} == {0.5}
    speeds = {"classifier": 3.6, "bert": 57.0, "medium-512": 29.0, "gpt-01-07": 0.0}
    assert {name: part.published for name, part in known["C2"].parts.items()} == speeds
    assert claim_data.claim_data()["margins"] == {"share": 1.0, "perplexity": 5.0}
    assert {part.above for part in every if part.measure == "increase"} == {5.0}
    assert all(part.above == part.published for part in every if part.measure == "kept")
    assert all(part.at_margin for part in every if part.measure == "difference")
    assert known["C9"].frozen == {"gpt": 7.0, "bert": 12.9}
    assert known["C8"].ratio == [3.0, 5.0]
    assert list(known) == [f"C{i}" for i in range(1, 11)]
    for family, model in claim_data.claim_data()["sizes"].items():
        total, frozen = QK[model]
        assert round(100 * frozen / total, 1) == known["C9"].frozen[family]


def test_the_published_figures_follow_from_the_experiments():
    """Each figure again, from the two published runs it was computed from."""
    seen = 0
    for claim in claim_data.read_claims():
        for task, part in claim.parts.items():
            if not part.experiments:
                continue
            ours, theirs = part.experiments
            if claim.rule == "speed":
                times = [get_experiment(id).published["time_s"] for id in part.experiments]
                assert part.published == pytest.approx(100 * (1 - times[0] / times[1]), abs=0.3)
                continue
            if task != "any":
                assert {get_experiment(id).config["task"]["name"] for id in part.experiments} == {task}
            if part.measure in ("points", "kept"):
                a, b = (published(id, "best_accuracy") for id in part.experiments)
                figure = 100 * (a - b) if part.measure == "points" else 100 * a / b
            else:
                a, b = (published(id, "perplexity") for id in part.experiments)
                if part.measure == "saving_per_parameter":
                    a, b = a / (QK[MEDIUM][0] - QK[MEDIUM][1]), b / QK[MEDIUM][0]
                    assert (f"{b:.2e}", f"{a:.2e}") == ("9.22e-08", "1.12e-07")
                figure = 100 * (a / b - 1) if part.measure == "increase" else 100 * (b / a - 1)
            assert part.published == pytest.approx(figure, abs=0.055), (claim.id, ours, theirs)
            seen += 1
    assert seen == 11
    (c6,) = (claim for claim in claim_data.read_claims() if claim.id == "C6")
    assert c6.parts["any"].published == pytest.approx(100 * (1.19 / 1.098 - 1), abs=0.05)


def test_every_sentence_says_the_same_in_both_languages():
    data = claim_data.claim_data()
    groups = {"words": data["words"], **{f"control {k}": v for k, v in data["controls"].items()}}
    for group, sentences in groups.items():
        for key, (english, chinese) in sentences.items():
            names = [{name for _, name, _, _ in string.Formatter().parse(text) if name}
                     for text in (english, chinese)]  # fmt: skip
            assert names[0] == names[1], (group, key)
    assert set(data["verdicts"]) == {"supported", "refuted", "in part", "not decided"}
    modules = (claims, claim_cases, claim_remarks, claim_speed, claims_command)
    source = "".join(Path(str(m.__file__)).read_text() for m in modules)
    used = set(re.findall(r'"(\w+)"', source)) | {f"published_{w}" for w in ("inside", "above", "below")}
    verdicts, kinds = ("supported", "refuted", "open"), ("above", "share", "within")
    used |= {f"{verdict}_{kind}" for verdict in verdicts for kind in kinds} | {"n_seeds", "n_rounds"}
    used |= {part.measure for claim in claim_data.read_claims() for part in claim.parts.values()}
    assert data["words"].keys() <= used


def test_what_decides_a_claim_is_shipped():
    """Every study that a reason asks for exists, and the claims' methods and tasks are in it."""
    for claim in claim_data.read_claims():
        studies = re.findall(r"(?:fair|lm)-[\w-]+", claim.advice)
        assert set(studies) <= shipped_studies().keys() and (studies or claim.rule == "speed")
        plans = [tomllib.loads(shipped_studies()[name].read_text())["study"] for name in studies]
        for plan in plans:
            assert {claim.method, claim.reference_arm} <= set(plan["methods"])
            assert plan["seeds"] >= FEWEST_SEEDS
        tasks = {task for plan in plans for task in plan["tasks"]}
        if claim.rule != "speed":
            assert {name for name in claim.parts if name != "any"} <= tasks and len(tasks) >= claim.tasks


def test_what_would_decide_a_claim_has_its_gpu_hours():
    hours = {claim.id: claim.hours for claim in claim_data.read_claims()}
    known = claim_data.claim_data()["hours"]
    assert known.keys() - {"bench"} <= shipped_studies().keys()
    assert hours["C1"] == known["fair-classification"] and hours["C2"] == known["bench"]
    assert hours["C4"] == known["fair-language"] and hours["C5"] == known["lm-gap-controls"]
    assert hours["C10"] == known["lm-gap"] + known["bench"]
    assert hours["C7"] == sum(known[name] for name in ("fair-classification", "lm-gap", "fair-minilm"))
    assert all(hours.values())


def test_the_rules_have_a_date_a_version_and_a_commit():
    rules = claim_data.claim_data()["rules"]
    assert rules["date"].tzinfo is not None and rules["version"] >= 2
    path = "src/oelm/claims/claims.toml"
    shown = subprocess.run(
        ["git", "show", f"{rules['commit']}:{path}"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    if shown.returncode:
        pytest.skip("no history here")
    fixed = tomllib.loads(shown.stdout)
    assert {key: fixed["rules"][key] for key in ("date", "version")} == {
        key: rules[key] for key in ("date", "version")
    }
    now = claim_data.claim_data()
    assert all(fixed[key] == now[key] for key in ("claims", "margins", "sizes", "shapes"))  # what decides
