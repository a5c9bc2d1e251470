"""A machine with an NPU as far as host registration goes: the look-alike of AscendCL in
tests/devices, and one of what torch_npu adds to torch.

Such a machine is a process of its own, since libraries and torch_npu stay in a process once they are there:

    run('''
    t = torch.empty(20).share_memory_()
    print(npu.aclrt_host_register(t.data_ptr(), 4096))
    ''')                    # -> Result: .output, .calls

The processes are forked from one that has PyTorch imported and nothing else done.
"""

import atexit
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
from typing import NamedTuple

LOOK_ALIKE = pathlib.Path(os.environ["DCP_FAKE_ACL"]).resolve()

SERVER = """
import atexit, ctypes, gc, importlib.util, json, os, sys, threading, types, warnings, weakref
import torch
import libdcp.torch.npu as npu
import libdcp.torch._pin as pin
import libdcp.torch._state_dict_utils as utils
if importlib.util.find_spec("torch.distributed.checkpoint._state_dict_stager"):
    import libdcp.torch._state_dict_stager as stagers

class FakeNpu:
    current = 0
    @staticmethod
    def is_available(): return True
    @staticmethod
    def current_device(): return FakeNpu.current

def plug_in(cudart=lambda: None):
    '''What torch_npu does to torch, as far as it matters here.'''
    sys.modules["torch_npu"] = types.ModuleType("torch_npu")
    torch.npu = FakeNpu
    torch.cuda.cudart = cudart

def serve():
    for line in sys.stdin:
        job = json.loads(line)
        child = os.fork()
        if child == 0:
            return job
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    os._exit(0)

job = serve()
os.environ.update(job["environment"])
for fd in (1, 2):
    os.dup2(os.open(job["output"] + str(fd), os.O_WRONLY | os.O_CREAT), fd)
exec(compile(job["script"], "script", "exec"))
"""


class Call(NamedTuple):
    process: int
    name: str
    arguments: tuple
    code: int


class Result(NamedTuple):
    output: str
    errors: str
    code: int
    calls: list

    def of(self, name):
        """The calls of one function."""
        return [call for call in self.calls if call.name == name]

    @property
    def is_memory_mapped_to_the_end(self):
        """Whether all that was unregistered was still there."""
        return not any("unmapped" in call.arguments for call in self.of("note"))


class _Machine:
    def __init__(self):
        self.root = pathlib.Path(tempfile.mkdtemp(prefix="dcp-fake-npu-"))
        self.libraries = self.root / "lib"  # there from the start: the dynamic linker forgets directories that are not
        self.libraries.mkdir()
        settings = dict(os.environ, LD_LIBRARY_PATH=str(self.libraries))
        settings.pop("ASCEND_HOME_PATH", None)
        pipe = subprocess.PIPE
        self.server = subprocess.Popen([sys.executable, "-c", SERVER], env=settings, stdin=pipe, stdout=pipe, text=True)

    def run(self, job):
        self.server.stdin.write(json.dumps(job) + "\n")
        self.server.stdin.flush()
        return int(self.server.stdout.readline())

    def stop(self):
        self.server.stdin.close()
        self.server.stdout.close()
        self.server.wait()
        shutil.rmtree(self.root)


_machine = None


def run(script, library="libascendcl.so", fail=None, has_npu=True, is_loaded=True, environment=None):
    """Runs a Python script on such a machine. `library`: name of the look-alike there, None: it has none; is_loaded: the process has
    it already, as torch_npu would. `fail`: a function of it
    and the code that it returns, "aclrtHostRegister=507899", with "@3" behind it the third time alone."""
    global _machine
    if _machine is None:
        _machine = _Machine()
        atexit.register(_machine.stop)
    where = _machine.libraries
    _empty(where)
    if library:
        (where / library).parent.mkdir(exist_ok=True)
        (where / library).symlink_to(LOOK_ALIKE)
    settings = {"FAKE_LOG": str(where / "log")}
    if fail:
        settings["FAKE_FAIL"] = fail
    settings.update((name, value.format(machine=where)) for name, value in (environment or {}).items())
    text = ("plug_in()\n" if has_npu else "") + ("ctypes.CDLL('libascendcl.so')\n" if is_loaded and library else "") + script
    code = _machine.run({"script": text, "environment": settings, "output": str(where / "output")})
    log = where / "log"
    calls = [_parse(line) for line in log.read_text().splitlines()] if log.exists() else []
    output, errors = ((where / f"output{fd}").read_text() for fd in (1, 2))
    return Result(output, errors, code, calls)


def _empty(directory):
    for entry in directory.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def _parse(line):
    head, code = line.rsplit("= ", 1)
    process, name, *arguments = head.split()
    return Call(int(process), name, tuple(arguments), int(code))
