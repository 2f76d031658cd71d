"""Calls in forked children, which have none of their parent's threads."""

import sys

import pytest
from subprocesses import run_python

# With torch's threads in use its own operators hang in a child, where nothing but the call is made.
CODE = """
import os, sys, time
import torch
from jitfmha import fmha_fwd

before, threads = sys.argv[1] == "True", int(sys.argv[2])
torch.set_num_threads(threads)
q, k, v = torch.randn(3, 1, 300, 4, 64)
fmha_fwd(*(x[:, :16, :1] for x in (q, k, v)))  # loads the library; one thread has all of it
expected = fmha_fwd(q, k, v).numpy() if before else None
child = os.fork()
if child == 0:
    out = fmha_fwd(q, k, v)
    used = len(os.listdir("/proc/self/task"))
    right = expected is None or out.numpy().tobytes() == expected.tobytes()
    os._exit(10 + used if right else 1)
deadline = time.monotonic() + 60
while time.monotonic() < deadline:
    pid, status = os.waitpid(child, os.WNOHANG)
    if pid:
        print(os.waitstatus_to_exitcode(status))
        break
    time.sleep(0.01)
else:
    os.kill(child, 9)
    print("it hangs")
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts threads in /proc")
@pytest.mark.parametrize(
    ("before", "threads", "used"),
    [
        (True, 2, 1),  # the parent's pool is lost: the child goes on alone
        (True, 1, 1),
        (False, 2, 2),  # nobody has lost anything: the child has a pool of its own
    ],
)
def test_call_in_a_child(before, threads, used):
    done = run_python("-c", CODE, str(before), str(threads), code=None)
    assert done.stdout.strip() == str(10 + used), done.stdout + done.stderr


DURING_AN_IMPORT = """
import os, signal, sys, threading
import torch
from jitfmha.jit.toolchain.cpp_extension import _imported_cpp_extension

name = "torch.utils.cpp_extension"
assert name not in sys.modules
thread = threading.Thread(target=_imported_cpp_extension)
thread.start()
while name not in sys.modules:
    pass
child = os.fork()
if child == 0:
    signal.alarm(60)
    os._exit(10 if hasattr(_imported_cpp_extension(), "load") else 1)
thread.join()
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_fork_waits_for_what_a_thread_imports_to_build():
    """Python would keep the import's lock in the child, for a thread that is not there."""
    done = run_python("-c", DURING_AN_IMPORT)
    assert done.stdout.strip() == "10", done.stdout + done.stderr
