"""Models, samples and processes for gpu_check.py: functions that run the recipes."""

import functools
import importlib.util
import json
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPOSITORY / "src"), str(Path(__file__).resolve().parent)]

import torch  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

RECIPES = REPOSITORY / "recipes"
ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
WAITING = {
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "unique",
    "_unique2",
    "equal",
    "is_nonzero",
}
# look at tensors of the host, on a GPU too
ON_HOST = ("batches.py", "objective.py", "packed_attention.py")
TINY = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}
TINY |= {"num_key_value_heads": 2, "head_dim": 64, "vocab_size": 512}
EIGHT_B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}
EIGHT_B |= {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256, "rope_theta": 500000.0}
THREE_B = EIGHT_B | {
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 28,
    "num_attention_heads": 24,
}
SHALLOW = EIGHT_B | {"num_hidden_layers": 4}  # layers as wide as 8B's, in files of 4 GB
NO_TIME = "left out: too little time"
LORA = ["--use_peft", "--target_modules", "all-linear", "--lora_dropout", "0"]


class Row(NamedTuple):
    """A line of the table."""

    check: str
    claim: str
    expected: str
    found: str
    ok: bool


class CountWaits(TorchDispatchMode):
    """Counts operators that make the host wait for the device; on the CPU they are cheap and show
    all the same."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []  # operator and line of the nearest frame outside torch

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = function._schema.name.split("::")[1]
        if name in WAITING:
            frames = [
                frame for frame in traceback.extract_stack()[:-1] if "/torch/" not in frame.filename
            ]
            self.found.append(
                f"{name} at line {frames[-1].lineno} of {Path(frames[-1].filename).name}"
            )
        return function(*args, **(kwargs or {}))


def make_model(folder: Path, shape: dict[str, Any]) -> Path:
    """Write a Llama with random bf16 weights, one file per layer, and a tokenizer of single
    characters."""
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    if (folder / "config.json").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    config = LlamaConfig(
        **shape, tie_word_embeddings=False, max_position_embeddings=8192, dtype="bfloat16"
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    files: dict[str, list[tuple[str, torch.Size]]] = {}
    for name, parameter in model.named_parameters():
        file = f"model-{name.split('.')[2] if '.layers.' in name else 'ends'}.safetensors"
        files.setdefault(file, []).append((name, parameter.shape))
    torch.manual_seed(0)
    with torch.device(DEVICE):
        for file, shapes in files.items():  # a layer at a time
            values = {
                name: torch.ones(it) if len(it) == 1 else torch.randn(it).mul_(0.02)
                for name, it in shapes
            }
            tensors = {name: value.to(torch.bfloat16).cpu() for name, value in values.items()}
            save_file(tensors, folder / file, metadata={"format": "pt"})
    where = {name: file for file, shapes in files.items() for name, _ in shapes}
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": where})
    )
    vocabulary = {"<s>": 0, "</s>": 1, "<pad>": 2, **{chr(33 + n): 3 + n for n in range(200)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    return folder


def make_samples(file: Path, lengths: list[int], vocabulary: int = 200) -> Path:
    """Write tokenized samples of these lengths."""
    generator = torch.Generator().manual_seed(len(lengths))
    with open(file, "w") as lines:
        for length in lengths:
            ids = torch.randint(3, vocabulary, (length,), generator=generator).tolist()
            lines.write(json.dumps({"input_ids": ids, "labels": [-100] * 4 + ids[4:]}) + "\n")
    return file


class Bench:
    """Where models, samples and runs are, and the seconds that are left."""

    def __init__(self, output: Path, seconds: float) -> None:
        self.output, self._until = output, time.monotonic() + seconds
        # by case: when its steps, or answers, began, and the last one's end
        self.seconds: dict[str, list[float]] = {}
        output.mkdir(parents=True, exist_ok=True)

    @property
    def seconds_left(self) -> float:
        return self._until - time.monotonic()

    def tiny(self) -> list[str]:
        """Flags of a tiny model and samples of uneven length."""
        model = make_model(self.output / "tiny", TINY)
        samples = make_samples(
            self.output / "samples.jsonl", [20 + 37 * n % 200 for n in range(64)]
        )
        common = "--lr 1e-3 --no_plan --context_length 256 --batch_size_training 2 --save_model false --overwrite"
        return ["--model_name", str(model), "--dataset", str(samples), *common.split()]

    def run(
        self,
        cases: dict[str, list[str]],
        recipe: str = "finetuning",
        toggle: str = "",
        needs: float = 10.0,
    ) -> dict[str, str]:
        """Run a recipe with the flags of each case, as many as possible in one process, while there
        are as many seconds as one `needs`; return the end of what the failed ones have printed.
        `toggle`: a key of TOGGLES."""
        failed: dict[str, str] = {}
        left, file, done = dict(cases), self.output / "cases.json", self.output / "done.jsonl"
        while left and self.seconds_left > needs:
            file.write_text(
                json.dumps({str(self.output / name): flags for name, flags in left.items()})
            )
            done.write_text("")
            command = [
                sys.executable,
                str(RECIPES.parent / "benchmarks" / "gpu_check.py"),
                "--child",
                str(file),
            ]
            command += ["--recipe", recipe, "--toggle", toggle]
            torch.cuda.empty_cache()  # of what this process has made on the GPU
            try:
                child = subprocess.run(
                    command, capture_output=True, text=True, timeout=self.seconds_left
                )
                said = (
                    child.stderr.strip() or child.stdout.strip() or f"exit code {child.returncode}"
                )
            except subprocess.TimeoutExpired:
                said = NO_TIME
            for line in done.read_text().splitlines():
                name = next(iter(left))
                self.seconds[name] = json.loads(line)
                del left[name]
            if left:
                name = next(iter(left))
                failed[name] = said[-3000:]
                del left[name]
        return failed | dict.fromkeys(left, NO_TIME)

    def steps(self, name: str) -> list[dict[str, Any]]:
        """Lines of a run's metrics.jsonl that are steps."""
        lines = [
            json.loads(line)
            for line in (self.output / name / "metrics.jsonl").read_text().splitlines()
        ]
        return [line for line in lines if "train/loss" in line]


def last_line(text: str) -> str:
    """Of what a process has printed, for the table."""
    return text.splitlines()[-1].strip().replace("|", "/")[-200:]


def run_child(cases: Path, recipe: str, toggle: str) -> None:
    """Run a recipe once per list of flags, and note the seconds of its steps, or answers, in
    done.jsonl."""
    from llama_ft import training
    from llama_ft.config.parse import as_keywords
    from llama_ft.inference.flags import read_inference_flags
    from llama_ft.inference.generate import Answerer

    sys.path.insert(0, str(RECIPES))  # inference.py imports finetuning.py
    spec = importlib.util.spec_from_file_location(recipe, RECIPES / f"{recipe}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    seconds: list[float] = []

    def timed(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        seconds.append(time.perf_counter())
        return function(*args, **kwargs)

    if toggle:
        TOGGLES[toggle](training, seconds)
    training.accumulate_gradients = functools.partial(timed, training.accumulate_gradients)
    answer = Answerer.answer
    Answerer.answer = lambda *args, **kwargs: timed(answer, *args, **kwargs)
    for folder, flags in json.loads(cases.read_text()).items():
        seconds.clear()
        if recipe == "inference":
            module.main(read_inference_flags(flags, ""))
        else:
            module.main(**as_keywords([*flags, "--output_dir", folder]))
        with open(cases.with_name("done.jsonl"), "a") as done:
            done.write(json.dumps([*seconds, time.perf_counter()]) + "\n")


def _fail_at_waits(training: ModuleType, seconds: list[float]) -> None:
    """End the process where the host waits for the device in a step after the first."""

    def watched(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if len(seconds) < 2:
            return function(*args, **kwargs)
        if DEVICE == "cuda":
            torch.cuda.set_sync_debug_mode("error")
            try:
                return function(*args, **kwargs)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        with CountWaits() as counter:
            result = function(*args, **kwargs)
        if found := {wait for wait in counter.found if not wait.endswith(ON_HOST)}:
            sys.exit(f"the host waits for the device: {'; '.join(sorted(found))}")
        return result

    for name in ("accumulate_gradients", "clip_and_reduce_norm", "update_weights"):
        setattr(training, name, functools.partial(watched, getattr(training, name)))


def _wait_per_micro_batch(training: ModuleType, seconds: list[float]) -> None:
    from transformers import masking_utils

    from llama_ft.models import transformers_private

    masking_utils.find_packed_sequence_indices = transformers_private._find_packed
    masking_utils._ignore_causal_mask_sdpa = transformers_private._is_causal


def _shard_adapters(training: ModuleType, seconds: list[float]) -> None:
    from llama_ft.models import fsdp

    leave_out = fsdp._used_as_stored
    fsdp._used_as_stored = lambda *args: {it for it in leave_out(*args) if not it.requires_grad}


def _set_cudnn(enabled: bool, training: ModuleType, seconds: list[float]) -> None:
    """For all of the process, whatever it asks for later."""
    torch.backends.cuda.enable_cudnn_sdp(enabled)
    torch.backends.cuda.enable_cudnn_sdp = lambda _: None


TOGGLES: dict[str, Callable[[ModuleType, list[float]], None]] = {
    "fail at waits": _fail_at_waits,
    "a wait per micro-batch": _wait_per_micro_batch,
    "adapters in fully_shard": _shard_adapters,
    "cuDNN on": functools.partial(_set_cudnn, True),
    "cuDNN off": functools.partial(_set_cudnn, False),
}
