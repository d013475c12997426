"""``gpushare doctor``: checks a GPU machine or node. Each finding consists of a problem, its place and a remedy.

There is one module for each group of checks. Each module has a probe, which reads plain facts from the machine, and a
pure function that turns the facts into findings. The doctor changes nothing on the machine.
"""
