"""memo.doctor on a GPU: what it finds there, and a page lock that the driver refuses."""

import io
import json
import os
from contextlib import redirect_stdout

from tests.nullcuda.runs import in_process


def told(**environment):
    """[exit code, {thing: what is found of it}] of the command, with a page lock of 16 MiB."""
    from memo import doctor
    os.environ.update(environment)
    doctor.LOCK_BYTES["cuda"] = 2**24
    with redirect_stdout(io.StringIO()) as said:
        code = doctor.main(["--json"])
    return [code, {f["what"]: f for f in json.loads(said.getvalue())["findings"]}]


def refused():
    return told(NULL_LOCKABLE_BYTES="1e6")


def test_a_gpu_without_a_fault(tmp_path):
    code, found = in_process(tmp_path, told)
    assert code == 0, [f for f in found.values() if f["remedy"]]
    assert found["GPU"]["expected"] == "h100-80gb" and found["ops=triton"]["found"] == "chosen"
    assert "chosen" in [found["attention=cudnn"]["found"], found["attention=flash"]["found"]]
    assert found["matmul"]["expected"] == "693 TFLOP/s"  # 0.7 of 989.4
    assert found["copies to and from the GPU, at once"]["expected"] == "25 GB/s"
    assert found["host memory taken, page-locked"]["found"].startswith("0.01562 GiB at ")


def test_a_page_lock_that_is_refused(tmp_path):
    code, found = in_process(tmp_path, refused)
    lock = found["host memory taken, page-locked"]
    assert code == 1 and lock["found"] == "refused" and "copies to and from the GPU, at once" not in found
    assert lock["remedy"].startswith("page-locking 0.01562 GiB (piece 1 of 1) of the host slab's 0.01562 GiB "
                                     "failed (CUDA error 2: out of memory; ulimit -l is ")
