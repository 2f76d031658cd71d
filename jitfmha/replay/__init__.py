"""Launches that are written down and run again: are the arguments wrong, or is it the kernel?

`recording.py` writes a folder for each launch, `record.py` says what is in it, `rerun.py` runs it
again, and `expected_arguments.py` says what the arguments should be.
"""
