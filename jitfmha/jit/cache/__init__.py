"""Where builds are kept: found (entry.py), built in turns (turn.py), listed and evicted."""
