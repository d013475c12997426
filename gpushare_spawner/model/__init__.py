"""The vocabulary of the package: pure data, no I/O, no clock.

All other packages import the model; the model imports none of them.
"""
