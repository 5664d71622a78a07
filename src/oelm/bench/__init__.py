"""`oelm bench`: our training step compared with its peers', in one process, as ratios.

measure.py   arms, windows of steps, rounds: the timing
load.py      a case: its data, and the operations of a window by the usual formula
arms.py      our trainer's own step, Hugging Face's Trainer, the original recipe, two language models
cases.py     the cases and their arms
run.py       from windows to medians, ratios and savings, as JSON
show.py      the record as a table and as a chart
"""
