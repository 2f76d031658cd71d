#!/usr/bin/env bash
# Builds shared libraries of this export and benchmarks with them, in the current folder:
#
#     bash build_mha.sh         both directions
#     bash build_mha.sh fwd     libmha_fwd.so, and benchmark_mha_fwd, which is fwd.exe, too
#     bash build_mha.sh bwd     libmha_bwd.so, and benchmark_mha_bwd, which is bwd.exe, too
#     bash build_mha.sh fwd_v3  libmha_fwd.so with no kernels but those that come ready
#     bash build_mha.sh bwd_v3  the same of backward
#
# CXX and CXXFLAGS say how: g++ and -O2.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

build() {  # a direction, and what the library goes without
  local way=$1 without=()
  for each in "${@:2}"; do without+=("-DJITFMHA_WITHOUT_$each"); done
  local compiler=("${CXX:-g++}" -std=c++17 -ffp-contract=off "-I$here/include")
  read -ra flags <<< "${CXXFLAGS:--O2}"
  "${compiler[@]}" "${flags[@]}" "${without[@]}" -shared -fPIC -fvisibility=hidden \
    "-Wl,--version-script=$here/src/exported_symbols.map" "-Wl,-soname,libmha_$way.so" \
    "$here"/src/*.cpp -ldl -o "libmha_$way.so"
  "${compiler[@]}" "${flags[@]}" "$here/benchmarks/bench_mha_$way.cpp" \
    -L. "-lmha_$way" '-Wl,-rpath,$ORIGIN' -ldl -o "benchmark_mha_$way"
  ln -f "benchmark_mha_$way" "$way.exe"
}

case "${1-}" in
  "") build fwd BACKWARD && build bwd FORWARD ;;
  fwd) build fwd BACKWARD ;;
  bwd) build bwd FORWARD ;;
  fwd_v3) build fwd BACKWARD COMPILED ;;
  bwd_v3) build bwd FORWARD COMPILED ;;
  *) echo "build_mha.sh takes fwd, bwd, fwd_v3, bwd_v3 or nothing, not $1" >&2 && exit 2 ;;
esac
