#!/usr/bin/env bash
# run.sh PYTHON TORCH tests|bench: installs torch's CUDA build into a venv of its own, builds null CUDA, runs. TORCH may be empty.
set -euo pipefail
cd "$(dirname "$0")/../.."
here=tests/nullcuda python=$1 what=$3
pinned=$(sed -n 's/^torch===//p' $here/requirements.txt) torch=${2:-$pinned}
skip() { echo "test-cuda is skipped: $1"; exit 0; }
[ "$(uname -s)" = Linux ] || skip "torch's CUDA build needs Linux"
command -v g++ >/dev/null || skip "there is no g++"
venv=.venv-cuda/$torch
if ! cmp -s $here/requirements.txt "$venv/.installed"; then  # 6 GB
    "$python" -m venv "$venv"
    "$venv/bin/pip" install --quiet -r <(sed "s/^torch===.*/torch===$torch/" $here/requirements.txt) -r <(grep -v '^torch==' requirements.txt)
    cp $here/requirements.txt "$venv/.installed"
fi
if ! why=$($here/build.sh "$venv/bin/python" "$PWD/$venv/libnull.so" 2>&1); then
    [[ $why == "no header "* ]] && skip "$why"
    echo "$why" >&2
    exit 1
fi
mkdir -p "$venv/driver"
for name in libcuda.so libcuda.so.1; do ln -sf ../libnull.so "$venv/driver/$name"; done
if [ "$what" = tests ]; then "$venv/bin/python" -m pytest -q tests/test_ops.py; fi  # in Triton's interpreter
export LD_PRELOAD=$PWD/$venv/libnull.so TRITON_LIBCUDA_PATH=$PWD/$venv/driver  # Triton links its launchers to the driver
if [ "$what" = bench ]; then exec "$venv/bin/python" -m tests.nullcuda.modelled; fi
exec "$venv/bin/python" -m pytest -q $here
