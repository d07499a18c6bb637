import struct
import zipfile
from pathlib import Path

import pytest
import torch

from export.checkpoints.storage.zip_archive import ZipArchive
from export.errors import CheckpointError


def make_archive(path: Path, compression: int = zipfile.ZIP_STORED) -> bytearray:
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("archive/data.pkl", b"N." * 50)
        archive.writestr("archive/data/0", b"x" * 200)
    return bytearray(path.read_bytes())


def central(content: bytearray, index: int) -> int:
    position = -1
    for _ in range(index + 1):
        position = content.find(b"PK\1\2", position + 1)
    return position


def test_the_entries_are_those_of_the_standard_library(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save({"a": torch.randn(100), "b": torch.randn(7, dtype=torch.float64)}, path)
    archive = ZipArchive(path)
    with zipfile.ZipFile(path) as expected:
        assert list(archive.names) == expected.namelist()
        for name, block in archive.blocks().items():
            data = expected.read(name)
            assert path.read_bytes()[block.offset : block.offset + block.length] == data
            assert archive.read(name, max_bytes=10_000) == data
            assert block.crc32 == expected.getinfo(name).CRC


def test_an_archive_with_64_bit_fields_is_read(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    with zipfile.ZipFile(path, "w") as archive, archive.open("archive/data.pkl", "w", force_zip64=True) as file:
        file.write(b"N.")
    assert ZipArchive(path).read("archive/data.pkl", max_bytes=10) == b"N."


def test_a_directory_with_64_bit_fields_is_read(tmp_path: Path) -> None:
    # Written by hand as PKWARE's note has it: Python writes these fields only beyond 4 GB.
    path = tmp_path / "x.pt"
    content = make_archive(path)
    end = content.rfind(b"PK\5\6")
    count, size, offset = struct.unpack_from("<H2L", content, end + 10)
    wide = struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 45, 45, 0, 0, count, count, size, offset)
    locator = struct.pack("<4sLQL", b"PK\6\7", 0, end, 1)
    narrow = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0)
    path.write_bytes(content[:end] + wide + locator + narrow)
    assert ZipArchive(path).names == ("archive/data.pkl", "archive/data/0")
    path.write_bytes(content[:end] + wide + locator + content[end:])
    assert ZipArchive(path).names == ("archive/data.pkl", "archive/data/0")
    struct.pack_into("<H", content, end + 10, 7)
    path.write_bytes(content[:end] + wide + locator + content[end:])
    with pytest.raises(CheckpointError, match="expected both ends of the archive to agree, got 7 and 2"):
        ZipArchive(path)


def test_compressed_entries_are_refused_before_they_can_grow(tmp_path: Path) -> None:
    make_archive(tmp_path / "x.pt", zipfile.ZIP_DEFLATED)
    with pytest.raises(CheckpointError, match=r"expected archive/data.pkl stored as it is, got method 8"):
        ZipArchive(tmp_path / "x.pt")


@pytest.mark.parametrize("cut", [1, 22, 100, 300])
def test_a_file_cut_off_is_refused(tmp_path: Path, cut: int) -> None:
    content = make_archive(tmp_path / "x.pt")
    (tmp_path / "x.pt").write_bytes(content[:-cut])
    with pytest.raises(CheckpointError, match="is not an intact torch archive"):
        ZipArchive(tmp_path / "x.pt")


def test_bytes_after_the_archive_are_refused(tmp_path: Path) -> None:
    content = make_archive(tmp_path / "x.pt")
    (tmp_path / "x.pt").write_bytes(content + b"\0")
    with pytest.raises(CheckpointError, match="expected the end of a zip archive in its last bytes"):
        ZipArchive(tmp_path / "x.pt")


# Offset in the second entry of the directory → struct code, value, message (APPNOTE 4.3.12).
LIES = {
    8: ("<H", 1, "compressed or encrypted"),
    10: ("<H", 8, "compressed or encrypted"),
    20: ("<L", 100, "expected archive/data/0 with one length, got 200 and 100 bytes"),
    28: ("<H", 60000, "expected a directory of entries"),
    42: ("<L", 0, "expected entries apart from each other, got two at the same place"),
}


@pytest.mark.parametrize("field", LIES)
def test_a_directory_that_lies_is_refused(tmp_path: Path, field: int) -> None:
    path = tmp_path / "x.pt"
    content = make_archive(path)
    code, value, sentence = LIES[field]
    struct.pack_into(code, content, central(content, 1) + field, value)
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=sentence):
        ZipArchive(path)


def test_entries_that_overlap_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    content = make_archive(path)
    struct.pack_into("<2L", content, central(content, 0) + 20, 300, 300)
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"expected archive/data.pkl to end before byte"):
        ZipArchive(path)


def test_a_length_beyond_the_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    content = make_archive(path)
    struct.pack_into("<2L", content, central(content, 1) + 20, 0x7FFFFFFF, 0x7FFFFFFF)
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="expected archive/data/0 to end before byte"):
        ZipArchive(path)


def test_a_name_given_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    with pytest.warns(UserWarning, match="Duplicate name"), zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", b"N.")
        archive.writestr("archive/data.pkl", b"I1\n.")
    with pytest.raises(CheckpointError, match=r"expected each entry once, got archive/data.pkl twice"):
        ZipArchive(path)


def test_a_header_of_another_entry_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    content = make_archive(path)
    position = content.find(b"archive/data/0")
    content[position : position + 14] = b"archive/data/1"
    path.write_bytes(content)
    with pytest.raises(
        CheckpointError, match=r"the header of archive/data/0 at byte .*, got the header of another entry"
    ):
        ZipArchive(path).blocks()


def test_a_wrong_checksum_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    content = make_archive(path)
    content[content.find(b"N.N.")] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"expected archive/data.pkl with CRC-32 [0-9a-f]{8}, got"):
        ZipArchive(path).read("archive/data.pkl", max_bytes=1000)
    with pytest.raises(CheckpointError, match=r"expected archive/data.pkl of at most 10 bytes, got 100 bytes"):
        ZipArchive(path).read("archive/data.pkl", max_bytes=10)
