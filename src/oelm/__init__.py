"""OELM Transformers."""
