"""Test rigs: systems with faults, a HIP runtime that records, and benchmark suites with bars.

They serve the tests and ``python -m jitfmha bench``, stay in a checkout and are in no wheel. A
pytest run has this folder's parent on its search path, and so has a process that runs one of the
suites (``jitfmha.bench.suite``).
"""
