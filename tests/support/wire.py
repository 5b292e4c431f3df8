"""Protobuf's wire format, slowly."""


def varint(number):
    """Negative numbers take ten bytes."""
    number &= (1 << 64) - 1
    data = bytearray()
    while number > 127:
        data.append(number & 127 | 128)
        number >>= 7
    return bytes([*data, number])


def field(number, content):
    return varint(number << 3 | 2) + varint(len(content)) + content
