"""Where builds are kept: found (store.py), built in turns (turn.py), listed and evicted."""
