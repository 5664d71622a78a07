"""The reference GPT's named sizes, as plain numbers: importing them does not import PyTorch."""

import functools
import re
from pathlib import Path

from oelm.system.files import read_object
from oelm.system.version import NUMERICS, NUMERICS_OTHERS

# Named sizes: (layers, d_model, heads, positions).
SIZES = {
    "gpt-tiny": (2, 128, 4, 512),
    "gpt-small": (4, 256, 4, 512),
    "gpt-medium-512": (6, 512, 8, 512),
    "gpt-medium-1024": (6, 512, 8, 1024),
    "gpt-medium-2048": (6, 512, 8, 2048),
    "gpt-large": (8, 768, 12, 512),
    "gpt2-small": (12, 768, 12, 1024),
    "gpt2-medium": (24, 1024, 16, 1024),
    "gpt2-large": (36, 1280, 20, 1024),
    "gpt2-xl": (48, 1600, 25, 1024),
}
PRESETS = tuple(SIZES)

# The reports' names: Tiny, Small, Medium-512, Large, and GPT-Large and GPT-XL for GPT-2's shapes.
REPORTED = {
    "tiny": "gpt-tiny",
    "small": "gpt-small",
    "medium": "gpt-medium-512",
    "medium512": "gpt-medium-512",
    "medium1024": "gpt-medium-1024",
    "medium2048": "gpt-medium-2048",
    "large": "gpt-large",
    "gptlarge": "gpt2-large",
    "gptxl": "gpt2-xl",
    "xl": "gpt2-xl",
}


def size_name(name: str) -> str:
    """The name in SIZES of a size in any spelling, such as Medium-512 or GPT_Medium_512; other names as they
    are."""
    if name in SIZES or Path(name).exists():
        return name
    letters = re.sub(r"[\s_-]+", "", name.lower())
    known = {re.sub("-", "", size): size for size in SIZES}
    return REPORTED.get(letters, known.get(letters, name))


def is_reference(name: str) -> bool:
    """Whether this is the reference GPT: one of its sizes, or the folder of a model that was saved here."""
    config = Path(name, "config.json")
    return name in SIZES or (config.is_file() and read_object(config).get("model_type") == "oelm-gpt")


@functools.cache
def numerics_of(name: str) -> int:
    return NUMERICS if is_reference(name) else NUMERICS_OTHERS
