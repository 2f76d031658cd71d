"""SIGINT during the imports of a first build."""

from rigs.fresh_run import run_fresh
from subprocesses import PATIENCE_SECONDS

# Interrupts the imports of the first build at every sixth module, each in a fork: twice, as the
# first one waits for their end. Prints the numbers of those after which a second attempt fails.
INTERRUPTED_IMPORTS = """
import os, signal, sys
import torch
from jitfmha.jit.toolchain import cpp_extension

# Whoever started the tests may have it ignored, as shells do for what runs in the background.
signal.signal(signal.SIGINT, signal.default_int_handler)

class Interrupter:
    def __init__(self, number, signals):
        self.left, self.signals = number, signals
    def find_spec(self, name, path=None, target=None):
        self.left -= 1
        if self.left == 0:
            for _ in range(self.signals):
                signal.raise_signal(signal.SIGINT)

def second_attempt(number, signals=2):
    sys.meta_path.insert(0, Interrupter(number, signals))
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

def fails(_):
    signal.raise_signal(signal.SIGINT)
    raise ImportError

whole = []
import_module = cpp_extension.import_module
cpp_extension.import_module = lambda name: whole.append(import_module(name)) or whole[-1]
print(second_attempt(1, signals=1) == 0 and len(whole) == 2 and whole[0] is whole[1])
cpp_extension.import_module = fails
try:
    cpp_extension._imported_cpp_extension()
except KeyboardInterrupt:
    print("interrupted")
"""


def test_interrupted_imports_can_be_repeated():
    done = run_fresh(INTERRUPTED_IMPORTS, failure="it failed", timeout=PATIENCE_SECONDS)
    assert done.stdout.split("\n")[-4:-1] == ["[]", "True", "interrupted"]
