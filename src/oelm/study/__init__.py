"""Studies: fair comparisons of methods, from the plan to the report, and the published experiments."""
