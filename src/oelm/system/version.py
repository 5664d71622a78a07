"""The versions, in one place: read by the build, the command line and every run record."""

__version__ = "0.1.0"

# Of what a run computes: raised by hand whenever the same configuration no longer gives the same bits
# (tests/test_guard.py notices). Runs of different numbers are never compared.
NUMERICS = 5
# The same of models that are not the reference GPT (`models.gpt_sizes.numerics_of`). Their training on a GPU
# may change while studies of the reference GPT go on.
NUMERICS_OTHERS = 6
