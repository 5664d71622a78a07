"""`oelm bench`: our training step beside its peers', in one process, as ratios.

measure.py   arms, windows of steps, rounds: how anything here is timed and counted
load.py      how much work a window is, by the field's formula; and the data it is made of
ours.py      our trainer's own step as an arm
trainer.py   Hugging Face's Trainer as an arm
peers.py     the other peers: the original recipe, Hugging Face's and nanoGPT's way of language modelling
cases.py     what is measured against what
record.py    from windows to medians, ratios and savings, as JSON
show.py      the record as a table and as a chart
"""
