"""Objects and memory after many calls, also after calls that fail."""
import array
import ctypes
import gc
import os
import sys
import tempfile
import unittest

import numpy as np

import libdcp
from libdcp import _core

ROUNDS = 100


class Counted(list):
    pass


def resident_bytes():
    """Memory of the process's own, without what its allocator keeps though it is free."""
    getattr(ctypes.CDLL(None), "malloc_trim", lambda _: 0)(0)
    with open("/proc/self/statm") as f:
        _, resident, shared = map(int, f.read().split()[:3])
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")


class Leaks(unittest.TestCase):
    def setUp(self):
        place = tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
        self.addCleanup(place.cleanup)
        self.dir = os.path.join(place.name, "ck")

    def steady(self, call, objects=()):
        """No more references after ROUNDS calls than before, and no more blocks and memory: caches of Python's own fill up at first,
        what leaks grows every time."""
        call()
        refs, grown, memory = [sys.getrefcount(o) for o in objects], [], []
        for _ in range(6):
            gc.collect()
            blocks, memory_before = sys.getallocatedblocks(), resident_bytes()
            for _ in range(ROUNDS):
                call()
            gc.collect()
            grown.append(sys.getallocatedblocks() - blocks)
            memory.append(resident_bytes() - memory_before)
        self.assertLess(min(grown), ROUNDS // 2, grown)  # one object a call would be ROUNDS
        if "ASAN_OPTIONS" not in os.environ:  # which keeps what was freed for a while
            self.assertLess(min(memory), ROUNDS * 64, memory)
        now = [sys.getrefcount(o) for o in objects]
        for i, (before, after) in enumerate(zip(refs, now)):
            shared = objects[i] is None or objects[i] is True  # others use these as well
            self.assertLessEqual(abs(after - before), 3 * ROUNDS if shared else 0, repr(objects[i])[:40])

    def test_save_and_load(self):
        w, key, value = np.ones(2000), "a key of its own", "a text of its own" * 100
        tree = {key: [w, {"v": value}], "t": (value, [1 << 100], {value}), "m": libdcp.View(np.zeros(3, "u2"), "bfloat16"),
                "back": w[::-1], "buffer": array.array("d", [1])}
        objects = (w, key, value, tree, tree["t"], None, True)
        self.steady(lambda: libdcp.save(self.dir, tree, overwrite=True, sync=False), objects)
        into = {**tree, key: [np.zeros(2000), {"v": None}]}
        self.steady(lambda: libdcp.load(self.dir, into=into), (w, key, into, into[key]))
        self.steady(lambda: libdcp.load(self.dir))

    def test_open_read_and_close(self):
        libdcp.save(self.dir, {"w": np.ones((20, 100)), "o": (1, {"x": "y"})}, sync=False)

        def use():
            with libdcp.open(self.dir) as ckpt:
                ckpt["w"][3:5, ::2], ckpt["o"], list(ckpt), ckpt.info(), ckpt.hash("w"), ckpt._core.rows()
                ckpt._core.object_bytes("o")
            libdcp.open(self.dir)  # closed by nobody
            libdcp.verify(self.dir)

        self.steady(use)

    def fails(self, error, call):
        with self.assertRaises(error):
            call()

    def test_failing_calls(self):
        libdcp.save(self.dir, {"w": np.ones(3), "o": 1}, sync=False)
        cycle = []
        cycle.append(cycle)
        w = np.ones(2000)
        for error, call in (
            (ValueError, lambda: libdcp.save(self.dir, {"w": w, "a": [w, cycle]})),
            (TypeError, lambda: libdcp.save(self.dir, {"w": w, "a": [w, object()]})),
            (libdcp.ExistsError, lambda: libdcp.save(self.dir, {"w": w})),
            (ValueError, lambda: libdcp.save(self.dir, {"w": w}, files=-3)),
            (ValueError, lambda: libdcp.load(self.dir, into={"w": w})),
            (ZeroDivisionError, lambda: libdcp.load(self.dir, into={"w": np.ones(3)}, rename=lambda name: 1 / 0)),
            (libdcp.CanceledError, lambda: libdcp.load(self.dir, into={"w": np.ones(3)}, progress=lambda *p: False)),
            (FileNotFoundError, lambda: libdcp.open(self.dir + "no")),
            (ValueError, lambda: _core.save(self.dir, {"w": 3j, "x": [object()]}, describe=lambda o: ("t", "float99", (), None, 0, o))),
            (TypeError, lambda: _core.Group(0, 1, alltoall=3)),
        ):
            with self.subTest(error):
                self.steady(lambda: self.fails(error, call), (w, cycle, self.dir))

    def test_records_and_pickle(self):
        record = b"x" * 5000
        thing = Counted()
        describe = lambda obj: None
        self.steady(lambda: _core.save(self.dir, {"a": thing, "b": [1, thing]}, describe=describe, pickle=lambda obj: bytearray(record),
                                       overwrite=True, sync=False), (thing, record, describe))
        self.steady(lambda: _core.load(self.dir, {"a": 0, "b": 0}, describe=describe, load_object=lambda fqn, data: thing),
                    (thing, describe))

    def test_low_level(self):
        memory = array.array("f", [1, 2])

        def once():
            claim = _core.claim(self.dir, overwrite=True, sync=False)
            prefix = f"__0_{claim.generation}_" if claim.generation else "__0_"
            (place,) = _core.write_items(self.dir, prefix, [("b", memory)], sync=False)
            claim.publish([("w", "tensor", "float32", (2,), ("w",), [((0,), (2,), *place, "")])])

        self.steady(once, (memory,))

    def test_groups(self):
        def alltoall(sends, recvs, timeout_s):
            if recvs[0] is not None:
                recvs[0][:] = sends[0]

        def once():
            group = _core.Group(0, 1, alltoall=alltoall, all_gather=lambda mine, out, t: out.__setitem__(slice(None), mine))
            libdcp.save(self.dir, {"n": 1}, overwrite=True, sync=False, group=group, cache=libdcp.PlanCache())

        self.steady(once, (alltoall,))


if __name__ == "__main__":
    unittest.main()
