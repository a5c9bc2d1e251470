"""Writes pickle_fixtures.txt: data.pkl as PyTorch writes it for values that tests/format/test_pickle_writer.c builds in C.

    python3 tests/data/make_pickle_fixtures.py > tests/data/pickle_fixtures.txt

Needs torch; the tests only need its output, which was made with PyTorch 2.13.0 and Python 3.11.
"""
import collections
import datetime
import io
import zipfile

import torch


def data_pkl(value):
    file = io.BytesIO()
    torch.save(value, file)
    return zipfile.ZipFile(file).read("archive/data.pkl")


shared_list = [1, 2]
shared_tensor = torch.zeros(2, 3)
base = torch.zeros(12)

VALUES = {
    "none": None,
    "true": True,
    "false": False,
    "ints": [0, 255, 256, 65535, 65536, 2**31 - 1, 2**31, -1, -(2**31), -(2**31) - 1, 2**63 - 1, -(2**63), 2**63, 2**80, -(2**80)],
    "int_2_2039": 2**2039,
    "int_2_2040": 2**2040,
    "floats": (0.1, float("inf"), -0.0),
    "complex": 1.5 - 2j,
    "text": "模型-λ",
    "empty_text": "",
    "bytes": b"\x00\x80\xff",
    "empty_bytes": b"",
    "bytearray": bytearray(b"a\xff"),
    "empty_bytearray": bytearray(),
    "two_bytes": [b"a", b"b"],
    "empty_list": [],
    "list_1": [1],
    "list_2": [1, 2],
    "list_1000": [7] * 1000,
    "list_1001": [7] * 1001,
    "list_2002": [7] * 2002,
    "empty_tuple": (),
    "tuple_1": (1,),
    "tuple_3": (1, 2, 3),
    "tuple_4": (1, 2, 3, 4),
    "empty_dict": {},
    "dict_1": {"a": 1},
    "dict_2": {"a": 1, -7: "b"},
    "dict_1001": {i: 7 for i in range(1001)},
    "ordered_empty": collections.OrderedDict(),
    "ordered_1": collections.OrderedDict(a=1),
    "ordered_1000": collections.OrderedDict((i, 7) for i in range(1000)),
    "ordered_1001": collections.OrderedDict((i, 7) for i in range(1001)),
    "ordered_1002": collections.OrderedDict((i, 7) for i in range(1002)),
    "set_1": {1},
    "set_empty": set(),
    "frozenset_1": frozenset(["x"]),
    "dtype": torch.float32,
    "two_dtypes": [torch.float32, torch.bfloat16, torch.float32],
    "device": torch.device("cpu"),
    "device_index": torch.device("cuda", 3),
    "size": torch.Size([2]),
    "size_empty": torch.Size([]),
    "size_4": torch.Size([1, 2, 3, 70000]),
    "shared_list": {"a": shared_list, "b": shared_list, "a2": [shared_list]},
    "texts": ["lr", {"lr": 1}, ("lr", "x"), {"x": "lr"}],
    "many_memos": [(i,) for i in range(300)] + [shared_list, shared_list],
    "tensors": (torch.zeros(2, 3), torch.zeros(4, dtype=torch.float8_e4m3fn), torch.zeros(0, 8)),
    "shared_tensor": [shared_tensor, shared_tensor],
    "two_views": [base.view(3, 4), base.view(3, 4)],
    "twelve_tensors": [torch.zeros(1) for _ in range(12)] + [base, base.view(12)],
    "datetime": datetime.timedelta(1, 2, 3),
    "defaultdict": collections.defaultdict(list, {"a": 1, "b": 2}),
    "deque": collections.deque([1, 2], 5),
}

for name, value in VALUES.items():
    print(name, data_pkl(value).hex())
