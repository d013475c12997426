"""``gpushare doctor``: checks a GPU machine or node. Each finding has the problem, its place and a remedy.

One module for each group of checks. Each has a probe, which reads plain facts from the machine, and a pure function
that turns facts into findings. Nothing is changed on the machine.
"""
