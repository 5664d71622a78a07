"""docs/pretrained.md: its commands and its program run as they stand, on a tiny model under the same name."""

import re
import shlex
from pathlib import Path

import transformers

import oelm
from tests.models.test_pretrained import oelm_cli, save, world  # noqa: F401 - fixtures

PAGE = (Path(__file__).parents[1] / "docs" / "pretrained.md").read_text()


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", PAGE, flags=re.DOTALL)


def test_the_page_on_pretrained_models(oelm_cli, world, save):  # noqa: F811
    save("bert-base-uncased")
    (world / "my.csv").write_text((world / "three.csv").read_text())
    commands = [line for block in blocks("sh") for line in block.splitlines()]
    assert len(commands) == 5
    for command in commands:
        words = shlex.split(command)[1:]
        if words[0] == "train":
            words += ["--max-length", "24", "--steps", "2"]
        code, _, err = oelm_cli(*words)
        assert code == 0, (command, err)
    for program in blocks("python"):
        exec(program, {})
    assert oelm.load(str(world / "bert-oelm")).config.oelm["method"]["name"] == "oelm"
    plain = transformers.AutoModelForSequenceClassification.from_pretrained(
        world / "runs" / "probe" / "model"
    )
    assert plain.config.num_labels == 3


def test_every_method_it_names_is_a_preset():
    names = re.findall(r"^\| `([a-z0-9-]+)`(?:, `([a-z0-9-]+)`)? \|", PAGE, flags=re.MULTILINE)
    named = {name for pair in names for name in pair if name}
    assert {"baseline", "frozen", "oelm-polar-scaled", "linear-probe", "top-2"} <= named <= set(oelm.PRESETS)
