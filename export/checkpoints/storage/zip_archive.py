"""The directory of a zip archive as torch writes it: every entry stored, so that each is a range of the file.

Sources: PKWARE APPNOTE 6.3.10, sections 4.3.7 (local header), 4.3.12 (central directory), 4.3.14 to 4.3.16 (its end);
torch 2.13, caffe2/serialize/inline_container.cc, for what torch writes of it.
"""

from __future__ import annotations

import os
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from ...errors import CheckpointError
from ..remedies import RECOPY_OR_USE_OLDER, find_remedy
from .file_state import FileState, read_state, refuse_changed
from .paths import open_regular

# A checkpoint has one entry per storage. 200,000 of them are parsed in about a second and 100 MB.
MAX_ENTRIES = 200_000
MAX_DIRECTORY_BYTES = 64 << 20

_END = struct.Struct("<4s4H2LH")
_END_64_LOCATOR = struct.Struct("<4sLQL")
_END_64 = struct.Struct("<4sQ2H2L4Q")
_CENTRAL = struct.Struct("<4s6H3L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")
_SATURATED_16, _SATURATED_32 = 0xFFFF, 0xFFFFFFFF
# Bits 0, 5, 6 and 13 of the flags: encrypted or patched data (APPNOTE 4.4.4).
_UNREADABLE_FLAGS = 0x0001 | 0x0020 | 0x0040 | 0x2000
_STORED = 0


@dataclass(frozen=True, kw_only=True)
class StoredBlock:
    """A range of bytes in a file, checked as a whole by one CRC-32."""

    path: Path
    # What the range is, for messages: the entry's name in its archive.
    name: str
    # From the start of the file, in bytes.
    offset: int
    length: int
    # None where there is none: safetensors keeps no checksums, and torch can be told to write none.
    crc32: int | None
    # What the file was when this was found in it.
    file_state: FileState


@dataclass(frozen=True)
class _Entry:
    header_offset: int
    # Where the next entry or the directory begins: this one's data must end before.
    limit: int
    length: int
    crc32: int | None


class ZipArchive:
    """The entries of one archive, which may be a part of a larger file.

    Only the directory is read and kept; the file is closed again. Refused are: compressed or encrypted entries, entries
    that overlap or lead outside, names given twice, and anything before, between or after the parts that torch writes,
    as far as it could hide another reading of the same bytes.

    Args:
        path: The file.
        start: Where the archive begins in the file, in bytes.
        length: The archive's length in bytes; to the end of the file where None.

    Raises:
        CheckpointError: The file is not such an archive, or it is damaged.
    """

    def __init__(self, path: Path, *, start: int = 0, length: int | None = None) -> None:
        self.path = path
        self._start = start
        with open_regular(path) as file:
            self._file_state = read_state(file.fileno())
            file_size = self._file_state.size
            self.length = file_size - start if length is None else length
            if start < 0 or self.length < 0 or start + self.length > file_size:
                raise self._damaged(f"{start + self.length} bytes or more", f"{file_size} bytes")
            self._entries = self._read_directory(file.fileno())

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all entries, in the order of the directory."""
        return tuple(self._entries)

    def block(self, name: str) -> StoredBlock:
        """Return where the entry `name` lies in the file.

        Raises:
            CheckpointError: There is no such entry, or its header contradicts the directory.
        """
        entry = self._entries.get(name)
        if entry is None:
            raise self._damaged(f"an entry {name}", "none of that name")
        with self._open_again() as file:
            return self._locate(file.fileno(), name, entry)

    def blocks(self) -> dict[str, StoredBlock]:
        """Return where every entry lies in the file, by name.

        Raises:
            CheckpointError: A header contradicts the directory.
        """
        with self._open_again() as file:
            return {name: self._locate(file.fileno(), name, entry) for name, entry in self._entries.items()}

    def read(self, name: str, *, max_bytes: int) -> bytes:
        """Return the content of the entry `name`, its CRC-32 checked.

        Raises:
            CheckpointError: The entry is missing, longer than `max_bytes`, cut off, or its checksum is wrong.
        """
        block = self.block(name)
        if block.length > max_bytes:
            raise self._damaged(f"{name} of at most {max_bytes} bytes", f"{block.length} bytes")
        with self._open_again() as file:
            content = self._read_at(file.fileno(), block.offset - self._start, block.length)
        if block.crc32 is not None and zlib.crc32(content) != block.crc32:
            raise self._damaged(f"{name} with CRC-32 {block.crc32:08x}", f"{zlib.crc32(content):08x}")
        return content

    def _open_again(self) -> BinaryIO:
        file = open_regular(self.path)
        try:
            refuse_changed(self.path, self._file_state, file.fileno())
        except CheckpointError:
            file.close()
            raise
        return file

    def _read_directory(self, descriptor: int) -> dict[str, _Entry]:
        offset, size, count = self._read_end(descriptor)
        if count > MAX_ENTRIES or size > MAX_DIRECTORY_BYTES:
            raise self._damaged(
                f"at most {MAX_ENTRIES} entries in {MAX_DIRECTORY_BYTES} bytes", f"{count} entries in {size} bytes"
            )
        directory = self._read_at(descriptor, offset, size)
        found: list[tuple[str, int, int, int]] = []
        position = 0
        for _ in range(count):
            name, header_offset, length, crc32, position = self._parse_central(directory, position)
            found.append((name, header_offset, length, crc32))
        if position != size:
            raise self._damaged(f"a directory of {size} bytes", f"{count} entries that end at byte {position}")
        return self._bound_entries(found, offset)

    def _read_end(self, descriptor: int) -> tuple[int, int, int]:
        """Return the directory's offset, size and number of entries."""
        end_offset = self.length - _END.size
        signature, disk, first_disk, here, count, size, offset, comment = _END.unpack(
            self._read_at(descriptor, end_offset, _END.size)
        )
        if signature != b"PK\5\6" or comment:
            raise self._damaged("the end of a zip archive in its last bytes", "something else")
        directory_end = end_offset
        locator_offset = end_offset - _END_64_LOCATOR.size
        if locator_offset >= 0:
            mark, _, end_64_offset, _ = _END_64_LOCATOR.unpack(
                self._read_at(descriptor, locator_offset, _END_64_LOCATOR.size)
            )
            if mark == b"PK\6\7":
                fields = _END_64.unpack(self._read_at(descriptor, end_64_offset, _END_64.size))
                wide = fields[6:10]
                if fields[0] != b"PK\6\6" or end_64_offset + _END_64.size != locator_offset:
                    raise self._damaged("a zip64 end before its locator", "something else")
                for narrow, value, full in zip(
                    (here, count, size, offset), wide, (_SATURATED_16,) * 2 + (_SATURATED_32,) * 2, strict=True
                ):
                    if narrow not in (value, full):
                        raise self._damaged("both ends of the archive to agree", f"{narrow} and {value}")
                here, count, size, offset = wide
                disk, first_disk, directory_end = fields[4], fields[5], end_64_offset
        if (disk, first_disk) != (0, 0) or here != count:
            raise self._damaged("an archive in one file", "parts of a split one")
        if offset + size != directory_end:
            raise self._damaged(f"a directory that ends at byte {directory_end}", f"one that ends at {offset + size}")
        return offset, size, count

    def _parse_central(self, directory: bytes, position: int) -> tuple[str, int, int, int, int]:
        """Return name, header offset, length and CRC-32 of the entry at `position`, and where the next begins."""
        if position + _CENTRAL.size > len(directory):
            raise self._damaged("a whole directory", "one cut off within an entry")
        (
            signature,
            _,
            _,
            flags,
            method,
            _,
            _,
            crc32,
            packed,
            length,
            name_bytes,
            extra_bytes,
            comment_bytes,
            _,
            _,
            _,
            header_offset,
        ) = _CENTRAL.unpack_from(directory, position)
        name_end = position + _CENTRAL.size + name_bytes
        extra_end = name_end + extra_bytes
        end = extra_end + comment_bytes
        if signature != b"PK\1\2" or end > len(directory):
            raise self._damaged("a directory of entries", f"something else at byte {position} of it")
        try:
            name = directory[position + _CENTRAL.size : name_end].decode("utf-8")
        except UnicodeDecodeError as exc:
            raise self._damaged("entry names in UTF-8", "other bytes") from exc
        if method != _STORED and "/code/" in name:
            raise CheckpointError(
                f"{self.path} holds no state",
                expected="an archive by torch.save",
                got="a TorchScript program",
                remedy="pass the file that the trainer saved",
            )
        if method != _STORED or flags & _UNREADABLE_FLAGS:
            raise self._damaged(
                f"{name} stored as it is", f"method {method}, flags {flags:#x} (compressed or encrypted)"
            )
        length, packed, header_offset = self._widen(
            directory[name_end:extra_end], length, packed, header_offset, name=name
        )
        if length != packed:
            raise self._damaged(f"{name} with one length", f"{length} and {packed} bytes")
        return name, header_offset, length, crc32, end

    def _widen(self, extra: bytes, *narrow: int, name: str) -> list[int]:
        """Replace each saturated 32-bit field by the next 64-bit one of the zip64 extra field (APPNOTE 4.5.3)."""
        if _SATURATED_32 not in narrow:
            return list(narrow)
        position = 0
        while position + 4 <= len(extra):
            tag, size = struct.unpack_from("<2H", extra, position)
            if tag == 1:
                body = extra[position + 4 : position + 4 + size]
                wide = list(struct.unpack_from(f"<{len(body) // 8}Q", body))
                if len(wide) >= narrow.count(_SATURATED_32):
                    return [wide.pop(0) if value == _SATURATED_32 else value for value in narrow]
            position += 4 + size
        raise self._damaged(f"{name} with a zip64 field", "none, or one too short")

    def _bound_entries(self, found: list[tuple[str, int, int, int]], directory_offset: int) -> dict[str, _Entry]:
        """Give each entry the room up to the next one, and refuse those that do not fit in it."""
        entries: dict[str, _Entry] = {}
        starts = sorted(header_offset for _, header_offset, _, _ in found)
        limits = dict(zip(starts, [*starts[1:], directory_offset], strict=True))
        checked = any(crc32 for _, _, _, crc32 in found)
        if len(limits) != len(found):
            raise self._damaged("entries apart from each other", "two at the same place")
        for name, header_offset, length, crc32 in found:
            if name in entries:
                raise self._damaged("each entry once", f"{name} twice")
            if header_offset + _LOCAL.size + length > limits[header_offset]:
                raise self._damaged(
                    f"{name} to end before byte {limits[header_offset]}",
                    f"{length} bytes from byte {header_offset} on",
                )
            # `torch.serialization.set_crc32_options(False)` writes 0 for every entry, the pickle's included.
            entries[name] = _Entry(header_offset, limits[header_offset], length, crc32 if checked else None)
        return entries

    def _locate(self, descriptor: int, name: str, entry: _Entry) -> StoredBlock:
        header = _LOCAL.unpack(self._read_at(descriptor, entry.header_offset, _LOCAL.size))
        signature, flags, method, name_bytes, extra_bytes = header[0], header[2], header[3], header[9], header[10]
        if signature != b"PK\3\4" or method != _STORED or flags & _UNREADABLE_FLAGS:
            raise self._damaged(f"the header of {name} at byte {entry.header_offset}", "something else")
        own_name = self._read_at(descriptor, entry.header_offset + _LOCAL.size, name_bytes)
        if own_name != name.encode("utf-8"):
            raise self._damaged(f"the header of {name} at byte {entry.header_offset}", "the header of another entry")
        offset = entry.header_offset + _LOCAL.size + name_bytes + extra_bytes
        if offset + entry.length > entry.limit:
            raise self._damaged(f"{name} to end before byte {entry.limit}", f"{entry.length} bytes from byte {offset}")
        return StoredBlock(
            path=self.path,
            name=name,
            offset=self._start + offset,
            length=entry.length,
            crc32=entry.crc32,
            file_state=self._file_state,
        )

    def _read_at(self, descriptor: int, offset: int, length: int) -> bytes:
        """Return `length` bytes from `offset` of the archive on, all of them inside it."""
        if offset < 0 or length < 0 or offset + length > self.length:
            raise self._damaged(f"{length} bytes at byte {offset}", f"an archive of {self.length} bytes")
        parts = []
        position, left = self._start + offset, length
        while left:
            # One pread returns at most 2 GiB - 4 KiB on Linux (read(2)), and may return less.
            try:
                part = os.pread(descriptor, min(left, 1 << 30), position)
            except OSError as exc:
                raise CheckpointError(
                    f"{self.path} cannot be read", got=exc.strerror or str(exc), remedy=find_remedy(exc)
                ) from exc
            if not part:
                raise self._damaged(f"{length} bytes at byte {offset}", "the end of the file")
            parts.append(part)
            position, left = position + len(part), left - len(part)
        return b"".join(parts)

    def _damaged(self, expected: str, got: str) -> CheckpointError:
        where = f" at byte {self._start}" if self._start else ""
        return CheckpointError(
            f"{self.path} is not an intact torch archive{where}",
            expected=expected,
            got=got,
            remedy=RECOPY_OR_USE_OLDER,
        )
