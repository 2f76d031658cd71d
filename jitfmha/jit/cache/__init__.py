"""Where builds are kept: what a store has to do (store.py), and the local one (local_store.py)."""
