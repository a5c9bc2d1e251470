"""What the wheel does where nothing else is installed."""
import array
import os
import sys
import tempfile

import libdcp

for name in ("numpy", "torch"):
    assert name not in sys.modules, name
with tempfile.TemporaryDirectory() as place:
    path = os.path.join(place, "step-7")
    state = {"w": array.array("d", range(1000)), "step": 7, "nested": {"name": "x", "l": [1, (2, 3)]}}
    report = libdcp.save(path, state)
    assert report["status"] == "OK" and report["payload_bytes"] == 8000, report
    into = {"w": array.array("d", bytes(8000)), "step": None, "nested": {"name": None, "l": None}}
    libdcp.load(path, into=into)
    assert into == state, into
    with libdcp.open(path) as checkpoint:
        assert list(checkpoint) == ["w", "step", "nested.name", "nested.l"], list(checkpoint)
        assert checkpoint["w"].shape == (1000,) and checkpoint["step"] == 7
    assert libdcp.verify(path)["n_defects"] == 0
    assert libdcp.latest(place) == path
    try:
        libdcp.save(path, state)
    except libdcp.ExistsError as e:
        assert isinstance(e, RuntimeError) and e.code == "EXISTS"
    else:
        raise AssertionError("a checkpoint was replaced")
with tempfile.TemporaryDirectory() as place:
    # The helper process is beside the extension.
    [(file, offset, length)] = libdcp._core.write_items(place, "__0_", [bytes(range(256)) * 4096], helper=libdcp._core.Helper())
    with open(os.path.join(place, file), "rb") as written:
        assert written.read() == bytes(range(256)) * 4096
assert "numpy" not in sys.modules
print("libdcp", libdcp.__version__, "works by itself")
