"""The versions, which the build, the command line and every run record read from here."""

__version__ = "0.1.0"

# Version of a run's numbers: raised by hand whenever the same configuration no longer gives the same bits
# (tests/test_guard.py fails then). Runs of different versions are never compared.
NUMERICS = 5
# The same for models other than the reference GPT (`models.gpt_sizes.numerics_of`), so that their training on
# a GPU can change without ending studies of the reference GPT.
NUMERICS_OTHERS = 6
