"""The process that writes for saves of the kind PROCESS: one for each program, started at the first such save.

Plans, messages between ranks, and the commit stay with the program. The helper is given a writer, a plan and what is to be written,
calls `write_data`, and answers with the results or with what was raised. Tensors reach it in shared memory: those that the stager
has put there as they are, others by way of a copy in memory without a name, so that nothing is left behind however either process
ends. No device is touched in it, and it needs no process group.
"""

import atexit
import io
import mmap
import multiprocessing.spawn
import os
import pickle
import socket
import subprocess
import sys
import threading
from multiprocessing.connection import Connection

import torch
from torch.distributed.checkpoint.api import _is_wrapped_exception

from . import _copy, _memory, _uploads
from ._steps import attempt, packed

ALIGNMENT = 64
PARENT_CHECK_S = 5.0


# ---- in the program ----


class Helper:
    """The program's end. One request at a time."""

    def __init__(self):
        self._lock = threading.Lock()
        self._process = None
        self._pipe = None

    @property
    def pid(self):
        """Of the process, None if none runs."""
        return self._process.pid if self._process is not None else None

    def write(self, writer, plan, data):
        """The results of `writer.write_data(plan, ...)` for the data of the plan's items, raising what it raised. RuntimeError with
        the exit code if the process dies; the next request starts another."""
        request = _Request((writer, plan, data))
        try:
            with self._lock:
                answer = self._ask(request.header())
        finally:
            request.close()
        value = pickle.loads(answer)
        if _is_wrapped_exception(value):
            raise value[0]
        return value

    def stop(self):
        with self._lock:
            if self._process is not None:
                self._give_up()

    def _ask(self, header):
        if self._process is None or self._process.poll() is not None:
            self._start()
        try:
            self._pipe.send_bytes(header)
            return self._pipe.recv_bytes()
        except (EOFError, OSError) as error:
            raise RuntimeError(
                f"the helper process that writes checkpoints has died. Exit code: {self._give_up()}"
            ) from error

    def _start(self):
        """By executing a new interpreter, never by forking: the program has threads and devices."""
        ours, theirs = socket.socketpair()
        environment = dict(os.environ, TORCH_DEVICE_BACKEND_AUTOLOAD="0", CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")
        with theirs:
            call = f"from {__name__} import main; main({theirs.fileno()}, {os.getpid()})"
            environment["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
            self._process = subprocess.Popen(
                [sys.executable, "-c", call], env=environment, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL
            )
        self._pipe = Connection(ours.detach())
        preparation = multiprocessing.spawn.get_preparation_data("libdcp-helper")
        preparation.pop("authkey", None)  # for processes that talk by multiprocessing's own means
        self._pipe.send(preparation)

    def _give_up(self):
        """Closing the pipe ends the process. Returns its exit code."""
        self._pipe.close()
        try:
            return self._process.wait(timeout=PARENT_CHECK_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()
        finally:
            self._process = self._pipe = None


helper = Helper()
atexit.register(helper.stop)
os.register_at_fork(after_in_child=lambda: helper.__init__())  # the parent's process is not the child's


class _Request(pickle.Pickler):
    """A request as bytes, with the storages of its tensors told by where they are."""

    def __init__(self, content):
        self._bytes = io.BytesIO()
        super().__init__(self._bytes, protocol=pickle.HIGHEST_PROTOCOL)
        self._places = {}  # data pointer of a storage -> its place
        self._copies = []  # (offset in the block, storage)
        self._size = 0
        self._block = None
        self._keep = []
        self.dump(content)
        self._fill_block()

    def header(self):
        block = None if self._block is None else _path_of(self._block)
        return pickle.dumps((block, self._size, self._bytes.getbuffer().tobytes()))

    def close(self):
        if self._block is not None:
            os.close(self._block)
            self._block = None
        self._keep = self._copies = None

    def persistent_id(self, obj):
        if not isinstance(obj, torch.storage.TypedStorage):
            return None
        storage = obj._untyped_storage
        key = storage.data_ptr() if storage.nbytes() else None
        if key not in self._places:
            self._keep.append(storage)
            self._places[key] = self._place(storage)
        return obj.dtype, storage.nbytes(), self._places[key]

    def _place(self, storage):
        descriptor = _memory.descriptor_of(storage)
        if descriptor is not None and storage.nbytes():
            return _path_of(descriptor), 0
        offset = self._size
        self._size += -(-storage.nbytes() // ALIGNMENT) * ALIGNMENT
        self._copies.append((offset, storage if storage.device.type == "cpu" else storage.cpu()))
        return None, offset

    def _fill_block(self):
        if self._size == 0:
            return
        self._block = os.memfd_create("libdcp")
        os.ftruncate(self._block, self._size)
        block = torch.frombuffer(mmap.mmap(self._block, self._size), dtype=torch.uint8).untyped_storage()
        _copy.copy_memory(
            (block.data_ptr() + offset, storage.data_ptr(), storage.nbytes()) for offset, storage in self._copies
        )
        self._copies = None


def _path_of(descriptor):
    """Another process of the same user opens it by this name."""
    return f"/proc/{os.getpid()}/fd/{descriptor}"


# ---- in the helper ----


class _Resolved:
    """In place of the program's planner: what it has resolved, in the order of the plan's items."""

    def __init__(self, plan, data):
        self._data = {id(item): value for item, value in zip(plan.items, data)}

    def resolve_data(self, write_item):
        return self._data[id(write_item)]


class _Reader(pickle.Unpickler):
    def __init__(self, header, prepare):
        path, size, content = pickle.loads(header)
        super().__init__(io.BytesIO(content))
        self._prepare = prepare
        self._block = _mapped(path, size) if path is not None else None

    def persistent_load(self, pid):
        dtype, nbytes, (path, offset) = pid
        if nbytes == 0:
            storage = torch.UntypedStorage(0)
        elif path is not None:
            storage = torch.frombuffer(_mapped(path, nbytes), dtype=torch.uint8).untyped_storage()
        else:
            storage = torch.frombuffer(self._block, dtype=torch.uint8, count=nbytes, offset=offset).untyped_storage()
        return torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)

    def find_class(self, module, name):
        """Classes of the program's main module are there once it is imported, under another name, as multiprocessing does it."""
        if module == "__main__":
            self._prepare()
        return super().find_class(module, name)


def _mapped(path, size):
    descriptor = os.open(path, os.O_RDWR)
    try:
        return mmap.mmap(descriptor, size)
    finally:
        os.close(descriptor)


def _write(header, prepare):
    writer, plan, data = _Reader(header, prepare).load()
    writes = writer.write_data(plan, _Resolved(plan, data))
    writes.wait()
    return writes.value()


def main(descriptor, parent):
    pipe = Connection(descriptor)
    preparation = pipe.recv()
    _uploads.step_back()
    while _next_comes(pipe, parent):
        try:
            header = pipe.recv_bytes()
        except EOFError:
            return
        answer = packed(attempt(lambda: _write(header, lambda: multiprocessing.spawn.prepare(preparation))))
        try:
            pipe.send_bytes(answer)
        except OSError:
            return


def _next_comes(pipe, parent):
    """False when the program is gone. Children of it may hold its end of the pipe open."""
    while not pipe.poll(PARENT_CHECK_S):
        if os.getppid() != parent:
            return False
    return True
