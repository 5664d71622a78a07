"""Files as a user meets them in messages."""

import pytest

from oelm.system.files import write_text


def test_a_file_that_cannot_be_written_is_named_as_the_user_knows_it(tmp_path):
    with pytest.raises(FileNotFoundError) as caught:
        write_text(tmp_path / "none" / "report.md", "text")
    assert caught.value.filename == str(tmp_path / "none" / "report.md")
