"""`oelm bench`: our training step beside its peers', in one process, as ratios.

measure.py   arms, windows of steps, rounds: how anything here is timed and counted
load.py      a case: how much work a window is, by the field's formula; and the data it is made of
arms.py      our trainer's own step, Hugging Face's Trainer, the original recipe, two language models
cases.py     what is measured against what
run.py       from windows to medians, ratios and savings, as JSON
show.py      the record as a table and as a chart
"""
