"""The half of `python_preprocess` that decodes pictures, beside transformers' own image processors."""

import io
import json
import os
import re
import struct
import subprocess
import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import CHECKOUT, load_backend
from hostile_pictures import build_odd_tiff
from PIL import Image
from sklearn.datasets import load_sample_images
from transformers.image_transforms import convert_to_rgb, get_size_with_aspect_ratio
from transformers.image_utils import load_image
from transformers.models.yolos.image_processing_pil_yolos import get_size_with_aspect_ratio_yolos

from export.errors import CheckpointError, ModelError, SettingsError
from export.tasks.pictures.preparation import find_preparation, read_preparation
from export.tasks.pictures.recipe import RECIPES, Recipe
from export.tasks.pictures.samples import build_pictures, draw_picture
from export.tasks.processor_file import PROCESSOR_FILE

load_backend("python_preprocess", "sent_file")
pictures = load_backend("python_preprocess", "pictures")

HALF = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
CLIP = {"image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]}

# As `save_pretrained` and older releases of transformers leave them.
PROCESSORS: dict[str, dict[str, Any]] = {
    "vit": {"image_processor_type": "ViTImageProcessor", "size": {"height": 224, "width": 224}, "resample": 2} | HALF,
    "vit of 2021": {"feature_extractor_type": "ViTFeatureExtractor", "size": 160, "do_resize": True, "resample": 2}
    | HALF,
    "deit": {
        "image_processor_type": "DeiTImageProcessor",
        "size": {"height": 256, "width": 256},
        "crop_size": {"height": 224, "width": 224},
        "do_center_crop": True,
        "resample": 3,
    },
    "convnext": {"image_processor_type": "ConvNextImageProcessor", "size": {"shortest_edge": 224}, "crop_pct": 0.875},
    "convnext, large": {"image_processor_type": "ConvNextImageProcessor", "size": {"shortest_edge": 384}},
    "clip": {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 224}, "crop_size": 224} | CLIP,
    "bit": {
        "image_processor_type": "BitImageProcessor",
        "size": {"shortest_edge": 96},
        "crop_size": {"height": 64, "width": 80},
        "resample": 3,
    },
    "crop beyond the picture": {
        "image_processor_type": "CLIPImageProcessor",
        "size": {"shortest_edge": 61},
        "crop_size": {"height": 96, "width": 97},
    },
    "siglip": {"image_processor_type": "SiglipImageProcessor", "size": {"height": 112, "width": 96}} | HALF,
    "mobilenet": {
        "image_processor_type": "MobileNetV2ImageProcessor",
        "size": {"shortest_edge": 256},
        "crop_size": {"height": 224, "width": 224},
    },
    "detr": {"image_processor_type": "DetrImageProcessor", "size": {"shortest_edge": 200, "longest_edge": 333}},
    "detr, padded": {
        "image_processor_type": "DetrImageProcessor",
        "size": {"shortest_edge": 48, "longest_edge": 80},
        "pad_size": {"height": 80, "width": 88},
    },
    "yolos": {"image_processor_type": "YolosImageProcessor", "size": {"shortest_edge": 128, "longest_edge": 333}},
    "mobilevit": {
        "image_processor_type": "MobileViTImageProcessor",
        "size": {"shortest_edge": 58},
        "crop_size": {"height": 48, "width": 48},
        "do_flip_channel_order": True,
    },
    "not normalised": {
        "image_processor_type": "ViTImageProcessor",
        "size": {"height": 32, "width": 32},
        "do_normalize": False,
        "do_rescale": False,
        "resample": 1,
    },
}


def encode(image: Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


@pytest.fixture(scope="module")
def photographs() -> list[bytes]:
    return [Path(name).read_bytes() for name in load_sample_images().filenames]


def open_reader(recipe: Recipe, folder: Path, *others: str) -> Any:
    (folder / "picture.json").write_bytes(recipe.to_json())
    return pictures.PictureReader(folder / "picture.json", ["pixel_values", *others])


def make(reader: Any, *contents: bytes) -> list[Any]:
    return reader.encode([pictures.SentFile(content, "IMAGE", row) for row, content in enumerate(contents)])


@pytest.mark.parametrize("name", PROCESSORS)
def test_pixels_are_those_of_transformers(name: str, photographs: list[bytes], tmp_path: Path) -> None:
    (tmp_path / PROCESSOR_FILE).write_text(json.dumps(PROCESSORS[name]))
    preparation = find_preparation(tmp_path, None, may_keep_shape=True)
    preparation.check(build_pictures())
    contents = [*build_pictures()[:12], *photographs]
    for content, made in zip(contents, make(open_reader(preparation.recipe, tmp_path), *contents), strict=True):
        expected = preparation.read(content)
        assert made.pixels.dtype == np.float32
        # Not a level of 255 apart, but equal.
        np.testing.assert_array_equal(made.pixels, expected)


@pytest.mark.parametrize(("name", "converts"), [("vit", False), ("clip", True), ("siglip", True)])
def test_a_colour_that_is_called_transparent_becomes_what_transformers_makes_of_it(
    name: str, converts: bool, tmp_path: Path
) -> None:
    (tmp_path / PROCESSOR_FILE).write_text(json.dumps(PROCESSORS[name]))
    preparation = find_preparation(tmp_path, None)
    # The newest transformers for Python 3.10 leaves the colour as it is.
    clear = Image.new("RGB", (1, 1))
    clear.info["transparency"] = (0, 0, 0)
    is_white = convert_to_rgb(clear).getpixel((0, 0)) == (255, 255, 255)
    assert (preparation.recipe.background == 255) == (converts and is_white)
    picture = draw_picture(3, 120, 90)
    picture.paste((10, 20, 30), (20, 20, 70, 60))
    few = picture.quantize(16)
    place = few.getpixel((40, 40))
    contents = [
        encode(few, "GIF", transparency=place),
        encode(few, "PNG", transparency=place),
        encode(picture, "PNG", transparency=(10, 20, 30)),
        encode(picture.convert("L"), "PNG", transparency=picture.convert("L").getpixel((40, 40))),
        encode(picture, "PNG"),
    ]
    for content, made in zip(contents, make(open_reader(preparation.recipe, tmp_path), *contents), strict=True):
        np.testing.assert_array_equal(made.pixels, preparation.read(content))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_tiff_that_must_be_turned_is_as_whole_as_another(orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    # Of several strips, and of other shape once it is turned.
    content = encode(draw_picture(0, 301, 203), "TIFF", exif=exif)
    upright = pictures.decode_picture(pictures.SentFile(content, "IMAGE", 0))
    np.testing.assert_array_equal(np.asarray(upright), np.asarray(load_image(Image.open(io.BytesIO(content)))))


@pytest.mark.parametrize(
    "recipe",
    [
        RECIPES["imagenet"],
        Recipe(mode="letterbox", size=(64, 96), filter="bicubic", fill=114, channels="bgr"),
        Recipe(mode="exact", size=(50, 40), filter="lanczos", crop=(31, 33), scale=1.0),
        Recipe(mode="letterbox", buckets=((64, 96), (96, 64), (64, 64)), fill=7),
        Recipe(mode="exact", buckets=((48, 96), (64, 64))),
    ],
    ids=lambda recipe: f"{recipe.mode}, buckets" if recipe.buckets else recipe.mode,
)
def test_a_recipe_without_a_processor_is_followed_alike_in_export_and_server(
    recipe: Recipe, photographs: list[bytes], tmp_path: Path
) -> None:
    contents = [*build_pictures()[:12], *photographs]
    reader = open_reader(recipe, tmp_path, "geometry")
    for content, made in zip(contents, make(reader, *contents), strict=True):
        image = load_image(Image.open(io.BytesIO(content)))
        np.testing.assert_array_equal(made.pixels, recipe.prepare(image))
        # The middle of the pixels is the middle of the picture, up to the rounding of a crop.
        scale_x, scale_y, left, top, width, height = made.geometry.tolist()
        assert (width, height) == image.size
        tall, wide = recipe.choose(image)
        assert made.pixels.shape == (3, tall, wide)
        assert abs(left + scale_x * wide / 2 - width / 2) <= scale_x
        assert abs(top + scale_y * tall / 2 - height / 2) <= scale_y
    tensors = reader.stack(make(reader, contents[0], contents[0]))
    assert [tensors["pixel_values"].shape[0], tensors["geometry"].shape] == [2, (2, 6)]


def test_a_picture_gets_the_bucket_whose_shape_is_most_like_its_own(tmp_path: Path) -> None:
    recipe = Recipe(mode="exact", buckets=((8, 8), (8, 16), (16, 8), (8, 24)))
    reader = open_reader(recipe, tmp_path)
    for (width, height), bucket in {
        (50, 50): (8, 8),
        (100, 71): (8, 8),
        (100, 70): (8, 16),
        (70, 100): (16, 8),
        (1000, 10): (8, 24),
        (10, 1000): (16, 8),
    }.items():
        image = Image.new("RGB", (width, height))
        (made,) = make(reader, encode(image, "PNG"))
        assert made.pixels.shape[1:] == recipe.choose(image) == bucket
    # As far from one as from the other, whatever logarithms round to.
    upright = Recipe(mode="exact", buckets=((96, 128), (128, 96)))
    for size in ((1, 1), (100, 100), (257, 257)):
        (made,) = make(open_reader(upright, tmp_path), encode(Image.new("RGB", size), "PNG"))
        assert made.pixels.shape[1:] == upright.choose(Image.new("RGB", size)) == (96, 128)
    assert Recipe(mode="exact", buckets=((8, 32), (8, 8))).choose(Image.new("RGB", (20, 10))) == (8, 32)


def test_pictures_of_several_buckets_make_no_tensor(tmp_path: Path) -> None:
    reader = open_reader(Recipe(mode="exact", buckets=((8, 8), (8, 16))), tmp_path)
    square, wide = (encode(Image.new("RGB", size), "PNG") for size in ((40, 40), (80, 40)))
    assert reader.stack(make(reader, wide, wide))["pixel_values"].shape == (2, 3, 8, 16)
    with pytest.raises(
        pictures.FileError, match=r"IMAGE row 1 is of another shape than row 0: expected one that becomes"
    ):
        reader.stack(make(reader, wide, square))


@pytest.mark.parametrize(
    "changed",
    [
        {"buckets": 8},
        {"buckets": []},
        {"buckets": [[8, 8]]},
        {"buckets": [[8, 8], [8, 8]]},
        {"buckets": [[8, 16], [16, 32]]},
        {"buckets": [[8000, 8000], [8, 16]]},
        {"buckets": [[8, 8], [8, 9000]]},
        {"buckets": [[8, 8], [8]]},
        {"buckets": [8, 16]},
        {"size": [8, 8]},
        {"mode": "shortest_edge", "crop": [8, 8]},
        {"crop": [4, 4]},
    ],
    ids=str,
)
def test_buckets_that_are_none_are_refused(changed: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "recipe.json"
    path.write_text(json.dumps({"mode": "exact", "buckets": [[8, 8], [8, 16]]} | changed))
    with pytest.raises(SettingsError, match=r"is not a recipe for pictures: .* got .* in place of "):
        read_preparation(str(path))


def test_a_recipe_that_is_none_is_refused_for_what_is_wrong_with_it(tmp_path: Path) -> None:
    path = tmp_path / "recipe.json"
    for text, sentence in {
        '{"mode": "exakt", "buckets": [[8, 8], [8, 16]]}': 'got mode "exakt" in place of one of exact, shortest_edge, ',
        '{"mode": "exact", "size": [8, 8], "mean": 0.5}': "got mean 0.5 in place of three numbers up to 1e9;",
        '{"mode": "exact", "size": [8, 8], "mean": [NaN, 0, 0]}': "got mean .*NaN.* in place of three numbers",
        '{"mode": "exact", "size": [8, 8], "scale": Infinity}': "got scale Infinity in place of a number from",
        '{"mode": "exact", "bucket": [8, 8]}': "got the unknown key bucket, to which buckets is the nearest;",
        '{"size": [8, 8]}': "got no mode;",
        "[" * 100_000: "got values nested too deeply;",
        '{"crop_sise": 224, "resize_size": 232}': "got the unknown key crop_sise, to which crop_size is the nearest;",
        '{"crop_size": 300, "resize_size": 232}': "got crop_size 300 beyond resize_size 232;",
        '{"mode": ': "got text that is not JSON from line 1, column 10 on;",
        "8": "got 8 in place of an object;",
    }.items():
        path.write_text(text)
        with pytest.raises(SettingsError, match=sentence):
            read_preparation(str(path))


# What a key of a recipe may be given by mistake; of whole numbers, one whose digits Python does not convert.
MISTAKES = (
    *(
        "null",
        "true",
        '"abc"',
        "-1",
        "0",
        "3.5",
        "NaN",
        "Infinity",
        "1e308",
        "1e-300",
        "9" * 30,
        "9" * 5000,
        "[]",
        "{}",
    ),
    *(
        "[null]",
        "[[8, 8], [8]]",
        '["a", "b", "c"]',
        "[NaN, 0, 1]",
        "[true, true, true]",
        '[{"a": 1}, 2, 3]',
        "[1e400, 8]",
    ),
    "[" * 200 + "]" * 200,
)

# What only Python's own messages say.
INTERNALS = re.compile(
    r"NoneType|__|object|invalid literal|could not convert|codec|argument|TypeError|ValueError|KeyError|<class|'int'"
    r"|True|False|None\b|recursion|Errno|set_int_max|unhashable|\(\)"
)

WHOLE = {
    "exact": {"mode": "exact", "size": [8, 8]},
    "edges": {"mode": "edges", "size": [8, 16], "pad": [16, 16], "multiple_of": 2},
    "cropped": {"mode": "shortest_edge", "size": [16], "crop": [8, 8], "rounding": "even"},
    "buckets": {"mode": "letterbox", "buckets": [[8, 8], [8, 16]]},
    "torchvision": {"crop_size": 224, "resize_size": 232},
}


def fuzz(whole: Mapping[str, Any], keys: Iterable[str]) -> Iterator[str]:
    """Yield the object as JSON: without each of its keys, with every mistake for each key, and with another key."""
    for left_out in whole:
        yield json.dumps({key: value for key, value in whole.items() if key != left_out})
    for key in keys:
        for mistake in MISTAKES:
            yield json.dumps(whole | {key: "MISTAKE"}).replace('"MISTAKE"', mistake)
    yield json.dumps(whole | {"sise": 3})


@pytest.mark.parametrize("name", WHOLE)
def test_no_recipe_is_refused_in_pythons_own_words(name: str, tmp_path: Path) -> None:
    path = tmp_path / "recipe.json"
    keys = {*Recipe.__dataclass_fields__, "crop_size", "resize_size", "interpolation", "antialias"}
    refused = 0
    for text in fuzz(WHOLE[name], sorted(keys)):
        path.write_text(text)
        try:
            read_preparation(str(path)).recipe.prepare(Image.new("RGB", (20, 30)))
        except SettingsError as exc:
            refused += 1
            assert re.search(
                r"^\S+ is not a recipe for pictures: expected .*, got .*; correct --preprocess\.$", str(exc)
            )
            assert not INTERNALS.search(str(exc).replace(str(tmp_path), "")), str(exc)
    assert refused > 200


@pytest.mark.parametrize("name", ["vit", "clip", "convnext", "detr"])
def test_no_processor_is_refused_in_pythons_own_words(name: str, tmp_path: Path) -> None:
    keys = ["size", "crop_size", "resample", "do_resize", "rescale_factor", "image_mean", "image_std", "crop_pct"]
    refused = 0
    for text in fuzz(PROCESSORS[name], keys):
        (tmp_path / PROCESSOR_FILE).write_text(text)
        try:
            preparation = read_preparation(str(tmp_path / PROCESSOR_FILE))
        except (SettingsError, ModelError) as exc:
            refused += 1
            assert not INTERNALS.search(str(exc).replace(str(tmp_path), "")), str(exc)
            assert "--preprocess" in str(exc)
        else:
            assert preparation.recipe.mode
    assert refused > 50


def test_a_byte_order_mark_in_a_processor_is_named_with_what_helps(tmp_path: Path) -> None:
    (tmp_path / PROCESSOR_FILE).write_text("{}", encoding="utf-8-sig")
    with pytest.raises(CheckpointError, match="got a byte order mark in front; save it as UTF-8 without"):
        find_preparation(tmp_path, None)


def test_a_file_that_is_not_text_is_not_a_recipe(tmp_path: Path) -> None:
    path = tmp_path / "recipe.json"
    for make, sentence in (
        (lambda: path.write_bytes(b"\xff\xfe"), "got bytes that are not UTF-8;"),
        (path.unlink, r"got a path that is not read \(.* got No such file or directory\);"),
        (path.mkdir, r"got a path that is not read \(.* got a folder; put the file itself there\);"),
    ):
        make()
        with pytest.raises(SettingsError, match=sentence) as refused:
            read_preparation(str(path))
        assert not INTERNALS.search(str(refused.value).replace(str(tmp_path), ""))


def test_buckets_are_for_modules_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "recipe.json"
    path.write_text('{"mode": "exact", "buckets": [[8, 8], [8, 16]]}')
    assert read_preparation(str(path)).recipe.buckets == ((8, 8), (8, 16))
    with pytest.raises(ModelError, match="makes pictures of several sizes: .* got 8 x 8 and 8 x 16; give it a size"):
        find_preparation(tmp_path, str(path))


def test_torchvisions_arguments_are_a_recipe_and_what_cannot_be_done_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "recipe.json"
    path.write_text('{"crop_size": 224, "resize_size": 232, "interpolation": "bicubic"}')
    recipe = read_preparation(str(path)).recipe
    assert (recipe.mode, recipe.size, recipe.crop, recipe.filter) == ("shortest_edge", (232,), (224, 224), "bicubic")
    path.write_text('{"mode": "exact", "size": [8, 8, 8]}')
    with pytest.raises(SettingsError, match=r"is not a recipe for pictures: expected one of imagenet, .* got size"):
        read_preparation(str(path))
    with pytest.raises(
        ModelError, match=r"expected a preprocessor_config.json .* got none; pass --preprocess imagenet"
    ):
        find_preparation(tmp_path, None)
    (tmp_path / PROCESSOR_FILE).write_text(json.dumps(PROCESSORS["detr"]))
    with pytest.raises(ModelError, match="keeps the shape of pictures, and the graph takes one: .* 200 on the shorter"):
        find_preparation(tmp_path, None)
    edges = {"max_height": 800, "max_width": 1333}
    (tmp_path / PROCESSOR_FILE).write_text(json.dumps({"image_processor_type": "DetrImageProcessor", "size": edges}))
    with pytest.raises(ModelError, match="asks for something that is not done in the server: .*max_width"):
        find_preparation(tmp_path, None)
    (tmp_path / PROCESSOR_FILE).write_text(json.dumps({"image_processor_type": "ImageGPTImageProcessor", "size": 32}))
    with pytest.raises(ModelError, match="ImageGPTImageProcessor makes nothing of a picture of .*Clusters must be"):
        find_preparation(tmp_path, None).check(build_pictures())
    # A processor with a step of its own, which its attributes do not show.
    (tmp_path / PROCESSOR_FILE).write_text(
        json.dumps({"image_processor_type": "EfficientNetImageProcessor", "size": {"height": 32, "width": 32}})
    )
    with pytest.raises(ModelError, match=r"is not done by the server: expected \[3, 32, 32\] within 1 level of 255"):
        find_preparation(tmp_path, None).check(build_pictures())


def test_edges_are_rounded_as_transformers_rounds_them() -> None:
    recipe = {"size": (48, 80), "multiple_of": 1}
    roundings = {1: get_size_with_aspect_ratio, 16: get_size_with_aspect_ratio_yolos}
    for width in range(1, 100):
        for height in range(1, 100):
            for step, rounding in roundings.items():
                plan = pictures.plan_edges((width, height), recipe | {"multiple_of": step})
                want_height, want_width = rounding((height, width), 48, 80)
                # Of nothing transformers makes an error.
                assert plan.size == (max(want_width, step == 1), max(want_height, step == 1)), (width, height, step)


def test_sixteen_bits_keep_their_upper_half(tmp_path: Path) -> None:
    reader = open_reader(Recipe(mode="exact", size=(64, 64), scale=1.0), tmp_path)
    levels = (np.arange(64 * 64).reshape(64, 64) * 16).astype(np.uint16)
    for kind in ("PNG", "TIFF"):
        (made,) = make(reader, encode(Image.fromarray(levels), kind))
        np.testing.assert_array_equal(made.pixels, np.broadcast_to(levels >> 8, (3, 64, 64)))


def promise(png: bytes, width: int, height: int) -> bytes:
    """Return a PNG whose head tells of another size."""
    head = b"IHDR" + struct.pack(">II", width, height) + png[24:29]
    return png[:12] + head + struct.pack(">I", zlib.crc32(head)) + png[33:]


def test_what_is_no_picture_is_refused_alone_and_before_it_is_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = open_reader(RECIPES["imagenet"], tmp_path)
    good = encode(draw_picture(0, 64, 48), "PNG")
    # A file of a few hundred bytes whose head promises 2.7 GB of pixels.
    bomb = promise(good, 30_000, 30_000)
    long = promise(good, 65_536, 1)
    narrow = encode(Image.new("L", (40_000, 1)), "PNG")
    float_tiff = encode(Image.new("F", (8, 8)), "TIFF")
    whole_tiff = encode(Image.new("I", (8, 8)), "TIFF")
    nothing = promise(good, 0, 0)
    sent = {
        b"": "is empty: expected a file of JPEG, PNG, WEBP, GIF, TIFF, got no bytes",
        b"%PDF-1.7": "is not a picture: expected a file of .*, got one that begins with b'%PDF-1.7'",
        encode(draw_picture(0, 64, 48), "BMP"): "is not a picture",
        good[: len(good) // 2]: "is damaged: expected a whole PNG, got '.*'; send it again",
        long: "has too long an edge: expected at most 65535 pixels, got 65536 x 1; cut it into several",
        bomb: "has too many pixels: expected 1 to 50000000, got 30000 x 30000; send another",
        narrow: "is too long and narrow: expected at most 50000000 pixels once it is resized, got 10240000 x 256 of",
        float_tiff: "has 32 bits a channel: expected a TIFF of 8 or 16, got .*; save it with 8",
        whole_tiff: "has 32 bits a channel: expected a TIFF of 8 or 16, got .*; save it with 8",
        nothing: r"is damaged: expected a PNG of at least 1 x 1 pixels with a whole head, got .*; save it again",
    }
    found = make(reader, *(item for content in sent for item in (content, good)))
    for index, message in enumerate(sent.values()):
        with pytest.raises(pictures.FileError, match=f"IMAGE row {2 * index} {message}"):
            raise found[2 * index]
        assert found[2 * index + 1].pixels.shape == (3, 224, 224)
    monkeypatch.setattr(pictures, "MAX_PICTURE_BYTES", 100)
    (large,) = make(reader, good)
    assert "is too large: expected at most 100 bytes" in str(large)


@pytest.mark.parametrize("compression", ["raw", "tiff_lzw", "tiff_adobe_deflate"])
@pytest.mark.parametrize("mode", ["L", "RGB", "1", "I;16"])
def test_a_tiff_whose_data_does_not_cover_it_is_refused(mode: str, compression: str, tmp_path: Path) -> None:
    reader = open_reader(Recipe(mode="exact", size=(8, 8)), tmp_path)
    file = io.BytesIO()
    levels = np.arange(80 * 60, dtype=np.uint16).reshape(60, 80)
    image = (
        Image.fromarray(levels) if mode == "I;16" else Image.fromarray((levels % 251).astype(np.uint8)).convert(mode)
    )
    image.save(file, "TIFF", compression=compression)
    whole = file.getvalue()
    (directory,) = struct.unpack_from("<I", whole, 4)
    (count,) = struct.unpack_from("<H", whole, directory)
    entries = {
        struct.unpack_from("<H", whole, place)[0]: place
        for place in range(directory + 2, directory + 2 + 12 * count, 12)
    }
    taller = bytearray(whole)
    # ImageLength, 257.
    struct.pack_into("<I", taller, entries[257] + 8, 6000)
    good, bad = make(reader, whole, bytes(taller))
    assert not isinstance(good, pictures.FileError)
    assert isinstance(bad, pictures.FileError) and "is damaged: expected a whole TIFF, got" in str(bad)


def test_what_a_large_picture_took_is_given_back(tmp_path: Path) -> None:
    reader = open_reader(Recipe(mode="exact", size=(8, 8)), tmp_path)
    content = encode(Image.new("RGB", (6000, 6000), (9, 8, 7)), "PNG")
    make(reader, encode(Image.new("RGB", (60, 60)), "PNG"))
    before = read_resident_bytes()
    for _ in range(3):
        make(reader, content)
    # One such picture is 108 MB.
    assert read_resident_bytes() - before < 50_000_000


def read_resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_damaged_pictures_are_refused_or_decoded_and_nothing_else(tmp_path: Path) -> None:
    """Bytes exchanged and cut at random, in every format."""
    reader = open_reader(Recipe(mode="exact", size=(8, 8)), tmp_path)
    random = np.random.default_rng(0)
    damaged = []
    for content in build_pictures()[:12]:
        for _ in range(10):
            changed = bytearray(content[: int(random.integers(1, len(content) + 1))])
            for place in random.integers(0, len(changed), int(random.integers(0, 12))):
                changed[place] = int(random.integers(0, 256))
            damaged.append(bytes(changed))
    found = make(reader, *damaged)
    refused = [made for made in found if isinstance(made, pictures.FileError)]
    assert len(refused) > len(found) // 3
    assert all(made.pixels.shape == (3, 8, 8) for made in found if not isinstance(made, pictures.FileError))


DECODE = """
import sys
sys.path.insert(0, sys.argv[1])
import pictures, sent_file
for row, path in enumerate(sys.argv[2:] * 2):
    sent = sent_file.SentFile(open(path, "rb").read(), "IMAGE", row)
    try:
        print(pictures.decode_picture(sent).size)
    except sent_file.FileError as exc:
        print(exc)
"""


def test_what_is_odd_in_a_file_is_not_written_into_the_log(tmp_path: Path) -> None:
    """In a process of its own: pytest has filters of its own."""
    # How planes lie, without which a picture is decoded, and its width.
    (tmp_path / "odd").write_bytes(build_odd_tiff(284))
    (tmp_path / "broken").write_bytes(build_odd_tiff(256))
    words = [str(CHECKOUT / "backends" / "python_preprocess"), str(tmp_path / "odd"), str(tmp_path / "broken")]
    # As the stubs have it, whatever this process was started with.
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONWARNINGS"}
    done = subprocess.run(
        [sys.executable, "-W", "always", "-c", DECODE, *words],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    first, second, *again = done.stdout.splitlines()
    assert first == "(20, 10)" and "IMAGE row 1 is damaged: " in second and len(again) == 2
    assert not [line for line in done.stderr.splitlines() if "PIL" in line], done.stderr
