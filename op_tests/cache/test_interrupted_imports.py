"""KeyboardInterrupt during the imports of a first build."""

from jitfmha.jit.fresh_process import run_fresh

# Interrupts the imports of the first build at every sixth module, each in a fork; prints the
# numbers of those after which a second attempt fails.
INTERRUPTED_IMPORTS = """
import os, sys
import torch
from jitfmha.jit.toolchain import cpp_extension

class Interrupter:
    def __init__(self, number):
        self.left = number
    def find_spec(self, name, path=None, target=None):
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt

def second_attempt(number):
    sys.meta_path.insert(0, Interrupter(number))
    try:
        cpp_extension._imported_cpp_extension()
        return 2
    except KeyboardInterrupt:
        cpp_extension._imported_cpp_extension()
        return 0

number, failed, status = 1, [], 0
while status != 2:
    child = os.fork()
    if child == 0:
        try:
            os._exit(second_attempt(number))
        except BaseException:
            os._exit(1)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status not in (0, 2):
        failed.append(number)
    number += 6
assert number > 7, "there was nothing to interrupt"
print(failed)
"""


def test_interrupted_imports_can_be_repeated():
    done = run_fresh(INTERRUPTED_IMPORTS, failure="the imports failed", timeout=120.0)
    assert done.stdout.split("\n")[-2] == "[]"
