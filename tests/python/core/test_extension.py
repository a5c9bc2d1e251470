"""libdcp._core by itself: Python's own types and the buffer protocol, no NumPy, no torch."""
import array
import collections
import ctypes
import gc
import logging
import os
import sys
import tempfile
import threading
import unittest

from libdcp import _core

logging.getLogger("libdcp").addHandler(logging.NullHandler())


def describe(obj):
    if isinstance(obj, (array.array, memoryview)):
        return ("b", obj)
    if isinstance(obj, collections.abc.Mapping):
        return ("m", obj)
    return None


def floats(*values):
    return array.array("f", values)


class Case(unittest.TestCase):
    def setUp(self):
        place = tempfile.TemporaryDirectory()
        self.addCleanup(place.cleanup)
        self.dir = os.path.join(place.name, "ck")

    def save(self, tree, path=None, **opts):
        return _core.save(path or self.dir, tree, describe=describe, sync=False, **opts)

    def load(self, tree, path=None, **opts):
        report, objects, _ = _core.load(path or self.dir, tree, describe=describe, **opts)
        return report, {fqn: value for _, fqn, value in objects}


class Trees(Case):
    def test_python_types_come_back_as_they_were(self):
        values = {
            "none": None, "true": True, "int": 7, "long": 1 << 100, "negative": -(1 << 77), "edge": -(1 << 63),
            "beyond": 1 << 63, "float": 0.1, "nan": float("inf"), "complex": 1 - 2j, "str": "a\u20ac\ud800b", "empty": "",
            "bytes": b"\0\xff", "bytearray": bytearray(b"xy"), "tuple": (1, (2, "x")), "list": [1, [2, []], "x"],
            "set": {1, 2}, "frozen": frozenset("ab"), "ordered": (collections.OrderedDict(b=1, a=2),),
            "inner": ({1: "one", "1": "text", -5: None},),
        }
        self.save(values)
        _, loaded = self.load(dict.fromkeys(values, 0))
        self.assertEqual(loaded, values)
        for name, value in values.items():
            self.assertIs(type(loaded[name]), type(value), name)
        self.assertIsInstance(loaded["ordered"][0], collections.OrderedDict)

    def test_containers_are_flattened_as_pytorch_does(self):
        self.save({"d": {"x": floats(1)}, "l": [1, {"y": floats(2)}], "t": (1, 2), 3: {"z": 4}, "plain": [1, [2]], 2.5: 6})
        with _core.open(self.dir) as ck:
            self.assertEqual(ck.names(), ["d.x", "l.0", "l.1.y", "t", "3.z", "plain", "2.5"])

    def test_shared_parts_of_an_object_stay_shared(self):
        shared = [1, 2]
        self.save({"o": (shared, shared, [3])})
        _, loaded = self.load({"o": 0})
        a, b, c = loaded["o"]
        self.assertIs(a, b)
        self.assertIsNot(a, c)

    def test_tensors_are_filled_where_they_are(self):
        self.save({"w": memoryview(floats(*range(6))).cast("B").cast("f", (2, 3))})
        place = bytearray(24)
        report, _ = self.load({"w": memoryview(place).cast("f", (2, 3))})
        self.assertEqual((report["n_tensors"], report["bytes"]), (1, 24))
        self.assertEqual(list(memoryview(place).cast("f")), [0, 1, 2, 3, 4, 5])

    def test_objects_name_the_keys_of_the_callers_containers(self):
        tree = {"state": {0: {"step": 1}, "1": {"step": 2}}, "l": [{"a": 5}, 6]}
        self.save(tree)
        _, objects, _ = _core.load(self.dir, tree, describe=describe)
        self.assertEqual({path for path, _, _ in objects},
                         {("state", 0, "step"), ("state", "1", "step"), ("l", 0, "a"), ("l", 1)})


class BadInput(Case):
    def test_a_state_that_contains_itself(self):
        for make in (list, dict):
            node = make()
            if make is list:
                node.append({"x": node})
            else:
                node["x"] = [node]
            with self.assertRaisesRegex(ValueError, r"state\['a'\].*contains itself"):
                self.save({"a": node})
            self.assertFalse(os.path.exists(self.dir))

    def test_a_tuple_that_contains_itself_through_a_list(self):
        inner = []
        inner.append((1, inner))
        with self.assertRaisesRegex(ValueError, "contains itself"):
            self.save({"a": inner})

    def test_too_deep(self):
        node = []
        for _ in range(5000):
            node = [node]
        with self.assertRaisesRegex(ValueError, "deep"):
            self.save({"a": node})

    def test_objects_without_pickle_name_the_place(self):
        with self.assertRaisesRegex(TypeError, r"state\['a'\]\[1\]: <class 'object'> cannot be stored"):
            self.save({"a": [1, object()]})

    def test_colliding_keys(self):
        with self.assertRaises(ValueError):
            self.save({"a": {2.5: 1, "2.5": 2}})
        with self.assertRaises(ValueError) as caught:
            self.save({"a": {1: 1, "1": 2}})
        self.assertEqual(caught.exception.code, "MISMATCH")

    def test_wrong_arguments(self):
        for kwargs, error in (
            ({"files": 5000}, ValueError), ({"serialization": "xml"}, ValueError), ({"on_failure": "cry"}, ValueError),
            ({"progress": 3}, TypeError), ({"group": 3}, TypeError), ({"cache": 3}, TypeError), ({"per_rank": "x"}, TypeError),
            ({"transform": "gzip"}, NotImplementedError), ({"save_id": "?"}, ValueError), ({"unknown": 1}, TypeError),
            ({"rank_local": (3, 2)}, ValueError), ({"files": "x"}, TypeError),
        ):
            with self.subTest(**kwargs), self.assertRaises(error):
                self.save({"a": 1}, **kwargs)
        for tree in (3, [1], None):
            with self.assertRaisesRegex(TypeError, "dict"):
                self.save(tree)
        with self.assertRaises(TypeError):
            _core.save(3, {}, describe=describe)
        with self.assertRaises(TypeError):
            _core.save(self.dir, {}, describe=None)

    def test_descriptors_are_checked(self):
        memory = floats(1, 2)
        address = memory.buffer_info()[0]
        for descriptor in (
            3, (), ("x",), ("t",), ("t", "float32"), ("t", "float99", (2,), None, address, memory),
            ("t", "float32", (-2,), None, address, memory), ("t", "float32", (2,), (1, 1), address, memory),
            ("t", "float32", (2,), (-1,), address, memory), ("t", "float32", "ab", None, address, memory),
            ("t", "float32", (1 << 62, 1 << 62), None, address, memory), ("t", "float32", (1,) * 65, None, address, memory),
            ("s", "float32", (4,), [((3,), (2,), None, address)], memory), ("s", "float32", (4,), [3], memory),
            ("s", "float32", (4,), [((0, 0), (2,), None, address)], memory), ("m",), ("b",), ("b", 3), ("d", 3),
        ):
            with self.subTest(descriptor), self.assertRaises((TypeError, ValueError)):
                _core.save(self.dir, {"w": object()}, describe=lambda obj: descriptor)
        self.assertFalse(os.path.exists(self.dir))

    def test_what_a_callback_raises_comes_out(self):
        fault = ZeroDivisionError("here")

        def failing(*args):
            raise fault

        with self.assertRaises(ZeroDivisionError) as caught:
            _core.save(self.dir, {"a": object()}, describe=failing)
        self.assertIs(caught.exception, fault)
        with self.assertRaises(ZeroDivisionError) as caught:
            self.save({"a": object()}, pickle=failing)
        self.assertIs(caught.exception, fault)
        with self.assertRaises(ZeroDivisionError) as caught:
            self.save({"a": floats(1)}, progress=failing)
        self.assertIs(caught.exception, fault)
        self.assertFalse(os.path.exists(os.path.join(self.dir, ".metadata")))
        self.save({"a": (floats(1),)})
        for hook in ("rename", "difference", "load_object"):
            with self.subTest(hook), self.assertRaises(ZeroDivisionError) as caught:
                self.load({"a": 1, "b": 2} if hook == "difference" else {"a": 1}, **{hook: failing})
            self.assertIs(caught.exception, fault)

    def test_a_dict_that_changes_underway(self):
        tree = {"a": object(), "b": object()}

        def meddle(obj):
            tree[len(tree)] = 1
            return ("b", floats(1))

        with self.assertRaisesRegex(RuntimeError, "changed"):
            _core.save(self.dir, tree, describe=meddle)


class Errors(Case):
    def test_classes_and_attributes(self):
        with self.assertRaises(FileNotFoundError) as caught:
            _core.open(self.dir)
        self.assertIsInstance(caught.exception, _core.Error)
        self.assertEqual(caught.exception.code, "NOT_FOUND")
        self.save({"a": 1})
        with self.assertRaises(RuntimeError) as caught:
            self.save({"a": 1})
        self.assertEqual(caught.exception.code, "EXISTS")
        self.save({"a": 2}, overwrite=True)
        with self.assertRaises(_core.MissingKeyError) as caught:
            self.load({"b": 1})
        self.assertIsInstance(caught.exception, RuntimeError)
        with self.assertRaises(ValueError) as caught:
            self.load({"a": floats(1)})
        self.assertEqual((caught.exception.code, caught.exception.rank, caught.exception.failures), ("MISMATCH", -1, []))

    def test_errno_and_offset(self):
        blocked = os.path.join(os.path.dirname(self.dir), "file")
        with open(blocked, "w"):
            pass
        with self.assertRaises(_core.Error) as caught:
            self.save({"a": 1}, path=os.path.join(blocked, "below"))
        self.assertNotEqual(caught.exception.errno, 0)
        self.save({"a": 1})
        name = os.path.join(self.dir, ".metadata")
        with open(name, "r+b") as f:
            f.truncate(os.path.getsize(name) // 2)
        with self.assertRaises(ValueError) as caught:
            _core.open(self.dir)
        self.assertIn(caught.exception.code, ("FORMAT", "CHECKSUM"))
        self.assertIsNotNone(caught.exception.offset)

    def test_they_can_be_pickled(self):
        import pickle
        with self.assertRaises(_core.Error) as caught:
            _core.open(self.dir)
        copy = pickle.loads(pickle.dumps(caught.exception))
        self.assertEqual((type(copy), copy.code, str(copy)), (type(caught.exception), "NOT_FOUND", str(caught.exception)))

    def test_on_failure_warn(self):
        self.save({"a": 1})
        with self.assertLogs("libdcp", "WARNING") as logs:
            report = self.save({"a": 1}, on_failure="warn")
        self.assertEqual(report["status"], "EXISTS")
        self.assertIn("no checkpoint was saved", logs.output[0])


class Board:
    """Ranks that are threads exchange bytes through this."""

    def __init__(self, size):
        self.size, self.cells, self.barrier = size, {}, threading.Barrier(size, timeout=20)

    def group(self, rank, **kwargs):
        def alltoall(sends, recvs, timeout_s):
            for peer, view in enumerate(sends):
                self.cells[rank, peer] = b"" if view is None else bytes(view)
            self.barrier.wait()
            for peer, view in enumerate(recvs):
                if view is not None:
                    view[:] = self.cells[peer, rank]
            self.barrier.wait()

        return _core.Group(rank, self.size, alltoall=kwargs.pop("alltoall", alltoall), **kwargs)


def run_ranks(size, function):
    results = [None] * size

    def run(rank):
        try:
            results[rank] = function(rank)
        except BaseException as e:
            results[rank] = e

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


class Groups(Case):
    def test_ranks_save_and_load_together(self):
        board = Board(3)
        groups = [board.group(rank) for rank in range(3)]

        def sharded(rank, memory):
            part = memory
            return ("s", "float32", (6,), [((2 * rank,), (2,), None, part.buffer_info()[0])], part)

        def save(rank):
            mine = floats(2 * rank, 2 * rank + 1)
            return _core.save(self.dir, {"w": object(), "step": 5}, describe=lambda obj: sharded(rank, mine),
                              group=groups[rank], sync=False)

        reports = run_ranks(3, save)
        self.assertEqual([r["world"] for r in reports], [3, 3, 3])
        self.assertEqual(len({r["save_id"] for r in reports}), 1)
        self.assertEqual(len(reports[0]["ranks"]), 3)
        whole = floats(*[0] * 6)
        self.load({"w": whole})
        self.assertEqual(list(whole), [0, 1, 2, 3, 4, 5])

        def load(rank):
            mine = floats(-1, -1)
            _, objects, _ = _core.load(self.dir, {"w": object(), "step": 0}, describe=lambda obj: sharded(rank, mine),
                                    group=groups[rank])
            return list(mine), objects[0][2]

        self.assertEqual(run_ranks(3, load), [([0, 1], 5), ([2, 3], 5), ([4, 5], 5)])

    def test_an_exception_of_one_rank_reaches_all(self):
        board = Board(3)
        groups = [board.group(rank) for rank in range(3)]
        fault = ZeroDivisionError("planned")

        def failing(obj):
            raise fault

        def save(rank):
            _core.save(self.dir, {"w": object()}, describe=failing if rank == 1 else lambda obj: ("b", floats(1)),
                       group=groups[rank])

        errors = run_ranks(3, save)
        for rank, error in enumerate(errors):
            self.assertIsInstance(error, _core.PeerError)
            self.assertEqual([f[0] for f in error.failures], [1])
            self.assertIn("ZeroDivisionError: planned", error.failures[0][5])
            self.assertIs(error.cause, fault if rank == 1 else None)
        self.assertFalse(os.path.exists(os.path.join(self.dir, ".metadata")))

    def test_load_object_fails_on_one_rank(self):
        self.save({"o": object()}, pickle=lambda obj: b"what only load_object knows")
        board = Board(2)
        groups = [board.group(rank) for rank in range(2)]

        def load_object(fqn, record):
            if fqn == "o" and record == b"what only load_object knows":
                return 7
            raise AssertionError((fqn, record))

        def failing(fqn, record):
            raise ZeroDivisionError("loading")

        results = run_ranks(2, lambda rank: _core.load(self.dir, {"o": 0}, describe=describe, group=groups[rank],
                                                       load_object=load_object)[1])
        self.assertEqual(results, [[(("o",), "o", 7)]] * 2)
        results = run_ranks(2, lambda rank: _core.load(self.dir, {"o": 0}, describe=describe, group=groups[rank],
                                                       load_object=failing if rank else load_object))
        for error in results:
            self.assertIsInstance(error, _core.PeerError)
            self.assertIn("loading", error.failures[0][5])

    def test_a_network_that_fails(self):
        fault = ConnectionError("cable")

        def broken(sends, recvs, timeout_s):
            raise fault

        group = _core.Group(0, 2, alltoall=broken, timeout_s=1)
        with self.assertRaises(ConnectionError) as caught:
            self.save({"a": 1}, group=group)
        self.assertIs(caught.exception, fault)
        self.assertTrue(group.is_broken)
        with self.assertRaises(_core.StateError):
            self.save({"a": 1}, group=group)

    def test_groups_check_their_arguments(self):
        for args, kwargs in (((2, 2), {"alltoall": print}), ((-1, 2), {"alltoall": print}), ((0, 1), {"alltoall": 3}),
                             ((0, 1), {"alltoall": print, "timeout_s": -1}), ((0, 1), {}), ((0, 0), {"alltoall": print})):
            with self.subTest(args=args, kwargs=kwargs), self.assertRaises((TypeError, ValueError)):
                _core.Group(*args, **kwargs)

    def test_groups_in_cycles_are_collected(self):
        class Holder:
            pass

        holder = Holder()
        holder.group = _core.Group(0, 1, alltoall=lambda *args: holder)
        gone = []
        import weakref
        weakref.finalize(holder, gone.append, 1)
        del holder
        gc.collect()
        self.assertEqual(gone, [1])


class LowLevel(Case):
    """Saves under a planner and collectives of the test's own."""

    def write(self, rank, generation, **opts):
        prefix = f"__{rank}_{generation}_" if generation else f"__{rank}_"
        memory = floats(*range(10 * rank, 10 * rank + 4))
        strided = ("t", "float32", (2,), (2,), memory.buffer_info()[0], memory)
        return _core.write_items(self.dir, prefix, [("b", memory), b"a record of rank %d" % rank, (strided,)], sync=False, **opts)

    def save(self, overwrite=False, **opts):
        claim = _core.claim(self.dir, overwrite=overwrite, world=2, sync=False)
        places = [self.write(rank, claim.generation, **opts) for rank in range(2)]
        transforms = opts.get("transform") or ""
        rows = [("w", "tensor", "float32", (8,), ("w",),
                 [((4 * r,), (4,), *places[r][0], transforms) for r in range(2)]),
                ("s", "tensor", "float32", (2,), ("s",), [((0,), (2,), *places[1][2], transforms)]),
                ("o", "object", None, None, ("o",), [((), (), *places[0][1], transforms)])]
        return claim, rows

    def check(self, rows):
        with _core.open(self.dir, check_crc=True) as ck:
            self.assertEqual([row[:5] for row in ck.rows()], [row[:5] for row in rows])
            got = {row[0]: sorted(row[5]) for row in ck.rows()}
            self.assertEqual(got, {row[0]: sorted(row[5]) for row in rows})
            whole, part = floats(*[0] * 8), floats(0, 0)
            ck.read_many([("w", None, None, ("b", whole)), ("s", (0,), (2,), ("b", part))])
            self.assertEqual((list(whole), list(part)), ([0, 1, 2, 3, 10, 11, 12, 13], [10, 12]))
            self.assertEqual(ck.object_bytes("o"), b"a record of rank 0")

    def test_claim_write_publish(self):
        for opts in ({}, {"files": 3}, {"file_per_item": True}, {"transform": "stream.zstd/1"}):
            with self.subTest(**opts):
                before = set(os.listdir(self.dir)) if os.path.isdir(self.dir) else set()
                claim, rows = self.save(overwrite=bool(before), **opts)
                report = claim.publish(rows)
                self.assertEqual(report["world"], 2)
                self.check(rows)
                self.assertFalse((before - {".metadata"}) & set(os.listdir(self.dir)), "files of the old one are left")
                with self.assertRaises(_core.StateError):
                    claim.publish(rows)
                claim.abort()
                self.check(rows)

    def test_giving_up(self):
        claim, rows = self.save()
        claim.publish(rows)
        before = sorted(os.listdir(self.dir))
        claim, _ = self.save(overwrite=True)
        self.assertNotEqual(claim.generation, "")
        with self.assertRaises(_core.ExistsError):
            _core.claim(self.dir, overwrite=True)  # one at a time
        claim.abort()
        self.assertEqual(sorted(os.listdir(self.dir)), before)
        claim, _ = self.save(overwrite=True)
        del claim  # forgotten: given up
        self.assertEqual(sorted(os.listdir(self.dir)), before)
        claim, bad = self.save(overwrite=True)
        with self.assertRaises(ValueError):
            claim.publish([bad[0], bad[0]])
        self.assertEqual(sorted(os.listdir(self.dir)), before)
        self.check(rows)
        with self.assertRaises(_core.ExistsError):
            _core.claim(self.dir, overwrite=False)

    def test_wrong_rows_and_items(self):
        claim = _core.claim(self.dir, overwrite=False)
        chunk = ((0,), (4,), "__0_0.distcp", 0, 4, "")
        for row in (3, (), ("w", "tensor", "float32", (8,), ("w",), [3]), ("w", "thing", None, None, ("w",), []),
                    ("w", "tensor", "float99", (8,), ("w",), [chunk]), ("w", "tensor", "float32", (8, 8), ("w",), [chunk]),
                    ("w", "tensor", "float32", (8,), (3.5,), [chunk]), (3, "tensor", "float32", (8,), ("w",), [chunk]),
                    ("w", "tensor", "float32", (8,), ("w",), [((0,), (4,), 3, 0, 4, "")])):
            with self.subTest(row), self.assertRaises((TypeError, ValueError)):
                claim.publish([row])
        self.assertEqual(len(claim.save_id), 36)  # still there: nothing was tried
        claim.abort()
        for items in (3, [3], ["text"], [("t", "float32")], [("x",)]):
            with self.subTest(items), self.assertRaises((TypeError, ValueError)):
                _core.write_items(self.dir, "__0_", items)
        for prefix in ("", "a/b", "../x"):
            with self.subTest(prefix), self.assertRaises(ValueError):
                _core.write_items(self.dir, prefix, [b"x"])
        self.write(0, "")
        with self.assertRaises(_core.ExistsError):
            self.write(0, "")


class Copies(unittest.TestCase):
    def test_copies_by_threads(self):
        """Ranges of all sizes, also beyond what one thread takes at a time; what lies between them stays."""
        sizes = [0, 1, 4097, 70 << 20, 3]
        source = array.array("Q", range(sum(sizes) // 8 + 1)).tobytes()
        target = bytearray(len(source))
        base = ctypes.addressof(ctypes.c_char.from_buffer(target))
        from_base = ctypes.cast(ctypes.c_char_p(source), ctypes.c_void_p).value
        for threads in (0, 1, 2, 40):
            target[:] = bytes(len(target))
            copies, at = [], 1
            for size in sizes:
                copies.append((base + at, from_base + at, size))
                at += size
            self.assertEqual(_core.copy_many(iter(copies), threads), sum(sizes))
            self.assertEqual(target[0], 0)
            self.assertTrue(target[1:at] == source[1:at])
            self.assertFalse(any(target[at:]))

    def test_what_is_no_copy(self):
        for copies, error in (([(1, 2)], TypeError), ([3], TypeError), (3, TypeError), ([(0, 1, 1)], ValueError),
                              ([(1, 0, 1)], ValueError), ([(1, 1, -1)], ValueError), ([("a", 1, 1)], TypeError)):
            with self.subTest(copies), self.assertRaises(error):
                _core.copy_many(copies)
        with self.assertRaises(ZeroDivisionError):
            _core.copy_many(1 // 0 for _ in range(3))
        self.assertEqual(_core.copy_many([]), 0)


if __name__ == "__main__":
    unittest.main(verbosity=1, warnings="error")
