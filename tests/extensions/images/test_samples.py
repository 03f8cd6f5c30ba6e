"""Samples with images: forms of images, tokens, bad samples. The processor is Transformers'."""

import base64
import json
import os
import struct
import subprocess
import sys
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import datasets
import numpy
import pytest
import torch
import xxhash
from conftest import REPOSITORY, write_jsonl
from image_models import FAMILIES, IDS, plain_inputs, plain_processor, save_image_model, write_image
from PIL import Image
from transformers import AutoConfig, AutoTokenizer

from llama_ft import models
from llama_ft.config import DataConfig
from llama_ft.data import MediaModel, TokenizedData, prepare
from llama_ft.data.batches.sampler import collate
from llama_ft.data.prepare import DataRequest
from llama_ft.data.tokenize.tokenize_files import chunks_of, encode_chunk
from llama_ft.errors import UserError
from llama_ft.extensions.images.samples.image_files import read_image
from llama_ft.extensions.images.samples.image_parts import ImageStore

TOKEN = IDS["<|image_pad|>"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_image_model(tmp_path_factory.mktemp("model"), "Qwen2.5-VL")


def prepared(
    model: Path, dataset: object, cache: Path, length: int = 256, **settings: Any
) -> TokenizedData:
    config = AutoConfig.from_pretrained(model)
    tokenizer = AutoTokenizer.from_pretrained(model)
    no_images = models.why_text_only(config)
    media_model = None if no_images else MediaModel(model, config, tokenizer, False)
    request = DataRequest(
        context_length=length, want_validation=False, media_model=media_model, no_media=no_images
    )
    return prepare(DataConfig(dataset=str(dataset), **settings), tokenizer, request, cache=cache)


def chat(*parts: Any, answer: Any = "Noise.") -> dict[str, Any]:
    """Messages about images (paths or parts) and texts (in a tuple)."""
    content = []
    for part in parts:
        if isinstance(part, tuple):
            part = {"type": "text", "text": part[0]}
        elif isinstance(part, str):
            part = {"type": "image", "image": part}
        content.append(part)
    messages = [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]
    return {"messages": messages}


def test_all_forms_of_an_image_become_the_same_tokens_and_pixels(
    model: Path, tmp_path: Path
) -> None:
    file = write_image(tmp_path / "a.png", 60, 40, 1)
    content = file.read_bytes()
    encoded = base64.b64encode(content).decode()
    url = f"data:image/png;base64,{encoded}"
    marked = [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "Noise."}]
    forms = [
        chat("a.png", ("What?",)),
        chat(str(file), ("What?",)),
        chat({"type": "image", "path": "a.png"}, ("What?",)),
        chat({"type": "image", "url": f"file://{file}"}, ("What?",)),
        chat({"type": "image", "base64": encoded}, ("What?",)),
        chat({"type": "image_url", "image_url": {"url": url}}, ("What?",)),
        chat({"type": "image"}, ("What?",)) | {"images": ["a.png"]},
        {"conversations": marked, "image": "a.png"},
        {"conversations": marked, "images": [encoded]},
    ]
    tokens = []
    for number, form in enumerate(forms):
        data = write_jsonl(tmp_path / f"{number}.jsonl", [form])
        tokens.append(prepared(model, data, tmp_path / "cache").train)
    bytes_of_a_table = datasets.Dataset.from_list(
        [{"conversations": marked, "images": [{"bytes": content, "path": None}]}]
    )
    bytes_of_a_table.to_parquet(tmp_path / "bytes.parquet")
    feature = bytes_of_a_table.cast_column("images", datasets.List(datasets.Image()))
    feature.save_to_disk(tmp_path / "feature")
    for name in ("bytes.parquet", "feature"):
        tokens.append(prepared(model, tmp_path / name, tmp_path / "cache").train)

    expected, labels = plain_inputs(plain_processor(model), tmp_path, forms[0])
    for train in tokens:
        assert train is not None
        assert train[0]["input_ids"] == expected["input_ids"][0].tolist()
        assert train[0]["labels"] == labels.tolist()
        checksum, _, path = train[0]["media"][0].partition(" ")
        assert checksum == tokens[0][0]["media"][0].partition(" ")[0]
        assert Path(path).read_bytes() == content


def test_batches_have_the_pixels_of_the_plain_processor(model: Path, tmp_path: Path) -> None:
    for number in range(3):
        write_image(tmp_path / f"{number}.png", 60 + 30 * number, 40, number)
    samples = [chat("0.png", "1.png"), chat(("Hello",)), chat(("See",), "2.png")]
    data = prepared(model, write_jsonl(tmp_path / "a.jsonl", samples), tmp_path / "cache")
    assert data.train is not None
    batch = collate(data.train, [0, 1, 2], 0, media=data.media)
    pixels = []
    for sample in samples:
        inputs, _ = plain_inputs(plain_processor(model), tmp_path, sample)
        pixels += [inputs["pixel_values"]] if "pixel_values" in inputs else []
    assert batch.media is not None
    assert torch.equal(batch.media.others["pixel_values"], torch.cat(pixels))
    assert data.report.train.media == 3
    image_tokens = int((batch.input_ids == TOKEN).sum())
    assert data.report.train.media_tokens == image_tokens
    # a batch without an image ends with one that has no labels
    batch = collate(data.train, [1], 0, media=data.media)
    assert batch.media is not None
    assert len(batch.input_ids) == 2
    assert (batch.labels[1] == -100).all()


def test_image_tokens_are_never_in_the_loss_and_max_pixels_bounds_their_number(
    model: Path, tmp_path: Path
) -> None:
    write_image(tmp_path / "a.png", 100, 100, 1)
    data = write_jsonl(tmp_path / "a.jsonl", [chat("a.png", ("What?",))])
    counts = []
    for settings in ({}, {"max_pixels": 56 * 56}):
        train = prepared(model, data, tmp_path / "cache", labels="all", **settings).train
        assert train is not None
        is_image = [token == TOKEN for token in train[0]["input_ids"]]
        counts.append(sum(is_image))
        for image, label in zip(is_image, train[0]["labels"], strict=True):
            assert not image or label == -100
    assert counts == [16, 4]


def enlarged(png: bytes, width: int, height: int) -> bytes:
    """The PNG, which now says that it has this size."""
    header = b"IHDR" + struct.pack(">II", width, height) + png[24:29]
    return png[:12] + header + struct.pack(">I", zlib.crc32(header)) + png[33:]


marks = [
    {"role": "user", "content": "<image> <image>"},
    {"role": "assistant", "content": "Two."},
]
BAD = {
    "missing": (chat("b.png"), r'"messages\[0\].content\[0\].image": there is no file .*b.png'),
    "broken": (chat("broken.png"), "broken.png cannot be read as an image"),
    "truncated": (chat("truncated.png"), "truncated.png cannot be read as an image"),
    "bomb": (chat("bomb.png"), "bomb.png has 12,000 x 12,000 pixels; expected at most"),
    "too few images": (
        {"messages": marks, "images": ["a.png"]},
        '"images" has 1 images, and the messages have 2 places',
    ),
    "too many images": (
        {"messages": marks, "images": ["a.png"] * 3},
        '"images" has 3 images, and the messages have 2 places',
    ),
    "marks without a column": (
        chat({"type": "image"}),
        r'"messages\[0\].content\[0\]" .*expected an image: a path',
    ),
    "of the assistant": (
        chat("a.png", answer=[{"type": "image", "image": "a.png"}]),
        "no image in a message of the assistant",
    ),
    "URL": (chat("https://example.com/a.png"), "Images are not downloaded"),
    "base64": (
        chat({"type": "image_url", "image_url": {"url": "data:image/png;base64,QUJDR"}}),
        "not valid base64",
    ),
    "damaged base64": (
        chat({"type": "image", "image": "iVBORw0KGgo*" * 20}),
        "there is no file",
    ),
    "damaged data: URL": (
        chat({"type": "image", "image": "data:image/png;base64,iVBORw0K****GgoA"}),
        "cannot be read as an image",
    ),
    "number": (chat({"type": "image", "image": 3}), r"expected a path, base64, a data: URL"),
    "FIFO": (chat("fifo"), "fifo is not a regular file"),
    "device": (chat("/dev/zero"), "/dev/zero is not a regular file"),
    "directory": (chat("."), "is not a regular file"),
    "file of another kind": (chat("../../../../../../etc/passwd"), "cannot be read as an image"),
    "program": (chat("program.eps"), "program.eps cannot be read as an image"),
    "line": (
        chat("line.png"),
        "line.png has 10,000 x 1 pixels; expected one side to be at most 200",
    ),
    "32 bits": (chat("deep.tiff"), "deep.tiff has 32 bits per pixel and channel"),
    "no images": (
        {"messages": marks, "images": []},
        '"images" has 0 images, and the messages have 2 places',
    ),
    "null": (
        {"messages": marks, "image": None},
        '"image" has 0 images, and the messages have 2 places',
    ),
    "data: URL without base64": (
        chat({"type": "image", "image": "data:image/svg+xml;utf8,<svg/>"}),
        'is "data:image/svg.xml;utf8"; expected a data: URL with base64',
    ),
    "name that is not UTF-8": (
        chat("caf\udce9.png"),
        r'"messages\[0\].content\[0\].image": the name of .*/caf.\.png is not UTF-8; rename it',
    ),
    "empty file": (chat("empty.png"), "empty.png cannot be read as an image"),
    "links in a circle": (chat("link"), "there is no file .*link"),
    "SVG": (chat("a.svg"), "a.svg cannot be read as an image"),
    "video": (
        chat({"type": "video", "video": "a.mp4"}),
        "expected text, or a list of text parts and",
    ),
    "image token in a text": (
        chat(("What is <|image_pad|>?",)),
        r"its text has <\|image_pad\|>, which stands for an image",
    ),
    "image token beside an image": (
        chat("a.png", ("<|image_pad|>",)),
        "Found total 2 .* and 1 images",
    ),
}


def write_bad_files(folder: Path) -> None:
    """Write the files of the samples in BAD."""
    good = write_image(folder / "a.png", 60, 40, 1).read_bytes()
    (folder / "broken.png").write_bytes(b"no image")
    (folder / "truncated.png").write_bytes(good[:-2000])
    (folder / "bomb.png").write_bytes(enlarged(good, 12_000, 12_000))
    write_image(folder / "line.png", 10_000, 1, 1)
    os.mkfifo(folder / "fifo")
    Image.open(folder / "a.png").save(folder / "program.eps")
    (folder / os.fsdecode(b"caf\xe9.png")).write_bytes(good)
    (folder / "empty.png").touch()
    (folder / "link").symlink_to("link")
    (folder / "a.svg").write_text('<svg xmlns="http://www.w3.org/2000/svg"/>')
    deep = numpy.full((40, 60), 0.5, numpy.float32)
    Image.fromarray(deep).save(folder / "deep.tiff")


@pytest.mark.parametrize("kind", BAD)
def test_bad_images_are_reported_with_their_place_or_skipped(
    model: Path, tmp_path: Path, kind: str
) -> None:
    write_bad_files(tmp_path)
    sample, message = BAD[kind]
    data = write_jsonl(tmp_path / "a.jsonl", [chat("a.png"), sample])
    with pytest.raises(UserError, match=rf"a.jsonl:2: .*{message}"):
        prepared(model, data, tmp_path / "cache")
    skipped = prepared(model, data, tmp_path / "cache", skip_bad_rows=True)
    assert skipped.report.bad_samples == 1
    assert skipped.train is not None
    assert len(skipped.train) == 1


def test_images_of_a_format_without_places_for_them_are_reported(
    model: Path, tmp_path: Path
) -> None:
    write_image(tmp_path / "a.png", 60, 40, 1)
    row = {"instruction": "What?", "output": "Noise.", "image": "a.png"}
    data = write_jsonl(tmp_path / "a.jsonl", [row])
    with pytest.raises(UserError, match="nothing: samples of the format alpaca are text only"):
        prepared(model, data, tmp_path / "cache")


def damage(file: Path, kind: str, other: bytes) -> None:
    content = file.read_bytes()
    file.unlink()
    damaged = {
        "flipped": bytes([content[0] ^ 1]) + content[1:],
        "cut": content[:-9],
        "empty": b"",
        "another image": other,
    }
    if kind in damaged:
        file.write_bytes(damaged[kind])
    elif kind == "a directory":
        file.mkdir()
        (file / "a").touch()


@pytest.mark.parametrize(
    "kind", ["flipped", "cut", "empty", "another image", "missing", "a directory"]
)
def test_a_damaged_image_of_the_cache_is_written_again(
    model: Path, tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    png = write_image(tmp_path / "a.png", 60, 40, 1).read_bytes()
    other = write_image(tmp_path / "b.png", 60, 40, 2).read_bytes()
    path = Path(ImageStore(tmp_path / "cache").keep(png))
    assert path.read_bytes() == png
    damage(path, kind, other)
    store = ImageStore(tmp_path / "cache")  # of another run
    assert [store.keep(png), store.keep(png)] == [str(path)] * 2
    assert path.read_bytes() == png
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    # the same with tokens that are in the cache
    parts = [{"type": "image", "image": base64.b64encode(image).decode()} for image in (png, other)]
    data = write_jsonl(tmp_path / "a.jsonl", map(chat, parts))
    first = prepared(model, data, tmp_path / "cache").fingerprints()
    damage(path, kind, other)
    for warnings in (1, 0):
        caplog.clear()
        with caplog.at_level("WARNING"):
            assert prepared(model, data, tmp_path / "cache").fingerprints() == first
        assert caplog.text.count(f"{path}: corrupted or missing. The samples are") == warnings
        assert path.read_bytes() == png


def test_marks_without_a_column_are_a_warning(model: Path, tmp_path: Path) -> None:
    rows = [
        {"messages": [*marks[:1], {"role": "assistant", "content": "Two."}], "picture": "a.png"}
    ]
    write_image(tmp_path / "a.png", 60, 40, 1)
    data = write_jsonl(tmp_path / "a.jsonl", rows)
    read = prepared(model, data, tmp_path / "cache")
    assert read.media is None
    [warning] = read.warnings
    assert warning.startswith("1 sample: a text has <image>, and the sample has no image")
    assert "name it: --columns images=NAME" in warning and f"(first: {data}:1)" in warning
    rows = [
        chat("a.png"),
        {"messages": [{"role": "user", "content": "What?"}, marks[1]]},
        {"messages": [{"role": "user", "content": "<image>"}, marks[1]]},
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "<image>"}]},
                marks[1],
            ]
        },
    ]
    data = write_jsonl(tmp_path / "c.jsonl", rows)
    read = prepared(model, data, tmp_path / "cache")
    [warning] = read.warnings
    assert warning.startswith("2 samples: a text has <image>") and f"(first: {data}:3)" in warning
    one = [{"role": "user", "content": "<image>"}, marks[1]]
    named = write_jsonl(tmp_path / "b.jsonl", [{"messages": one, "picture": "a.png"}])
    read = prepared(model, named, tmp_path / "cache", columns=["images=picture"])
    assert read.report.train.media == 1


def test_equal_faults_of_different_files_are_counted_together(model: Path, tmp_path: Path) -> None:
    write_image(tmp_path / "a.png", 60, 40, 1)
    names = ["one.png", "two.png", "three.png"]
    data = write_jsonl(tmp_path / "a.jsonl", [chat("a.png"), *map(chat, names)])
    report = prepared(model, data, tmp_path / "cache", skip_bad_rows=True).report
    assert [kind.samples for kind in report.bad_kinds.values()] == [3]


def of_another_mode(image: Image.Image, kind: str) -> tuple[Image.Image, dict[str, Any]]:
    """The image in another mode, and how it is saved."""
    if kind == "rotated":
        exif = Image.Exif()
        exif[ORIENTATION] = 6  # to be rotated by 270 degrees
        return image, {"format": "JPEG", "exif": exif}
    if kind == "animated":
        second = Image.new("RGB", image.size, "red")
        return image, {"format": "GIF", "save_all": True, "append_images": [second]}
    if kind == "16 bits":
        values = numpy.asarray(image.convert("L")).astype(numpy.uint16)
        return Image.fromarray(values * 256 + 255), {"format": "PNG"}
    return image.convert(kind), {"format": "JPEG" if kind == "CMYK" else "PNG"}


ORIENTATION = 274  # the tag of EXIF


@pytest.mark.parametrize(
    "kind", ["CMYK", "P", "L", "1", "LA", "RGBA", "16 bits", "rotated", "animated"]
)
def test_images_of_all_modes_are_read_as_8_bit_rgb_upright(
    model: Path, tmp_path: Path, kind: str
) -> None:
    image = Image.open(write_image(tmp_path / "a.png", 60, 40, 1))
    changed, how = of_another_mode(image, kind)
    changed.save(tmp_path / "changed", **how)
    # the reference has the same pixels as plain 8-bit RGB
    if kind == "16 bits":
        plain = image.convert("L").convert("RGB")
    else:
        plain = Image.open(tmp_path / "changed").convert("RGB")
    if kind == "rotated":
        plain = plain.transpose(Image.Transpose.ROTATE_270)
    plain.save(tmp_path / "plain.png")
    data = write_jsonl(tmp_path / "a.jsonl", [chat("changed")])
    read = prepared(model, data, tmp_path / "cache")
    assert read.train is not None
    batch = collate(read.train, [0], 0, media=read.media)
    expected, _ = plain_inputs(plain_processor(model), tmp_path, chat("plain.png"))
    assert batch.media is not None
    assert torch.equal(batch.media.others["pixel_values"], expected["pixel_values"])


def test_memory_does_not_hold_a_file_that_is_larger_than_its_image(tmp_path: Path) -> None:
    file = write_image(tmp_path / "a.png", 60, 40, 1)
    image, before = read_image(str(file))
    with file.open("ab") as opened:
        opened.truncate(2**28)  # zeros, which the disk does not hold either
    tracemalloc.start()
    try:
        again, after = read_image(str(file))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2**24
    assert again.tobytes() == image.tobytes()
    assert after == xxhash.xxh3_64_hexdigest(file.read_bytes()) != before


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "Qwen2.5-VL"])
@pytest.mark.parametrize("size", [(1, 1), (300, 2)])
def test_tiny_and_long_images_are_read_or_reported(
    tmp_path: Path, family: str, size: tuple[int, int]
) -> None:
    model = save_image_model(tmp_path / "model", family)
    write_image(tmp_path / "tiny.png", *size, seed=1)
    write_image(tmp_path / "a.png", 60, 40, 1)
    data = write_jsonl(tmp_path / "a.jsonl", [chat("a.png"), chat("tiny.png")])
    read = prepared(model, data, tmp_path / "cache", skip_bad_rows=True)
    assert read.train is not None
    assert len(read.train) + read.report.bad_samples == 2
    if read.report.bad_samples:
        with pytest.raises(UserError, match=r"a.jsonl:2: the model's processor rejects it: "):
            prepared(model, data, tmp_path / "cache")


def test_an_image_without_a_token_is_a_bad_sample(tmp_path: Path) -> None:
    """LightOnOCR leaves out rows and columns of patches that do not fill a square of 2 x 2."""
    model = save_image_model(tmp_path / "model", "Mistral 3")
    tokens = {"image_token": "<image>", "image_break_token": "<global-img>"}
    tokens["image_end_token"] = "<end_of_image>"
    AutoTokenizer.from_pretrained(model, extra_special_tokens=tokens).save_pretrained(model)
    settings = {"processor_class": "LightOnOcrProcessor", "patch_size": 14, "spatial_merge_size": 2}
    (model / "processor_config.json").write_text(json.dumps(settings))
    write_image(tmp_path / "a.png", 60, 40, 1)
    write_image(tmp_path / "narrow.png", 200, 17, 1)
    rows = [chat("a.png"), chat("a.png", "narrow.png")]
    data = write_jsonl(tmp_path / "a.jsonl", rows)
    message = r"a.jsonl:2: .*narrow.png gets no token in this model \(200 x 17 pixels\)"
    with pytest.raises(UserError, match=message):
        prepared(model, data, tmp_path / "cache")
    skipped = prepared(model, data, tmp_path / "cache", skip_bad_rows=True)
    assert skipped.train is not None
    assert (len(skipped.train), skipped.report.bad_samples) == (1, 1)
    # 60 x 40 has 5 x 3 patches
    assert list(skipped.train[0]["input_ids"]).count(IDS["<image>"]) == 2


def test_a_context_shorter_than_an_image_is_reported_and_drop_skips_it(
    model: Path, tmp_path: Path
) -> None:
    write_image(tmp_path / "a.png", 100, 100, 1)
    data = write_jsonl(tmp_path / "a.jsonl", [chat("a.png", ("What?",)), chat(("Hi",))])
    with pytest.raises(UserError, match=r"a.jsonl:1: .*16 of them for 1 image, .*would cut an"):
        prepared(model, data, tmp_path / "cache", length=20)
    shorter = prepared(model, data, tmp_path / "cache", length=60)
    assert shorter.train is not None
    assert shorter.train[0]["input_ids"].count(TOKEN) == 16
    dropped = prepared(model, data, tmp_path / "cache", length=40, truncation="drop")
    assert dropped.train is not None
    assert len(dropped.train) == 1


@pytest.mark.parametrize("reason", ["text model", "late"])
def test_samples_with_images_say_why_they_cannot_be_used(
    model: Path, tmp_path: Path, reason: str
) -> None:
    write_image(tmp_path / "a.png", 60, 40, 1)
    texts = [chat(("Hi",))] * (100 if reason == "late" else 1)
    data = write_jsonl(tmp_path / "a.jsonl", [*texts, chat("a.png")])
    message = "none of the first 100 samples has one; put one of them first"
    if reason == "text model":
        config = AutoConfig.for_model("llama")
        AutoTokenizer.from_pretrained(model).save_pretrained(tmp_path / "text")
        config.save_pretrained(tmp_path / "text")
        model = tmp_path / "text"
        message = "a llama model takes text only"
    place = len(texts) + 1
    with pytest.raises(UserError, match=rf"a.jsonl:{place}: it has images, but {message}\."):
        prepared(model, data, tmp_path / "cache")
    skipped = prepared(model, data, tmp_path / "cache", skip_bad_rows=True)
    assert skipped.report.bad_samples == 1


def test_a_stream_takes_images_of_files_only(model: Path, tmp_path: Path) -> None:
    content = write_image(tmp_path / "a.png", 60, 40, 1).read_bytes()
    encoded = base64.b64encode(content).decode()
    data = write_jsonl(
        tmp_path / "a.jsonl", [chat("a.png"), chat(f"data:image/png;base64,{encoded}")]
    )
    stream = prepared(model, data, tmp_path / "cache", streaming=True).stream
    assert stream is not None
    source, encoder, examples = stream
    [chunk] = chunks_of(source, "messages")
    read = encode_chunk(chunk, encoder, examples)
    assert read.table["media"].to_pylist()[0][0].endswith("a.png")
    assert len(read.problems) == 1
    assert "a.jsonl:2: its image is in the data itself, which --streaming" in read.problems[0]


def test_a_chat_template_without_images_is_rejected_before_samples_are_read(
    model: Path, tmp_path: Path
) -> None:
    write_image(tmp_path / "a.png", 60, 40, 1)
    template = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>{% endfor %}"
    (tmp_path / "t.jinja").write_text(template)
    data = write_jsonl(tmp_path / "a.jsonl", [chat("a.png")])
    with pytest.raises(UserError, match="images, .* chat template"):
        prepared(model, data, tmp_path / "cache", chat_template=str(tmp_path / "t.jinja"))


def test_the_example_draws_the_same_charts_again_and_they_are_read(
    model: Path, tmp_path: Path
) -> None:
    script = REPOSITORY / "examples" / "draw_charts.py"
    for folder in ("charts", "again"):
        command = [sys.executable, script, folder, "--count", "60"]
        subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    files = sorted((tmp_path / "charts").iterdir())
    assert len(files) == 62
    for file in files:
        assert file.read_bytes() == (tmp_path / "again" / file.name).read_bytes()
    data = tmp_path / "charts" / "train.jsonl"
    drawn = prepared(model, data, tmp_path / "cache", length=2048)
    assert drawn.report.train.samples == drawn.report.train.media == 54
    assert drawn.report.train.duplicates == 0, "pixels differ, and tokens do not"
    answers = [json.loads(line)["messages"][1]["content"] for line in data.open()]
    assert len(set(answers)) > 20
