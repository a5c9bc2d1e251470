"""Helper and Control: what saves in other threads are given."""
import ctypes
import gc
import os
import sys
import tempfile
import threading
import time
import unittest

import libdcp
from libdcp import _core

MIB = 1 << 20
PAYLOAD = bytes(range(256)) * 4096  # 1 MiB


class Background(unittest.TestCase):
    def setUp(self):
        place = tempfile.TemporaryDirectory()
        self.addCleanup(place.cleanup)
        self.dir = place.name

    def write(self, n=1, prefix="__0_", **options):
        return _core.write_items(self.dir, prefix, [("b", bytearray(PAYLOAD)) for _ in range(n)], sync=False, **options)

    def children(self):
        """The processes dcp-writer of this process."""
        found = []
        for name in filter(str.isdigit, os.listdir("/proc")):
            try:
                with open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as stat:
                    text = stat.read()
            except OSError:
                continue
            state, parent = text[text.rindex(")") + 2 :].split()[:2]
            if "(dcp-writer)" in text and state != "Z" and int(parent) == os.getpid():
                found.append(int(name))
        return found

    def test_lent_memory_is_told_and_free(self):
        """Also where ranges that are lent lie in each other, as of storages over one array."""
        n = 3 * MIB
        arrays = {name: bytearray(os.urandom(n)) for name in "abcd"}
        kept = {name: bytes(data) for name, data in arrays.items()}
        memory = {name: (ctypes.c_char * n).from_buffer(data) for name, data in arrays.items()}
        places = {name: ctypes.addressof(block) for name, block in memory.items()}
        said = {name: ("t", "uint8", (n - 100,), None, places[name] + 100, None) for name in arrays}
        lent = [(places["c"], n), (places["c"] + 10, 20), (places["b"], n)]
        told = []

        def returned():
            told.append(True)
            for name in "bc":
                ctypes.memset(places[name], 0, n)

        state = {name: name.encode for name in arrays}
        path = os.path.join(self.dir, "lent")
        _core.save(path, state, describe=lambda f: said[f.__self__], sync=False, lent=lambda: lent, returned=returned)
        self.assertEqual(told, [True])
        back = {name: bytearray(n - 100) for name in arrays}
        with _core.open(path) as found:
            found.read_many([(name, None, None, ("b", data)) for name, data in back.items()])
        self.assertEqual(back, {name: data[100:] for name, data in kept.items()})
        for wrong, error in ((lambda: [(1,)], TypeError), (lambda: 7, TypeError), (lambda: 1 // 0, ZeroDivisionError)):
            with self.assertRaises(error):
                _core.save(path, state, describe=lambda f: said[f.__self__], overwrite=True, lent=wrong, returned=returned)
        with self.assertRaises(TypeError):
            _core.save(path, state, describe=lambda f: said[f.__self__], overwrite=True, lent=lambda: lent)
        _core.save(path, state, describe=lambda f: said[f.__self__], overwrite=True, sync=False, lent=lambda: None, returned=returned)
        self.assertEqual(told, [True])

    def test_helper_serves_many_and_ends_with_its_object(self):
        helper = _core.Helper()
        self.assertEqual(self.children(), [])
        for i in range(3):
            [(file, offset, length)] = _core.write_items(self.dir, f"__{i}_", [PAYLOAD], sync=False, helper=helper)
            with open(os.path.join(self.dir, file), "rb") as written:
                self.assertEqual((written.read(), offset, length), (PAYLOAD, 0, MIB))
            self.assertEqual(len(self.children()), 1)
        _core.save(os.path.join(self.dir, "ck"), {"w": "w".encode}, describe=lambda obj: ("b", memoryview(PAYLOAD)), helper=helper)
        with libdcp.open(os.path.join(self.dir, "ck")) as checkpoint:
            self.assertEqual(checkpoint["w"].shape, (MIB,))
        del helper
        gc.collect()
        self.assertEqual(self.children(), [])

    def test_a_dead_helper_is_told_and_replaced(self):
        helper = _core.Helper()
        self.write(helper=helper)
        [first] = self.children()
        os.kill(first, 9)
        with self.assertRaisesRegex(libdcp.StorageError, "ended by signal 9"):
            self.write(prefix="__1_", helper=helper)
        self.assertEqual([name for name in os.listdir(self.dir) if name.startswith("__1_")], [])
        self.write(prefix="__2_", helper=helper)
        self.assertNotEqual(self.children(), [first])

    def test_helper_that_is_not_there(self):
        with self.assertRaisesRegex(libdcp.UnsupportedError, "/nowhere/dcp-writer"):
            _core.Helper("/nowhere/dcp-writer")
        for path in (3, "a\0b"):
            with self.assertRaises((TypeError, ValueError)):
                _core.Helper(path)
        for helper in (3, "dcp-writer", _core.Control()):
            with self.assertRaises(TypeError):
                self.write(helper=helper)

    def test_control_keeps_to_the_rate_and_tells(self):
        control = _core.Control(max_bytes_per_second=20 * MIB)
        self.assertEqual((control.state(), control.is_canceled), ((0, 0, 0.0), False))
        start = time.monotonic()
        writing = threading.Thread(target=self.write, args=(8,), kwargs={"progress": control})
        writing.start()
        seen = []
        while writing.is_alive():
            seen.append(control.state())
            time.sleep(0.01)
        writing.join()
        self.assertGreaterEqual(time.monotonic() - start, 0.35)
        self.assertEqual(control.state()[:2], (8 * MIB, 8 * MIB))
        self.assertEqual(seen, sorted(seen))
        self.assertTrue(any(0 < done < total for done, total, _ in seen))

    def test_control_cancels_whoever_sleeps(self):
        for is_main in (False, True):
            control = _core.Control(max_bytes_per_second=1)
            threading.Timer(0.2, control.cancel).start()
            errors = []

            def write():
                try:
                    self.write(3, progress=control)
                except libdcp.CanceledError as error:
                    errors.append(error)

            if is_main:
                write()
            else:
                thread = threading.Thread(target=write)
                thread.start()
                thread.join(60)
            self.assertEqual(len(errors), 1)
            self.assertTrue(control.is_canceled)
            self.assertEqual(os.listdir(self.dir), [])

    def test_control_that_is_canceled_already(self):
        control = _core.Control()
        control.cancel(), control.cancel()
        with self.assertRaises(libdcp.CanceledError):
            self.write(progress=control)

    def test_bad_arguments(self):
        for rate in (-1, float("nan"), float("inf"), -float("inf")):
            with self.assertRaises(ValueError):
                _core.Control(max_bytes_per_second=rate)
        for arguments, named in (((1,), {}), ((), {"rate": 1}), ((), {"max_bytes_per_second": "1"})):
            with self.assertRaises(TypeError):
                _core.Control(*arguments, **named)
        with self.assertRaises(TypeError):
            _core.lower_priority(1)

    def test_nothing_leaks(self):
        helper, control = _core.Helper(), _core.Control()
        self.write(helper=helper, progress=control, prefix="first_")
        descriptors, counts = len(os.listdir("/proc/self/fd")), (sys.getrefcount(helper), sys.getrefcount(control))
        for i in range(20):
            self.write(helper=helper, progress=control, prefix=f"{i}_")
            self.write(helper=_core.Helper(), progress=_core.Control(), prefix=f"other{i}_")
        self.assertEqual((sys.getrefcount(helper), sys.getrefcount(control)), counts)
        self.assertEqual(len(os.listdir("/proc/self/fd")), descriptors)

    def test_lower_priority(self):
        found = []

        def work():
            _core.lower_priority()
            found.append((os.getpriority(os.PRIO_PROCESS, threading.get_native_id()), os.sched_getscheduler(0)))

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        self.assertEqual(found, [(19, os.SCHED_BATCH)])
        self.assertLess(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()), 19)


if __name__ == "__main__":
    unittest.main()
