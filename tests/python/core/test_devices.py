"""Tensors on devices: their addresses go to the C library, which copies. Run with look-alikes of the vendors' libraries, whose memory
faults if the host touches it."""
import array
import ctypes
import os
import tempfile
import unittest

from libdcp import _core

N = 5000


class Device:
    def __init__(self, library, name):
        self.library, self.name = ctypes.CDLL(library), name
        self.library.fake_alloc.restype = self.library.fake_peek.restype = ctypes.c_void_p
        self.library.fake_alloc.argtypes = [ctypes.c_int, ctypes.c_size_t]
        self.library.fake_peek.argtypes = self.library.fake_free.argtypes = [ctypes.c_void_p]
        self.index = int(name.split(":")[1])

    def floats(self, values):
        data = array.array("f", values)
        address = self.library.fake_alloc(self.index, 4 * len(data))
        ctypes.memmove(self.library.fake_peek(address), data.buffer_info()[0], 4 * len(data))
        return address

    def values(self, address, n):
        return list((ctypes.c_float * n).from_address(self.library.fake_peek(address)))


class Devices(unittest.TestCase):
    def setUp(self):
        place = tempfile.TemporaryDirectory()
        self.addCleanup(place.cleanup)
        self.dir = os.path.join(place.name, "ck")
        self.devices = [Device("libcuda.so.1", "cuda:1"), Device("libascendcl.so", "npu:0")]

    def test_saved_from_and_loaded_to_devices(self):
        for device in self.devices:
            with self.subTest(device.name):
                address = device.floats(range(N))
                whole = ("t", "float32", (N,), None, address, None, device.name)
                strided = ("t", "float32", (N // 5, 2), (5, 1), address, None, device.name)
                said = {"whole": whole, "strided": strided}
                _core.save(self.dir, {k: k.encode for k in said}, describe=lambda f: said[f.__self__],
                           overwrite=True, sync=False, copy_ahead_bytes=1 << 16)
                host = array.array("f", bytes(4 * N))
                with _core.open(self.dir) as ck:
                    ck.read("whole", None, None, ("b", host))
                    self.assertEqual(list(host), list(range(N)))
                    target = device.floats([0] * N)
                    ck.read_many([("whole", (10,), (N - 10,), ("t", "float32", (N - 10,), None, target, None, device.name))])
                    self.assertEqual(device.values(target, N - 10), list(range(10, N)))
                into = device.floats([-1] * N)
                said = {"whole": ("t", "float32", (N,), None, into, None, device.name)}
                _core.load(self.dir, {"whole": "whole".encode}, describe=lambda f: said[f.__self__])
                self.assertEqual(device.values(into, N), list(range(N)))

    def test_planned_elsewhere(self):
        for device in self.devices:
            with self.subTest(device.name):
                address = device.floats(range(N))
                path = f"{self.dir}-{device.name}"
                claim = _core.claim(path, sync=False)
                (place,) = _core.write_items(path, "__0_", [("t", "float32", (N,), None, address, None, device.name)], sync=False)
                claim.publish([("w", "tensor", "float32", (N,), ("w",), [((0,), (N,), *place, "")])])
                host = array.array("f", bytes(4 * N))
                with _core.open(path) as ck:
                    ck.read("w", None, None, ("b", host))
                self.assertEqual(list(host), list(range(N)))

    def test_the_stream_is_asked_for_when_all_is_described(self):
        device = self.devices[0]
        said = {"w": ("t", "float32", (N,), None, device.floats(range(N)), None, device.name)}
        order = []

        def describe(function):
            order.append("tensor")
            return said[function.__self__]

        def stream():
            order.append("stream")
            return 0

        _core.save(self.dir, {"w": "w".encode}, describe=describe, sync=False, stream=stream)
        _core.load(self.dir, {"w": "w".encode}, describe=describe, stream=stream)
        self.assertEqual(order, ["tensor", "stream"] * 2)
        with self.assertRaises(ZeroDivisionError):
            _core.save(self.dir, {"w": "w".encode}, describe=describe, overwrite=True, stream=lambda: 1 // 0)

    def test_opening_a_device(self):
        for name in ("cuda", "npu:1", "cpu"):
            self.assertIsNone(_core.open_device(name))
        with self.assertRaises(ValueError):
            _core.open_device("tpu")

    def test_unknown_devices(self):
        for name in ("tpu:0", "cuda:", "cuda:x", "cuda:-1", "cudas", 3, "npu:9999"):
            with self.subTest(name), self.assertRaises(ValueError):
                _core.save(self.dir, {"w": object()}, describe=lambda obj: ("t", "float32", (1,), None, 8, None, name))


if __name__ == "__main__":
    unittest.main()
