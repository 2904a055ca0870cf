#!/usr/bin/env bash
# run.sh PYTHON TORCH tests|te|bench: installs torch's CUDA build into a venv of its own, builds null CUDA, runs. TORCH may be empty.
set -euo pipefail
cd "$(dirname "$0")/../.."
here=tests/nullcuda python=$1 what=$3
pinned=$(sed -n 's/^torch===//p' $here/requirements.txt) torch=${2:-$pinned}
case $what in te) target=test-te ;; bench) target=test-cuda-bench ;; *) target=test-cuda ;; esac
skip() { echo "$target is skipped: $1"; if [ $what = te ]; then exit 1; else exit 0; fi; }  # te was asked for by name
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
if [ "$what" = te ] && ! cmp -s $here/requirements-te.txt "$venv/.installed-te"; then  # 0.4 GB, and a compiler for 9 minutes
    toolkit=${CUDA_HOME:-$(nvcc --dryrun -x cu /dev/null 2>&1 | sed -n 's/^#\$ TOP=//p' || true)}
    [ -n "$toolkit" ] || skip "transformer-engine's build needs a CUDA toolkit (CUDA_HOME)"
    packages() { grep "$@" $here/requirements-te.txt; }
    pip() { "$venv/bin/python" -m pip install --quiet "$@"; }
    pip -r <(packages -v '^transformer_engine')
    pip --no-deps -r <(packages '^transformer_engine' | grep -v torch)
    headers=$(echo "$PWD/$venv"/lib/python*/site-packages/nvidia/{cu1*,cudnn,nccl}/include | tr ' ' :)
    MAX_JOBS=${MAX_JOBS:-2} CUDA_HOME=$toolkit CPATH=$headers NVTE_FRAMEWORK=pytorch pip --no-build-isolation --no-deps -r <(packages _torch)
    cp $here/requirements-te.txt "$venv/.installed-te"
fi
mkdir -p "$venv/driver"
for name in libcuda.so libcuda.so.1; do ln -sf ../libnull.so "$venv/driver/$name"; done
if [ "$what" = tests ]; then "$venv/bin/python" -m pytest -q tests/test_ops.py; fi  # in Triton's interpreter
export LD_PRELOAD=$PWD/$venv/libnull.so TRITON_LIBCUDA_PATH=$PWD/$venv/driver  # Triton links its launchers to the driver
if [ "$what" = bench ]; then exec "$venv/bin/python" -m tests.nullcuda.modelled; fi
if [ "$what" = te ]; then exec "$venv/bin/python" -m pytest -q $here/test_te.py; fi
exec "$venv/bin/python" -m pytest -q $here --ignore=$here/test_te.py
