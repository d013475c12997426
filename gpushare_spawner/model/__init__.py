"""The words everybody uses: pure data, no I/O, no clock.

Everything else in the package imports this, and it imports nothing of ours.
"""
