"""HighwayHash with 64 bits in numpy, for many ranges at once; `_highway.h` has the same in C, and its source."""

from typing import Any

import numpy as np

from dataload.types import BytesArray, Int64Array

_START = np.array(
    [
        [0xDBE6D5D5FE4CCE2F, 0xA4093822299F31D0, 0x13198A2E03707344, 0x243F6A8885A308D3],
        [0x3BD39E10CB0EF593, 0xC0ACF169B5F18A8C, 0xBE5466CF34E90C6C, 0x452821E638D01377],
    ],
    np.uint64,
)
_ZIPPED = np.array([3, 12, 2, 5, 14, 1, 15, 0, 11, 4, 10, 13, 9, 6, 8, 7])  # bytes of two words
_LOW, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)
_PACKET = 32  # bytes


def highway_hashes(data: BytesArray, offsets: Int64Array, lengths: Int64Array, key: bytes) -> Any:
    """Return the hashes, (rows,) uint64, of ranges of `data`, (rows,) offsets and lengths; the key is 32 bytes."""
    order = np.argsort(-lengths, kind="stable")  # those with a further packet come first
    starts, sizes = offsets[order], lengths[order]
    words = np.frombuffer(key, "<u8")
    mul = np.repeat(_START[:, None], len(order), axis=1)  # (2, rows, 4), a half of the state; `add` is the other
    add = mul ^ np.stack([words, _swap(words)])[:, None]
    for at in range(0, int(sizes.max(initial=0)) - _PACKET + 1, _PACKET):
        rows = int(np.count_nonzero(sizes >= at + _PACKET))
        packets = data[starts[:rows, None] + np.arange(at, at + _PACKET)]
        _mix(add[:, :rows], mul[:, :rows], packets.view("<u8"))
    _mix_rests(add, mul, [data[start : start + size] for start, size in zip(starts, sizes, strict=True)])
    for _ in range(4):
        _mix(add, mul, _swap(add[0][:, [2, 3, 0, 1]]))
    hashes = np.empty(len(order), np.uint64)
    hashes[order] = add[0, :, 0] + add[1, :, 0] + mul[0, :, 0] + mul[1, :, 0]
    return hashes


def _swap(words: Any) -> Any:
    return words << _HALF | words >> _HALF


def _mix(add: Any, mul: Any, words: Any) -> None:
    """Mix (rows, 4) words into the state."""
    add[1] += words + mul[0]
    mul[0] ^= (add[1] & _LOW) * (add[0] >> _HALF)
    add[0] += mul[1]
    mul[1] ^= (add[0] & _LOW) * (add[1] >> _HALF)
    add[0] += _zip(add[1])
    add[1] += _zip(add[0])


def _zip(words: Any) -> Any:
    pairs = words.astype("<u8").view(np.uint8).reshape(-1, 16)
    return pairs.take(_ZIPPED, axis=1).view("<u8").reshape(-1, 4)


def _mix_rests(add: Any, mul: Any, ranges: list[BytesArray]) -> None:
    """Mix the last bytes of ranges that do not end with a whole packet."""
    rows = [row for row, each in enumerate(ranges) if each.size % _PACKET]
    rests = [ranges[row][ranges[row].size // _PACKET * _PACKET :].tobytes() for row in rows]
    size = np.array([len(rest) for rest in rests], np.uint64)[:, None]
    add_rows, mul_rows = add[:, rows], mul[:, rows]
    add_rows[0] += (size << _HALF) + size
    low, high = add_rows[1] & _LOW, add_rows[1] >> _HALF
    low, high = ((half << size | half >> (_HALF - size)) & _LOW for half in (low, high))
    add_rows[1] = high << _HALF | low
    packets = b"".join(map(_last_packet, rests))
    _mix(add_rows, mul_rows, np.frombuffer(packets, "<u8").reshape(-1, 4))
    add[:, rows], mul[:, rows] = add_rows, mul_rows


def _last_packet(rest: bytes) -> bytes:
    """Return the packet for the last bytes, 1 to 31."""
    odd = len(rest) % 4
    whole = rest[: len(rest) - odd]
    if len(rest) & 16:
        return whole.ljust(28, b"\0") + rest[-4:]
    ends = bytes((rest[-odd], rest[-odd + odd // 2], rest[-1])) if odd else b""
    return (whole.ljust(16, b"\0") + ends).ljust(_PACKET, b"\0")
