"""Studies: the catalogue of published experiments."""
