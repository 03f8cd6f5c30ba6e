"""Tiny random models that take images, with their processors as files; samples; and their losses in
plain Transformers, one sample at a time."""

import json
import sys
from copy import deepcopy
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy
import torch
from conftest import write_jsonl
from models.test_architectures import MROPE, QWENS, SHAPE, UNTIED, VISION
from PIL import Image

CHATML = """{% for message in messages %}<|im_start|>{{ message['role'] }}
{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}\
{% if part['type'] == 'image' %}MARK{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
# LLaVA's and Idefics 3's templates take lists of parts only
PARTS_ONLY = """{% for message in messages %}<|im_start|>{{ message['role'] }}
{% for part in message['content'] | selectattr('type', 'equalto', 'image') %}MARK{% endfor %}\
{% for part in message['content'] | selectattr('type', 'equalto', 'text') %}{{ part['text'] }}{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
CELLS = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
SPECIAL = ["<|im_start|>", "<|im_end|>", "<pad>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
           "<|video_pad|>", "<image>", "<fake_token_around_image>", "<end_of_utterance>", "<global-img>",
           "<start_of_image>", "<end_of_image>", "<image_soft_token>", *CELLS, "<begin>", "<|image|>"]  # fmt: skip
IDS = {token: 256 + number for number, token in enumerate(SPECIAL)}
# tokens that a processor takes from its tokenizer by name
NAMES = {
    "Gemma 3": {
        "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
        "image_token": "<image_soft_token>",
    },
    "InternVL": {
        "start_image_token": "<start_of_image>",
        "end_image_token": "<end_of_image>",
        "context_image_token": "<image>",
        "video_token": "<|video_pad|>",
    },
    "Gemma 4": {
        "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
        "image_token": "<image_soft_token>",
        "boa_token": "<global-img>",
        "eoa_token": "<end_of_utterance>",
        "audio_token": "<fake_token_around_image>",
    },
    "GLM-4V": {"image_token": "<|image|>", "video_token": "<|video_pad|>"},
    "Llama 3.2 Vision": {"bos_token": "<begin>"},
}
QWEN_MARK = "<|vision_start|><|image_pad|><|vision_end|>"
QWEN_IDS = {"image_token_id": IDS["<|image_pad|>"], "video_token_id": IDS["<|video_pad|>"],
            "vision_start_token_id": IDS["<|vision_start|>"], "vision_end_token_id": IDS["<|vision_end|>"]}  # fmt: skip
QWEN_IMAGES = {"image_processor_type": "Qwen2VLImageProcessor", "temporal_patch_size": 2, "merge_size": 2,
               "size": {"shortest_edge": 784, "longest_edge": 12544}}  # fmt: skip
SMALL = {"height": 28, "width": 28}
# Images are bidirectional. A response sees the difference only by the layer with full attention.
GEMMA_LAYERS = ["sliding_attention", "full_attention"]
PINPOINTS = [[28, 28], [28, 56], [56, 28]]
LINEAR = {"layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2,
          "linear_num_value_heads": 2, "linear_key_head_dim": 32, "linear_value_head_dim": 32}  # fmt: skip
PIXELS = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
TEXT = SHAPE | {
    "pad_token_id": IDS["<pad>"],
    "eos_token_id": IDS["<|im_end|>"],
    "bos_token_id": None,
}
# family -> model_type; what differs in the text part; vision_config; the rest of the config; mark
# and template; processor_config.json; preprocessor_config.json
FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any], str, dict[str, Any],
                          dict[str, Any]]] = {
    "Qwen2.5-VL": ("qwen2_5_vl", MROPE, QWENS | {"intermediate_size": 64, "fullatt_block_indexes": [1]}, QWEN_IDS,
                   CHATML.replace("MARK", QWEN_MARK), {"processor_class": "Qwen2_5_VLProcessor"},
                   {**QWEN_IMAGES, "patch_size": 14}),
    "Qwen3-VL": ("qwen3_vl", MROPE, QWENS | {"intermediate_size": 64, "deepstack_visual_indexes": [0]}, QWEN_IDS,
                 CHATML.replace("MARK", QWEN_MARK), {"processor_class": "Qwen3VLProcessor"},
                 {**QWEN_IMAGES, "patch_size": 16}),
    "LLaVA": ("llava", {"model_type": "llama"}, VISION | {"model_type": "clip_vision_model", "projection_dim": 32},
              {"image_token_index": IDS["<image>"], "vision_feature_layer": -2, **UNTIED},
              PARTS_ONLY.replace("MARK", "<image>\n"),
              {"processor_class": "LlavaProcessor", "patch_size": 14, "num_additional_image_tokens": 1,
               "vision_feature_select_strategy": "default"},
              {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 28}, "crop_size": SMALL}),
    "Gemma 3": ("gemma3", {"sliding_window": 16, "query_pre_attn_scalar": 16, "layer_types": GEMMA_LAYERS}, VISION,
                {"mm_tokens_per_image": 4, "image_token_index": IDS["<image_soft_token>"], **UNTIED},
                CHATML.replace("MARK", "<start_of_image>"),
                {"processor_class": "Gemma3Processor", "image_seq_length": 4},
                {"image_processor_type": "Gemma3ImageProcessor", "size": SMALL, **PIXELS}),
    "Idefics 3": ("idefics3", {"model_type": "llama"}, VISION,
                  {"image_token_id": IDS["<image>"], "scale_factor": 2, **UNTIED},
                  PARTS_ONLY.replace("MARK", "<image>"),
                  {"processor_class": "Idefics3Processor", "image_seq_len": 1},
                  {"image_processor_type": "Idefics3ImageProcessor", "size": {"longest_edge": 56},
                   "max_image_size": {"longest_edge": 28}, **PIXELS}),
    "SmolVLM": ("smolvlm", {"model_type": "llama"}, VISION,
                {"image_token_id": IDS["<image>"], "scale_factor": 2, **UNTIED},
                PARTS_ONLY.replace("MARK", "<image>"),
                {"processor_class": "SmolVLMProcessor", "image_seq_len": 1},
                {"image_processor_type": "SmolVLMImageProcessor", "size": {"longest_edge": 56},
                 "max_image_size": {"longest_edge": 28}, **PIXELS}),
    "Mistral 3": ("mistral3", {"model_type": "mistral"},
                  VISION | {"model_type": "pixtral", "head_dim": 16, "image_size": 84},
                  {"image_token_index": IDS["<image>"], "vision_feature_layer": -1, **UNTIED},
                  CHATML.replace("MARK", "<image>"),
                  {"processor_class": "PixtralProcessor", "patch_size": 14, "spatial_merge_size": 2,
                   "image_token": "<image>", "image_break_token": "<global-img>",
                   "image_end_token": "<end_of_image>"},
                  {"image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": 84},
                   "patch_size": {"height": 14, "width": 14}, **PIXELS}),
    "LLaVA-OneVision": ("llava_onevision", {"model_type": "qwen2"}, VISION | {"model_type": "siglip_vision_model"},
                        {"image_token_index": IDS["<image>"], "video_token_index": IDS["<|video_pad|>"],
                         "image_grid_pinpoints": PINPOINTS},
                        PARTS_ONLY.replace("MARK", "<image>\n"),
                        {"processor_class": "LlavaOnevisionProcessor", "num_image_tokens": 4,
                         "vision_feature_select_strategy": "full"},
                        {"image_processor_type": "LlavaOnevisionImageProcessor", "size": SMALL,
                         "image_grid_pinpoints": PINPOINTS, **PIXELS}),
    "InternVL": ("internvl", {"model_type": "qwen2"},
                 VISION | {"image_size": [28, 28], "patch_size": [14, 14], "layer_scale_init_value": 1.0},
                 {"image_token_id": IDS["<image>"], "image_seq_length": 1, **UNTIED},
                 CHATML.replace("MARK", "<image>"),
                 {"processor_class": "InternVLProcessor", "image_seq_length": 1},
                 {"image_processor_type": "GotOcr2ImageProcessor", "size": SMALL, "crop_to_patches": True,
                  "max_patches": 4, **PIXELS}),
    "Qwen3.5": ("qwen3_5", LINEAR | MROPE, QWENS | {"intermediate_size": 64}, QWEN_IDS,
                CHATML.replace("MARK", QWEN_MARK), {"processor_class": "Qwen3VLProcessor"},
                {**QWEN_IMAGES, "patch_size": 16}),
}  # fmt: skip
# `<|image|>` is outside the vocabulary of the LM head, as in the published model
FAMILIES["Llama 3.2 Vision"] = (
    "mllama",
    {"num_hidden_layers": 3, "cross_attention_layers": [1], "vocab_size": IDS["<|image|>"], "bos_token_id": 0},
    {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_global_layers": 1, "attention_heads": 2,
     "image_size": 28, "patch_size": 14, "vision_output_dim": 64, "intermediate_layers_indices": [0],
     "max_num_tiles": 4},
    {"image_token_index": IDS["<|image|>"], **UNTIED},
    "<begin>" + CHATML.replace("MARK", "<|image|>"),
    {"processor_class": "MllamaProcessor"},
    {"image_processor_type": "MllamaImageProcessor", "size": SMALL, "max_image_tiles": 4, **PIXELS},
)  # fmt: skip
FAMILIES["Qwen2-VL"] = (
    "qwen2_vl", MROPE, {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2}, QWEN_IDS,
    CHATML.replace("MARK", QWEN_MARK), {"processor_class": "Qwen2VLProcessor"}, {**QWEN_IMAGES, "patch_size": 14},
)  # fmt: skip
FAMILIES["GLM-4V"] = (
    "glm4v", MROPE, QWENS | {"intermediate_size": 64, "image_size": 56},
    {"image_token_id": IDS["<|image|>"], "image_start_token_id": IDS["<start_of_image>"],
     "image_end_token_id": IDS["<end_of_image>"]},
    CHATML.replace("MARK", "<start_of_image><|image|><end_of_image>"),
    {"processor_class": "Glm4vProcessor"},
    {**QWEN_IMAGES, "image_processor_type": "Glm4vImageProcessor", "patch_size": 14},
)  # fmt: skip
FAMILIES["LLaVA-NeXT"] = (
    "llava_next", {"model_type": "llama"}, VISION | {"model_type": "clip_vision_model", "projection_dim": 32},
    {"image_token_index": IDS["<image>"], "vision_feature_layer": -2, "image_grid_pinpoints": PINPOINTS, **UNTIED},
    PARTS_ONLY.replace("MARK", "<image>\n"),
    {"processor_class": "LlavaNextProcessor", "patch_size": 14, "num_additional_image_tokens": 1,
     "vision_feature_select_strategy": "default"},
    {"image_processor_type": "LlavaNextImageProcessor", "size": {"shortest_edge": 28}, "crop_size": SMALL,
     "image_grid_pinpoints": PINPOINTS, **PIXELS},
)  # fmt: skip
FAMILIES["Gemma 4"] = (
    "gemma4",
    {"sliding_window": 16, "layer_types": GEMMA_LAYERS, "global_head_dim": 16, "hidden_size_per_layer_input": 8,
     "vocab_size_per_layer_input": 320, "use_bidirectional_attention": "vision"},
    VISION | {"num_key_value_heads": 2, "head_dim": 16, "patch_size": 4, "position_embedding_size": 256},
    {"audio_config": None, "image_token_id": IDS["<image_soft_token>"], "boi_token_id": IDS["<start_of_image>"],
     "eoi_token_id": IDS["<end_of_image>"], "video_token_id": IDS["<|video_pad|>"], **UNTIED},
    CHATML.replace("MARK", "<image_soft_token>"),
    {"processor_class": "Gemma4Processor", "image_seq_length": 70},
    {"image_processor_type": "Gemma4ImageProcessor", "patch_size": 4, "max_soft_tokens": 70},
)  # fmt: skip
PADDED_ONLY = ("Llama 3.2 Vision",)
FOR_IMAGES = ("vision", "visual", "projector", "connector", "image_newline")  # in names of weights
# what the micro-batches are like; with 1 sample per micro-batch some have no image, and with 2 ranks
# one has no sample
LAYOUTS = {
    "padded": "--batching_strategy padding --batch_size_training 5",
    "padded, one by one": "--batching_strategy padding --batch_size_training 1",
    "packed": "--batching_strategy packing --batch_size_training 1",
}
RESPONSE = [IDS["<|im_start|>"], *b"assistant\n"]


def image_model(folder: Path, family: str) -> Path:
    """Save a model of a family, unless it is there."""
    return folder if folder.exists() else save_image_model(folder, family)


def save_image_model(folder: Path, family: str, **settings: Any) -> Path:
    """Save a model, its tokenizer and its processor's files."""
    from transformers import AutoConfig, AutoModelForMultimodalLM

    # a copy: Transformers changes the dicts of rope_parameters, which several families share
    model_type, text, vision, others, template, processor, images = deepcopy(FAMILIES[family])
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        model_type, text_config=TEXT | text | settings, vision_config=vision, **others
    )
    model = AutoModelForMultimodalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if "norm" not in name and parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.1)  # some towers begin near 0
        elif "gate" in name and parameter.numel() == 1:
            torch.nn.init.constant_(parameter, 0.5)  # 0: the image would change nothing
    model.save_pretrained(folder, max_shard_size="200KB")
    tokenizer = _tokenizer(NAMES.get(family, {}))
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    (folder / "processor_config.json").write_text(json.dumps(processor))
    (folder / "preprocessor_config.json").write_text(json.dumps(images))
    return folder


def _tokenizer(names: dict[str, str]) -> Any:
    """A token per byte, and the special tokens of all families."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    # as in ByteLevel: printable bytes are themselves, the others follow 255
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    vocabulary = {chr(byte): byte for byte in printable}
    vocabulary |= {chr(256 + number): byte for number, byte in enumerate(others)}
    inner = Tokenizer(models.BPE(vocabulary, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(SPECIAL)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        eos_token="<|im_end|>",
        pad_token="<pad>",
        bos_token=names.get("bos_token"),
        extra_special_tokens={name: token for name, token in names.items() if name != "bos_token"},
    )
    assert tokenizer.convert_tokens_to_ids(SPECIAL) == list(IDS.values())
    return tokenizer


def write_image(file: Path, width: int, height: int, seed: int) -> Path:
    values = numpy.random.default_rng(seed).integers(0, 256, (height, width, 3), numpy.uint8)
    Image.fromarray(values).save(file)
    return file


def write_samples(folder: Path) -> Path:
    """Five chats: one image, text, two images and two responses, text, one image. The last one is
    short, so two ranks have an odd number of samples, and micro-batches without an image."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, (width, height) in enumerate([(60, 40), (30, 90), (56, 56), (100, 28)]):
        write_image(folder / f"{number}.png", width, height, number)

    def image(number: int) -> dict[str, str]:
        return {"type": "image", "image": f"{number}.png"}

    def text(words: str) -> dict[str, str]:
        return {"type": "text", "text": words}

    chats = [
        [("user", [image(0), text("What is it?")]), ("assistant", "Noise, most of it in color.")],
        [("user", "Who are you?"), ("assistant", "A model.")],
        [
            ("user", [image(1), text("and"), image(2)]),
            ("assistant", "Two."),
            ("user", "Which is larger?"),
            ("assistant", [text("The "), text("second.")]),
        ],
        [
            ("system", "Be brief."),
            ("user", "Why?"),
            ("assistant", "Because it is so, as it seems."),
        ],
        [("user", [text("See "), image(3)]), ("assistant", "Yes")],
    ]
    rows = []
    for chat in chats:
        rows.append({"messages": [{"role": role, "content": content} for role, content in chat]})
    return write_jsonl(folder / "chats.jsonl", rows)


def pixtral_class() -> Any:
    """PixtralProcessor, whose file imports torchvision and uses it for images on a GPU only."""
    name = "torchvision.transforms.v2"
    stub: Any = ModuleType(name)
    stub.functional = None
    sys.modules[name] = stub
    try:
        from transformers.models.pixtral.processing_pixtral import PixtralProcessor
    finally:
        del sys.modules[name]
    return PixtralProcessor


WITH_VIDEO = ("Qwen", "Glm4v", "Gemma4", "SmolVLM", "LlavaOnevision", "InternVL")


def plain_processor(folder: Path) -> Any:
    """The processor as AutoProcessor makes it; of models that see videos, too, without the video
    processor, which needs torchvision, and of SmolVLM without num2words, which is for videos."""
    from transformers import AutoImageProcessor, AutoProcessor, AutoTokenizer
    from transformers.models.auto.processing_auto import processor_class_from_name
    from transformers.models.smolvlm import processing_smolvlm

    settings = json.loads((folder / "processor_config.json").read_text())
    name = settings.pop("processor_class")
    if name == "PixtralProcessor":
        images = AutoImageProcessor.from_pretrained(folder, backend="pil")
        return pixtral_class()(images, AutoTokenizer.from_pretrained(folder), **settings)
    if not name.startswith(WITH_VIDEO):
        return AutoProcessor.from_pretrained(folder)
    processing_smolvlm.num2words = str
    kind = processor_class_from_name(name)
    processor = kind.__new__(kind)
    checks = kind.check_argument_for_proper_class
    kind.check_argument_for_proper_class = lambda *_: None
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        parts = {
            "image_processor": AutoImageProcessor.from_pretrained(folder),
            "tokenizer": tokenizer,
        }
        if name.startswith("Gemma4"):
            parts["feature_extractor"] = None  # of sound
        processor.__init__(**parts, video_processor=None, **settings)
        processor.chat_template = tokenizer.chat_template
    finally:
        kind.check_argument_for_proper_class = checks
    return processor


def _called_with(
    processor: Any, folder: Path, chat: list[dict[str, Any]], **template: Any
) -> dict[str, Any]:
    """What a plain model is called with for messages whose images are in a folder."""
    messages = []
    images = []
    for message in chat:
        parts = message["content"]
        if isinstance(parts, str):
            parts = [{"type": "text", "text": parts}]
        for part in parts:
            if part["type"] == "image":
                images.append(Image.open(folder / part["image"]).convert("RGB"))
        messages.append({"role": message["role"], "content": parts})
    rendered = processor.tokenizer.apply_chat_template(messages, tokenize=False, **template)
    call = {"images": [images]} if images else {}
    return dict(processor(text=[rendered], **call, return_tensors="pt"))


def plain_prompt(
    model: Path, folder: Path, messages: list[dict[str, Any]]
) -> tuple[Any, dict[str, Any]]:
    """The processor of a model, and what `generate` is called with for messages."""
    processor = plain_processor(model)
    return processor, _called_with(processor, folder, messages, add_generation_prompt=True)


def plain_inputs(
    processor: Any, folder: Path, chat: dict[str, Any]
) -> tuple[dict[str, Any], torch.Tensor]:
    """What a plain model is called with for one chat, and labels on its responses."""
    inputs = _called_with(processor, folder, chat["messages"])
    ids = inputs["input_ids"][0].tolist()
    labels = torch.full((len(ids),), -100)
    for start in range(len(ids)):
        first = start + len(RESPONSE)
        if ids[start:first] == RESPONSE:
            end = ids.index(IDS["<|im_end|>"], first) + 1
            labels[first:end] = torch.tensor(ids[first:end])
    return inputs, labels


def plain_loss(model: Any, folder: Path, data: Path) -> tuple[torch.Tensor, int]:
    """The sum of the losses of all chats, each computed alone, and their number."""
    processor = plain_processor(folder)
    total = torch.zeros(())
    count = 0
    for line in data.read_text().splitlines():
        inputs, labels = plain_inputs(processor, data.parent, json.loads(line))
        logits = model(**inputs).logits[0, :-1].float()
        total = total + torch.nn.functional.cross_entropy(logits, labels[1:], reduction="sum")
        count += int((labels[1:] != -100).sum())
    return total, count


def model_of(folder: Path) -> Any:
    from transformers import AutoModelForMultimodalLM

    return AutoModelForMultimodalLM.from_pretrained(folder, dtype=torch.float32).eval()


def norm(parameters: list[Any]) -> float:
    return float(torch.stack([p.grad.norm() for p in parameters if p.grad is not None]).norm())


def case(work: Path, family: str, name: str, ranks: int, *more: str) -> list[str]:
    """Flags of a run."""
    flags = "--device cpu --context_length 256 --lr 1e-2 --run_validation".split()
    flags += ["--model_name", str(work / family), "--dataset", str(work / "data" / "chats.jsonl")]
    flags += ["--output_dir", str(work / "runs" / name), *more]
    return flags + (["--enable_fsdp"] if ranks > 1 else [])


def layouts_of(family: str) -> dict[str, str]:
    """Names and flags of the layouts that a family supports."""
    return {
        name: flags
        for name, flags in LAYOUTS.items()
        if name != "packed" or family not in PADDED_ONLY
    }


def micro_batches(layout_flags: str, ranks: int) -> int:
    """Gradient accumulation steps with which a step has all samples."""
    return 5 // (ranks * int(layout_flags.split()[-1])) + 1
