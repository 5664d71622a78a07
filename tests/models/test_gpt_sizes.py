"""Which models are the reference GPT, whose numerics version stays while its studies go on."""

import oelm
from oelm.models.gpt_sizes import PRESETS, is_reference, numerics_of
from oelm.system.version import NUMERICS, NUMERICS_OTHERS
from tests.tiny import build


def test_the_reference_gpt_has_a_numerics_version_of_its_own(tmp_path):
    gpt = oelm.create_oelm_classifier(num_classes=2, d_model=16, num_layers=1, num_heads=2, vocab_size=40)
    gpt.save_pretrained(tmp_path / "gpt")
    build("bert").save_pretrained(tmp_path / "bert")
    assert all(is_reference(name) for name in (*PRESETS, str(tmp_path / "gpt")))
    assert not is_reference(str(tmp_path / "bert")) and not is_reference("bert-base-uncased")
    assert numerics_of("gpt-tiny") == numerics_of(str(tmp_path / "gpt")) == NUMERICS
    assert numerics_of("bert-base-uncased") == numerics_of(str(tmp_path / "bert")) == NUMERICS_OTHERS
