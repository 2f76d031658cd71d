"""Test rigs: systems with faults, and a HIP runtime that records.

They serve the tests and two benchmark suites, stay in a checkout and are in no wheel. A pytest run
has this folder's parent on its search path, and so has a process that runs one of those suites
(`jitfmha.bench.rig_suites`).
"""
