"""benchmarks/cost_model.py: its tables in docs/clusters.md are current, and what it says is within bounds."""

import pytest

from benchmarks import cost_model
from benchmarks.cost_model import PAGE, RECORDS, Shape, fit, read, sent_bytes, tables, written
from oelm.models.gpt_sizes import SIZES


def test_the_page_has_the_tables_that_the_script_makes(capsys):
    page = PAGE.read_text()
    assert written(page, tables()) == page, "python benchmarks/cost_model.py --write"
    assert written(page, {"measured": "x\n"}) != page
    cost_model.main([])
    assert tables()["extrapolated"] in capsys.readouterr().out


def test_predictions_are_near_what_was_measured():
    """From 1.0M parameters on a CPU to 1.56 billion on an H200."""
    fitted = fit()
    steps = {name: read(*place) for name, place in RECORDS.items()}
    assert (
        min(s.parameters for s in steps.values()) < 1e6 and max(s.parameters for s in steps.values()) > 1.5e9
    )
    for name, step in steps.items():
        assert fitted.seconds(step) == pytest.approx(step.step_s, rel=0.16 if step.cpu else 0.12), name
        if step.memory:
            assert fitted.memory(step) == pytest.approx(step.memory, rel=0.21), name


def test_its_shapes_are_the_models():
    for name in ("Medium-512, language model", "gpt2-xl, language model"):
        size = "gpt2-xl" if "xl" in name else "gpt-medium-512"
        assert Shape.of(size).total == read(*RECORDS[name]).parameters
        assert RECORDS[name][3:] == SIZES[size][:2]
    assert Shape.of("gpt-medium-512").qk == 3_145_728


@pytest.mark.parametrize("gpus", [2, 8, 1024])
def test_freezing_saves_half_as_many_bytes_under_fsdp2(gpus):
    """DDP reduces and hands back; FSDP2 only scatters, and gathers frozen weights as all others."""
    shape = Shape.of("gpt2-xl")
    saved = [
        sent_bytes(shape, shape.total, gpus, fsdp) - sent_bytes(shape, shape.total - shape.qk, gpus, fsdp)
        for fsdp in (False, True)
    ]
    assert saved == pytest.approx([2 * 4 * shape.qk * (gpus - 1) / gpus, 4 * shape.qk * (gpus - 1) / gpus])
