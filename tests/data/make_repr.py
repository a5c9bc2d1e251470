#!/usr/bin/env python3
"""Writes what Python's repr says about many values, for tests/unit/test_repr.c.

    tests/data/make_repr.py            (in the data folder; needs Python 3.11)

repr_values.txt   <how to build the value> TAB <repr>; tokens in prefix order, see build() in the test:
                  N T F, I decimal, B hex of two's complement, D hex of the double's bits, C hex hex, S Y A V hex of text, bytes,
                  bytearray, device; L U Z E X n: list tuple size set frozenset; M O G n: dict, ordered dict, dict with any keys
repr_floats.txt   hex of the double's bits, space, repr
printable.txt     ranges of code points that repr escapes: first last kind; kind U: not assigned in this Python's Unicode
"""
import math
import os
import random
import struct
import sys
import unicodedata
from collections import OrderedDict

HERE = os.path.dirname(os.path.abspath(__file__))
rng = random.Random(20240229)


class Device:
    def __init__(self, text):
        self.text = text

    def __repr__(self):  # torch's
        kind, _, index = self.text.partition(":")
        return f"device(type={kind!r}, index={index})" if index else f"device(type={kind!r})"


class Size(tuple):
    def __repr__(self):  # torch's
        return f"torch.Size([{', '.join(map(repr, self))}])"


def bits(d):
    return struct.pack(">d", d).hex()


def hexed(b):
    return b.hex() or "-"


def encode(v):
    if v is None:
        return "N"
    if v is True or v is False:
        return "T" if v else "F"
    if isinstance(v, int):
        if -2**63 <= v < 2**63:
            return f"I {v}"
        return "B " + v.to_bytes(v.bit_length() // 8 + 1, "little", signed=True).hex()
    if isinstance(v, float):
        return f"D {bits(v)}"
    if isinstance(v, complex):
        return f"C {bits(v.real)} {bits(v.imag)}"
    if isinstance(v, str):
        return "S " + hexed(v.encode("utf-8", "surrogatepass"))
    if isinstance(v, bytes):
        return "Y " + hexed(v)
    if isinstance(v, bytearray):
        return "A " + hexed(v)
    if isinstance(v, Device):
        return "V " + hexed(v.text.encode())
    if isinstance(v, dict):
        plain = all(type(k) is str or (type(k) is int and -2**63 <= k < 2**63) for k in v)
        kind = "O" if isinstance(v, OrderedDict) else "M" if plain else "G"
        return " ".join([f"{kind} {len(v)}"] + [f"{encode(k)} {encode(x)}" for k, x in v.items()])
    kind = {list: "L", tuple: "U", Size: "Z", set: "E", frozenset: "X"}[type(v)]
    return " ".join([f"{kind} {len(v)}"] + [encode(x) for x in v])


ALPHABET = [0, 7, 9, 10, 13, 31, 32, 34, 39, 92, 65, 97, 126, 127, 128, 133, 160, 173, 0xE9, 0x3BB, 0x200B, 0x2028, 0x2029, 0x3000,
            0x6A21, 0xD800, 0xDC80, 0xDFFF, 0xE000, 0xFEFF, 0xFFFD, 0xFFFF, 0x10000, 0x1F600, 0xE0001, 0xF0000, 0x10FFFF]


def text():
    return "".join(chr(rng.choice(ALPHABET)) for _ in range(rng.randrange(12)))


def some_bytes():
    return bytes(rng.choice([0, 9, 10, 13, 34, 39, 92, 65, 126, 127, 128, 255]) for _ in range(rng.randrange(10)))


def double():
    return rng.choice([lambda: struct.unpack(">d", rng.randbytes(8))[0], lambda: rng.uniform(-10, 10), lambda: float(rng.randrange(-99, 99)),
                       lambda: rng.choice([0.0, -0.0, math.inf, -math.inf, math.nan, 1e16, 1e15, 1e-4, 1e-5, 0.1])])()


def leaf():
    return rng.choice([
        lambda: None, lambda: True, lambda: False, lambda: rng.randrange(-10, 300), lambda: rng.randrange(-2**63, 2**63),
        lambda: rng.randrange(-2**200, 2**200), double, lambda: complex(double(), double()), text, some_bytes,
        lambda: bytearray(some_bytes()), lambda: Device(rng.choice(["cpu", "cuda", "cuda:0", "cuda:13", "npu:1"]))])()


def hashable():
    while True:
        v = rng.choice([leaf, lambda: tuple(rng.randrange(5) for _ in range(rng.randrange(3)))])()
        if not isinstance(v, (bytearray, Device)):
            return v


def tree(depth):
    if depth == 0 or rng.random() < 0.3:
        return leaf()
    n = rng.randrange(4)
    below = lambda: tree(depth - 1)
    return rng.choice([
        lambda: [below() for _ in range(n)], lambda: tuple(below() for _ in range(n)),
        lambda: {rng.choice([text, lambda: rng.randrange(-5, 2**40)])(): below() for _ in range(n)},
        lambda: OrderedDict((text(), below()) for _ in range(n)), lambda: {hashable(): below() for _ in range(n)},
        lambda: set(hashable() for _ in range(n)), lambda: frozenset(hashable() for _ in range(n)),
        lambda: Size(rng.randrange(100) for _ in range(n))])()


def values():
    yield from [2**63, -2**63 - 1, 2**64, -2**64, 10**18, 10**19, -10**27, 10**300, 2**2000, -2**2000, 255 << 4000,
                1j, 1 + 2j, -0j, complex(0.0, -0.0), complex(-0.0, 0.0), complex(math.nan, -math.nan), complex(math.inf, -math.inf), 1e16j,
                "it's", 'say "x"', "both ' and \"", b"it's", b'"', b"'\"", bytearray(b"it's"), bytearray(b"'\""), bytearray(),
                (), (1,), [], {}, set(), frozenset(), {1, 2}, frozenset({3}), OrderedDict(), OrderedDict(z=1), Size(), Size([2, 3]),
                {None: 1, (1, 2): "t", 2**64: 0, 1.5: [], b"k": 1, True: 2}, {"step": 7}, {-1: {"a": 1}}]
    for _ in range(1500):
        yield tree(4)


def floats():
    for e in range(-1074, 1024):  # powers of two: doubles are unevenly spaced there
        yield math.ldexp(1.0, e)
    for e in range(-320, 309, 7):
        yield float(f"1e{e}")
        yield math.nextafter(float(f"1e{e}"), math.inf)
    yield from [0.0, -0.0, math.inf, -math.inf, math.nan, 5e-324, sys.float_info.max, sys.float_info.min, 1e15, 1e16, 123456789012345680.0,
                9007199254740993.0, 0.0001, 0.00001, 0.1, 1 / 3, 100.0, 1e22, 1e23, 2.5, 1e-7, 3e-4, 5e-5]
    for _ in range(1500):
        yield struct.unpack(">d", rng.randbytes(8))[0]
    for _ in range(500):
        yield struct.unpack("<d", rng.randbytes(6) + struct.pack("<H", rng.choice([0, 0x8000]) | rng.randrange(16)))[0]
    for _ in range(1000):
        yield rng.randrange(-10**6, 10**6) / 10**rng.randrange(1, 9)


def printable_ranges():
    kind = lambda c: "P" if chr(c).isprintable() else "U" if unicodedata.category(chr(c)) == "Cn" else "E"
    start = 0
    for c in range(1, 0x110001):
        if c == 0x110000 or kind(c) != kind(start):
            if kind(start) != "P":
                yield f"{start:x} {c - 1:x} {kind(start)}"
            start = c


def write(name, lines):
    with open(os.path.join(HERE, name), "w", encoding="utf-8", newline="\n") as f:
        f.writelines(line + "\n" for line in lines)


write("repr_values.txt", (f"{encode(v)}\t{v!r}" for v in values()))
write("repr_floats.txt", (f"{bits(d)} {d!r}" for d in floats()))
write("printable.txt", printable_ranges())
