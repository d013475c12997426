"""``gpushare doctor``: checks a GPU machine or node, and says for each finding what is wrong, where, and what to do.

One module for each group of checks. Each has a thin probe, which looks and returns plain facts, and a pure function
that turns facts into findings. Nothing is changed on the machine.
"""
