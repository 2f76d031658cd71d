#!/usr/bin/env bash
# The forward kernels that come ready, over the shapes of AITER's smoke test, against float64:
#
#   op_tests/smoke_test_fwd_v3.sh -a gfx942|MI300X|MI308X|gfx950|MI355X [-n COUNT] [-s SEED]
#
# on the GPU if there is one of that architecture, else on the emulator. The emulator runs COUNT
# problems drawn from SEED (40 and 0), a GPU all; `-n all` runs all everywhere.
set -euo pipefail
exec python3 "$(dirname "${BASH_SOURCE[0]}")/smoke_fwd_v3.py" "$@"
