#!/usr/bin/env bash
# build.sh PYTHON LIBRARY: compiles null CUDA for the torch that PYTHON has. Exit code 77 where a compiler or CUDA's headers lack.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd) python=$1 library=$2
skip() { echo "test-cuda is skipped: $1" >&2; exit 77; }
command -v g++ >/dev/null || skip "there is no g++"
site=$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
toolkit=${CUDA_HOME:-$(nvcc --dryrun -x cu /dev/null 2>&1 | sed -n 's/^#\$ TOP=//p' || true)}
# torch's own pip packages first: their cuBLAS and NCCL are the ones to stand in for. A toolkit has what they lack (crt/)
folders=()
for folder in "$site"/nvidia/cu1*/include "$site"/nvidia/*/include ${toolkit:+"$toolkit/include"}; do
    [ -d "$folder" ] && folders+=("-I$folder")
done
for header in cuda_runtime_api.h crt/host_defines.h cublasLt.h nccl.h; do
    echo "#include <$header>" | g++ -E -x c++ "${folders[@]}" - >/dev/null 2>&1 ||
        skip "there is no $header, neither of a CUDA toolkit (CUDA_HOME) nor of pip's nvidia packages"
done
# it is libcuda.so.1 too, which nobody has without a GPU's driver
g++ -O2 -std=c++20 -Wall -shared -fPIC "${folders[@]}" "$here"/*.cpp -o "$library" -Wl,-soname,libcuda.so.1
