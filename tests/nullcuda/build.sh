#!/usr/bin/env bash
# build.sh PYTHON LIBRARY: compiles null CUDA for the torch that PYTHON has. Without CUDA's headers: "no header ...", exit code 1.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd) python=$1 library=$2
site=$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
toolkit=${CUDA_HOME:-$(nvcc --dryrun -x cu /dev/null 2>&1 | sed -n 's/^#\$ TOP=//p' || true)}
# torch's own pip packages first, their cuBLAS and NCCL are the ones to stand in for; then a toolkit
folders=()
for folder in "$site"/nvidia/cu1*/include "$site"/nvidia/*/include ${toolkit:+"$toolkit/include"}; do
    if [ -d "$folder" ]; then folders+=("-I$folder"); fi
done
for header in cuda_runtime_api.h crt/host_defines.h cublasLt.h cudnn.h nccl.h; do
    echo "#include <$header>" | g++ -E -x c++ "${folders[@]}" - >/dev/null 2>&1 ||
        { echo "no header $header, neither in a CUDA toolkit (CUDA_HOME) nor in pip's nvidia packages"; exit 1; }
done
# it is libcuda.so.1 too, which nobody has without a GPU's driver
g++ -O2 -std=c++20 -Wall -shared -fPIC "${folders[@]}" "$here"/*.cpp -o "$library" -Wl,-soname,libcuda.so.1
