"""The version, in one place: read by the build, the command line and every run record."""

__version__ = "0.1.0"
