"""OELM Transformers: freeze orthogonal query and key projections, train the rest, compare fairly."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oelm.system.startup import without_collection
from oelm.system.version import __version__

if TYPE_CHECKING:
    from oelm.inference.predictor import Predictor


def _is_command_line() -> bool:
    """Whether this process is `oelm ...` or `python -m oelm ...`, the interpreter's own options aside."""
    words = iter(sys.orig_argv[1:])
    for word in words:
        if word == "-m":
            return next(words, "") == "oelm"
        if word in ("-X", "-W"):
            next(words, None)
        elif word == "-c" or not word.startswith("-"):
            break
    return Path(sys.argv[0]).name in ("oelm", "oelm.exe")


# `oelm --help` must not wait seconds for torch, so the command line imports what a verb needs itself.
# Everyone else gets the whole surface, and the reference GPT registered with transformers' Auto classes.
if not _is_command_line():
    with without_collection():
        from oelm.audit import Audit, Fingerprint, audit, fingerprint
        from oelm.convert import ConversionReport, convert, load, refreeze, release
        from oelm.errors import AuditError, Interrupted, RunError, UserError
        from oelm.method import PRESETS, Method, get_method
        from oelm.models.create import create_oelm_classifier, to_gpt2
        from oelm.models.families import FAMILIES, Attention, Family
        from oelm.models.gpt import (
            OelmGPTForCausalLM,
            OelmGPTForQuestionAnswering,
            OelmGPTForSequenceClassification,
            OelmGPTForTokenClassification,
            OelmGPTModel,
        )
        from oelm.models.gpt_config import OelmGPTConfig, gpt_config
        from oelm.study.request import report, study
        from oelm.training.freezing import Freezing
        from oelm.training.request import train

    __all__ = [
        "FAMILIES", "PRESETS", "Attention", "Audit", "AuditError", "ConversionReport", "Family",
        "Fingerprint", "Freezing", "Interrupted", "Method", "OelmGPTConfig", "OelmGPTForCausalLM",
        "OelmGPTForQuestionAnswering", "OelmGPTForSequenceClassification", "OelmGPTForTokenClassification",
        "OelmGPTModel", "Predictor", "RunError", "UserError", "__version__", "audit", "convert",
        "create_oelm_classifier", "fingerprint", "get_method", "gpt_config", "load", "refreeze", "release",
        "report", "study", "to_gpt2", "train",
    ]  # fmt: skip

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name == "Predictor":  # needs most of the package, and more packages than the rest
            from oelm.inference.predictor import Predictor

            return Predictor
        raise AttributeError(f"module 'oelm' has no attribute {name!r}")
