"""Objects and pickle safety: what is loaded, what is refused, and what the refusal says."""

import collections
import fractions
import os
import unittest
import unittest.mock

import torch
import torch.distributed.checkpoint as torch_dcp

import libdcp.torch as dcp
from libdcp.torch import _objects
from hooked import HookedLoad, HookedSave
from support import TestCase, raises_together


class Own:
    def __init__(self, n):
        self.n = n


class Mark:
    """Makes a directory when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (os.mkdir, (self.path,))


class Objects(TestCase):
    def load(self, name, planner=None):
        state = {name: None}
        dcp.load(state, checkpoint_id=self.path, planner=planner, no_dist=True)
        return state[name]

    def test_builtins_come_back_as_they_were(self):
        values = [
            None, True, 0, -1, 1 << 70, 3.5, float("inf"), 2 + 3j, "text ünï \udc80", "", b"bytes", bytearray(b"array"),
            (1, (2, "x")), [1, [2, None]], {1, 2}, frozenset({"a"}), {"k": (1, 2)}, {1: "int", (1, 2): "tuple"},
            collections.OrderedDict([("b", 1), ("a", 2)]), (), [], set(), range(1, 9, 2), slice(1, None),
        ]  # fmt: skip
        state = {str(i): (value,) for i, value in enumerate(values)}
        for save in (dcp.save, torch_dcp.save):
            path = self.root / save.__module__
            save(state, checkpoint_id=path, no_dist=True)
            for planner in (None, HookedLoad()):
                found = {name: None for name in state}
                dcp.load(found, checkpoint_id=path, planner=planner, no_dist=True)
                for name, (value,) in state.items():
                    self.assertEqual((type(found[name][0]), repr(found[name][0])), (type(value), repr(value)))
            found = {name: None for name in state}
            torch_dcp.load(found, checkpoint_id=path, no_dist=True)
            self.assertEqual(found, state)

    def test_tensors_inside_objects(self):
        value = (torch.arange(3), {"x": torch.ones(2, 2)}, torch.float16, torch.Size((1, 2)), torch.device("cpu"))
        for planner in (None, HookedSave()):
            path = self.root / str(planner is None)
            dcp.save({"o": value}, checkpoint_id=path, planner=planner, no_dist=True)
            for load in (dcp.load, torch_dcp.load):
                state = {"o": None}
                load(state, checkpoint_id=path, no_dist=True)
                self.assertEqual(repr(state["o"]), repr(value))

    def test_U90_unknown_classes_are_refused_by_name(self):
        dcp.save({"own": Own(3), "t": torch.ones(2)}, checkpoint_id=self.path, no_dist=True)
        for planner in (None, HookedLoad()):
            with raises_together(self) as caught:
                self.load("own", planner)
            text = str(caught.failures[0][0])
            self.assertIn("Own", text)
            self.assertIn("libdcp.torch.allow_pickle()", text)
            self.assertIn("LIBDCP_ALLOW_PICKLE", text)
            self.assertIn("'own'", text)

    def test_U90_classes_can_be_admitted(self):
        dcp.save({"own": Own(3)}, checkpoint_id=self.path, no_dist=True)
        torch.serialization.add_safe_globals([Own])
        self.addCleanup(torch.serialization.clear_safe_globals)
        for planner in (None, HookedLoad()):
            self.assertEqual(self.load("own", planner).n, 3)

    def test_U90_all_classes_can_be_admitted(self):
        dcp.save({"own": Own(3), "f": fractions.Fraction(1, 3)}, checkpoint_id=self.path, no_dist=True)
        with dcp.allow_pickle():
            self.assertEqual(self.load("own").n, 3)
            self.assertEqual(self.load("f", HookedLoad()), fractions.Fraction(1, 3))
        with raises_together(self):
            self.load("own")
        dcp.allow_pickle()
        self.addCleanup(dcp.allow_pickle, False)
        self.assertEqual(self.load("own").n, 3)
        dcp.allow_pickle(False)
        with raises_together(self):
            self.load("own")

    def test_U90_the_environment_admits_them(self):
        dcp.save({"f": fractions.Fraction(1, 3)}, checkpoint_id=self.path, no_dist=True)
        with unittest.mock.patch.object(_objects, "_allowed", None):
            with unittest.mock.patch.dict(os.environ, {"LIBDCP_ALLOW_PICKLE": "1"}):
                self.assertEqual(self.load("f"), fractions.Fraction(1, 3))
            for value in ("0", ""):
                with unittest.mock.patch.dict(os.environ, {"LIBDCP_ALLOW_PICKLE": value}), raises_together(self) as caught:
                    self.load("f")
                self.assertIn("fractions.Fraction", str(caught.failures[0][0]))

    def test_U89_nothing_is_executed(self):
        mark = self.root / "executed"
        torch_dcp.save({"m": Mark(str(mark))}, checkpoint_id=self.path, no_dist=True)
        for planner in (None, HookedLoad()):
            with raises_together(self):
                self.load("m", planner)
        self.assertFalse(mark.exists())
        with dcp.allow_pickle():
            self.load("m")
        self.assertTrue(mark.exists())

    def test_objects_that_cannot_be_pickled(self):
        for planner in (None, HookedSave()):
            with raises_together(self) as caught:
                dcp.save({"a": torch.ones(2), "o": lambda: 1}, checkpoint_id=self.path, planner=planner, no_dist=True)
            self.assertNotIsInstance(caught.failures[0][0], AssertionError)
            self.assertFalse((self.path / ".metadata").exists())

    def test_exceptions_of_pickling_are_the_very_objects(self):
        raised = KeyError("mine")

        class Raises:
            def __reduce__(self):
                raise raised

        with raises_together(self) as caught:
            dcp.save({"o": Raises()}, checkpoint_id=self.path, no_dist=True)
        self.assertIs(caught.failures[0][0], raised)

    def test_U59_plain_values_are_updated_and_objects_kept(self):
        class Model:
            def __init__(self):
                self.w = torch.zeros(2)

            def state_dict(self):
                return {"w": self.w}

            def load_state_dict(self, state):
                self.w = state["w"]

        model = Model()
        model.w.fill_(3)
        dcp.save({"epoch": 4, "model": model}, checkpoint_id=self.path, no_dist=True)
        fresh = Model()
        state = {"epoch": 0, "model": fresh}
        dcp.load(state, checkpoint_id=self.path, no_dist=True)
        self.assertEqual((state["epoch"], fresh.w.tolist()), (4, [3, 3]))
        self.assertIs(state["model"], fresh)

    def test_U54_lists_that_were_empty(self):
        dcp.save({"k": [{"a": 1}, {"b": 2}]}, checkpoint_id=self.path, no_dist=True)
        for empty in ([], None):
            state = {"k": empty}
            dcp.load(state, checkpoint_id=self.path, no_dist=True)
            self.assertEqual(state["k"], [{"a": 1}, {"b": 2}])


if __name__ == "__main__":
    unittest.main()
