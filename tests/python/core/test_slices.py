"""Lazy arrays against NumPy: the same index on both sides, on tensors in random chunks."""
import os
import random
import tempfile
import unittest

import numpy as np

import libdcp
from libdcp import _core

SEED = int(os.environ.get("DCP_TEST_SEED", random.randrange(1 << 32)))


def random_slice(rnd, extent):
    def bound():
        return rnd.choice([None, rnd.randint(-extent - 2, extent + 2)])
    return slice(bound(), bound(), rnd.choice([None, 1, 1, 2, 3, -1, -2, 7, -5]))


def random_index(rnd, shape):
    parts = []
    for extent in shape[:rnd.randint(0, len(shape))]:
        parts.append(rnd.randint(-extent, extent - 1) if extent and rnd.random() < 0.3 else random_slice(rnd, extent))
    if rnd.random() < 0.4:
        skipped = rnd.randint(0, len(shape) - len(parts))
        at = rnd.randint(0, len(parts))
        tail = [random_slice(rnd, extent) for extent in shape[len(shape) - (len(parts) - at):]] if at < len(parts) else []
        parts = parts[:at] + [Ellipsis] + tail
        del skipped
    for _ in range(rnd.choice([0, 0, 0, 1, 2])):
        parts.insert(rnd.randint(0, len(parts)), None)
    if len(parts) == 1 and rnd.random() < 0.5:
        return parts[0]
    return tuple(parts)


def save_in_chunks(rnd, path, array):
    """Cuts an array along a random dimension into random parts, each an item of a foreign planner's."""
    cuts, d = [0], 0
    if array.ndim:
        d = rnd.randrange(array.ndim)
        cuts += sorted(rnd.sample(range(1, array.shape[d]), min(rnd.randint(0, 3), max(array.shape[d] - 1, 0)))) if array.shape[d] else []
        cuts.append(array.shape[d])
    boxes, items = [], []
    for start, end in zip(cuts, cuts[1:]) if array.ndim else [(0, 0)]:
        part = array[(slice(None),) * d + (slice(start, end),)] if array.ndim else array
        boxes.append((tuple(start if k == d else 0 for k in range(array.ndim)), part.shape))
        items.append(("b", part))
    claim = _core.claim(path, sync=False)
    places = _core.write_items(path, "__0_", items, sync=False)
    chunks = [(offsets, sizes, *place, "") for (offsets, sizes), place in zip(boxes, places)]
    claim.publish([("w", "tensor", str(array.dtype), array.shape, ("w",), chunks)])


class Slices(unittest.TestCase):
    def setUp(self):
        place = tempfile.TemporaryDirectory()
        self.addCleanup(place.cleanup)
        self.dir = place.name

    def check(self, lazy, array, index):
        want, got = array[index], lazy[index]
        self.assertEqual(type(want), type(got), index)
        self.assertEqual((np.shape(want), want.dtype), (np.shape(got), got.dtype), index)
        np.testing.assert_array_equal(want, got, str(index))

    def test_any_index_gives_what_numpy_gives(self):
        print("seed", SEED)
        rnd = random.Random(SEED)
        for case in range(40):
            shape = tuple(rnd.choice([0, 1, 2, 3, 5, 8, 13]) if rnd.random() < 0.95 else 200 for _ in range(rnd.randint(0, 4)))
            array = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(rnd.choice(["float32", "int64", "uint8"]))
            path = os.path.join(self.dir, str(case))
            save_in_chunks(rnd, path, array)
            with libdcp.open(path) as ckpt:
                lazy = ckpt["w"]
                for _ in range(40):
                    index = random_index(rnd, shape)
                    with self.subTest(shape=shape, index=index, seed=SEED):
                        self.check(lazy, array, index)

    def test_wrong_indexes_fail_as_in_numpy(self):
        array = np.arange(6).reshape(2, 3)
        libdcp.save(os.path.join(self.dir, "w"), {"w": array}, sync=False)
        with libdcp.open(os.path.join(self.dir, "w")) as ckpt:
            for index in (2, -3, (0, 3), (0, 0, 0), (..., ...), "a", 1.5, (0, "a")):
                with self.subTest(index), self.assertRaises(IndexError):
                    array[index]
                with self.subTest(index), self.assertRaises(IndexError):
                    ckpt["w"][index]
            for index in ([0, 1], True, np.array([True, False])):  # NumPy takes these: here they are refused
                with self.subTest(index), self.assertRaisesRegex(IndexError, "read the array"):
                    ckpt["w"][index]
            with self.assertRaises(ValueError):
                ckpt["w"][::0]

    def test_a_slice_reads_the_slice(self):
        path = os.path.join(self.dir, "big")
        array = np.zeros((64, 1 << 16), np.float32)
        libdcp.save(path, {"w": array}, sync=False)
        before = io_bytes()
        with libdcp.open(path) as ckpt:
            ckpt["w"][10:12]
            ckpt["w"][::21]
        self.assertLess(io_bytes() - before, 8 << 20)  # of 16 MiB; six rows are 1.5 MiB

    def test_other_ways_to_read(self):
        path = os.path.join(self.dir, "w")
        array = np.arange(24.).reshape(4, 6)
        libdcp.save(path, {"w": array, "zero": np.float32(2)}, sync=False)
        with libdcp.open(path) as ckpt:
            lazy = ckpt["w"]
            np.testing.assert_array_equal(np.asarray(lazy), array)
            np.testing.assert_array_equal(np.asarray(lazy, dtype="f4"), array.astype("f4"))
            np.testing.assert_array_equal(np.from_dlpack(lazy), array)
            np.testing.assert_array_equal(lazy + 1, array + 1) if hasattr(lazy, "__add__") else None
            self.assertEqual((len(lazy), lazy.ndim, lazy.size, lazy.nbytes, lazy.dtype), (4, 2, 24, 192, np.float64))
            np.testing.assert_array_equal(list(lazy), list(array))
            out = np.zeros((8, 3))
            lazy.read(out[1:6:2], (0, 2))
            np.testing.assert_array_equal(out[1:6:2], array[:3, 2:5])
            self.assertEqual(float(ckpt["zero"][()]), 2)
            for call, error in ((lambda: len(ckpt["zero"]), TypeError), (lambda: iter(ckpt["zero"]), TypeError),
                                (lambda: lazy.read(np.zeros((4, 6), "f4")), ValueError), (lambda: lazy.read(np.zeros(3)), ValueError),
                                (lambda: lazy.read(np.zeros((4, 6)), (1, 0)), ValueError),
                                (lambda: np.array(lazy, copy=False), ValueError), (lambda: ckpt["no"], KeyError)):
                with self.assertRaises(error):
                    call()
            several = {"w": np.zeros((4, 6)), "zero": np.zeros((), "f4")}
            told = []
            ckpt.read_many(several, progress=lambda done, total: told.append((done, total)))
            np.testing.assert_array_equal(several["w"], array)
            self.assertEqual(told[-1], (196, 196))
        with self.assertRaises(libdcp.StateError):
            lazy[0]


def io_bytes():
    """Bytes that this process has read, by system calls."""
    with open("/proc/self/io") as f:
        return int(next(line for line in f if line.startswith("rchar")).split()[1])


if __name__ == "__main__":
    unittest.main()
