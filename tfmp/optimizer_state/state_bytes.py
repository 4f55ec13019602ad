"""The memory that an optimizer's slots take in half precision, beside what they would take in float32."""

from typing import NamedTuple


class SlotBytes(NamedTuple):
    """The memory of all variables of a kind of slot, such as "momentum"."""

    slot: str
    dtype: str
    bytes: int
    float32_bytes: int


class StateBytes(NamedTuple):
    """The memory of an optimizer's slots, which `str` shows as a table.

    The kinds of slots are in the order in which the optimizer made them.

    Examples:
        >>> momentum = SlotBytes("momentum", "bfloat16", 2048, 4096)
        >>> print(StateBytes((momentum, SlotBytes("velocity", "float32", 4096, 4096))))
        momentum  bfloat16  2,048 bytes  -50 %
        velocity  float32   4,096 bytes
        total               6,144 bytes  -25 %
    """

    slots: tuple[SlotBytes, ...]

    @property
    def bytes(self) -> int:
        """The bytes of all slots."""
        return sum(slot.bytes for slot in self.slots)

    @property
    def float32_bytes(self) -> int:
        """The bytes that all slots would take in float32."""
        return sum(slot.float32_bytes for slot in self.slots)

    def __str__(self) -> str:
        """Return the table."""
        total = SlotBytes("total", "", self.bytes, self.float32_bytes)
        rows = [(slot.slot, slot.dtype, f"{slot.bytes:,} bytes", _saving(slot)) for slot in (*self.slots, total)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join(
            f"{name:{widths[0]}}  {dtype:{widths[1]}}  {size:>{widths[2]}}  {saving}".rstrip()
            for name, dtype, size, saving in rows
        )


def _saving(slot: SlotBytes) -> str:
    if slot.bytes == slot.float32_bytes:
        return ""
    return f"{100 * (slot.bytes / slot.float32_bytes - 1):+.0f} %"
