# mypy: ignore-errors
"""Launches whose reads of matrices by TMA fetch 256 bytes to L2 instead of 128: rows that are read once, 128 bytes at a
time, come faster from memory. Triton has no argument for it, so what a tensor map says of it is changed afterwards."""

import ctypes
from functools import cache

from adatom.tiles import hopper_gemm

_BYTES = 128  # of a tensor map
_BF16, _SWIZZLE_128, _TO_128, _TO_256 = 9, 3, 2, 3  # of the driver's enumerations


def _encoded(promotion: int) -> bytes | None:
    """A tensor map of some matrix, as the driver makes it."""
    try:
        encode = ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled
    except (OSError, AttributeError):
        return None
    memory = ctypes.create_string_buffer(2 * _BYTES)
    at = -(-ctypes.addressof(memory) // _BYTES) * _BYTES
    shape, strides, box = (ctypes.c_uint64 * 2)(1024, 1024), (ctypes.c_uint64 * 1)(2048), (ctypes.c_uint32 * 2)(64, 64)
    steps = (ctypes.c_uint32 * 2)(1, 1)
    failed = encode(
        ctypes.c_void_p(at), _BF16, 2, ctypes.c_void_p(1 << 20), shape, strides, box, steps, 0, _SWIZZLE_128,
        promotion, 0,
    )  # fmt: skip
    return None if failed else ctypes.string_at(at, _BYTES)


@cache
def difference() -> tuple[int, int, int] | None:
    """(where, bits of 128, bits of 256): the byte of tensor maps in which these fetches differ; None if unknown."""
    narrow, wide = _encoded(_TO_128), _encoded(_TO_256)
    if narrow is None or wide is None:
        return None
    differ = [i for i in range(_BYTES) if narrow[i] != wide[i]]
    return (differ[0], narrow[differ[0]], wide[differ[0]]) if len(differ) == 1 else None


def widen(box: object) -> bool:
    """Let a tensor map as Triton's launcher takes it fetch 256 bytes; whether it does."""
    found = difference() if type(box).__name__ == "PyCUtensorMap" else None
    if found is None:
        return False
    where, narrow, wide = found
    at = -(-(id(box) + object.__basicsize__) // _BYTES) * _BYTES + where  # behind the object's head, aligned
    byte, changed = ctypes.c_uint8.from_address(at), narrow ^ wide
    if byte.value & changed != narrow & changed:
        return False
    byte.value ^= changed
    return True


class _Widened(dict):
    """What a launch keeps of its descriptors, by place and address; those at `places` are widened as they come."""

    def __init__(self, places: frozenset[int]) -> None:
        self.places = places

    def __setitem__(self, key: tuple[int, int], box: list) -> None:
        if key[0] in self.places:
            widen(box[0])
        super().__setitem__(key, box)


class Launch(hopper_gemm.Launch):
    """A launch whose descriptors of the tensors named `wide` fetch 256 bytes, from the second call on."""

    def __init__(self, *args, wide: tuple[str, ...] = (), **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self._wide = frozenset(self.kernel.arg_names.index(name) for name in wide)

    def __call__(self, *tensors) -> None:
        super().__call__(*tensors)
        if self._wide and self._direct is not None and type(self._direct.boxes) is dict:
            self._direct.boxes = _Widened(self._wide)
