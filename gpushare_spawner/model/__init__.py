"""The vocabulary of the package: pure data, without I/O and without a clock.

All other packages import the model. The model imports no other package.
"""
