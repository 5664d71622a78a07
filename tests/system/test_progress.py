"""What a run says of its progress, in a terminal and in its log."""

import json

from oelm.cli.run import log_line
from oelm.system.progress import Display


def test_a_large_perplexity_has_no_exponent():
    """As those of a language model that has just begun: its vocabulary."""
    display = Display("x", 10, 0, show=False)
    display.note(perplexity=52_341.7, loss=10.86554)
    assert display.latest == {"perplexity": "52,342", "loss": "10.87"}
    entry = {"kind": "eval", "step": 10, "split": "validation", "metrics": {"perplexity": 52_341.7}}
    assert log_line(json.dumps(entry)) == "step 10: validation perplexity 52,342"
