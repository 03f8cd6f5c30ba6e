"""Small real things to train on, and processes: new interpreters, torchrun's, and (forked.py)
cheaper ones.

A new process that imports torch costs 5 to 8 s of a core. So many cases share one launch, and
`forked` begins where imports have ended; `run`, `torchrun` and `recipe` are for what depends on
Python's start or torchrun's agent."""

import atexit
import gc
import importlib.util
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest
from forked import ENVIRONMENT, REPOSITORY, SERVER, Finished, forked

if TYPE_CHECKING:
    from llama_ft.runtime import Ranks

# Before torch is imported: the tests' tensors are tiny, and threads that wait for a busy core spin.
os.environ["OMP_NUM_THREADS"] = "1"
# Also where the environment says otherwise: each new interpreter would compile the package again
# (1 s), and each worker all tests (6 s).
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# Tests started by nohup or by a service inherit that SIGHUP is ignored, those that a script starts
# with & that SIGINT is, and so would the runs.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)

RECIPE = REPOSITORY / "recipes" / "finetuning.py"
CASES = REPOSITORY / "tests" / "run_cases.py"
# The files whose fast or slow tests take the longest, in this order: a worker that begins one last
# leaves the others without work. `make test` keeps the order (--no-loadscope-reorder).
LONGEST_FIRST = (
    "repository/test_docs",
    "recipes/published/test_published_runs",
    "recipes/published/test_published_matrix",
    "emulated_cuda/test_emulation",
    "models/packing/test_shared_sequences",
    "recipes/ends/test_restarts",
    "plan/test_predict",
    "recipes/test_runs",
    "models/test_architectures",
    "recipes/checkpoints/test_object_storage",
    "recipes/test_parity",
    "recipes/checkpoints/test_resume",
    "extensions/scores/test_scoring",
    "training/test_replicas",
    "recipes/tools/test_evaluate_recipe",
    "recipes/images/test_images",
    "recipes/objectives/test_preference_runs",
    "plan/test_fit",
    "models/architecture/test_resize",
    "data/tokenize/test_tokenize_files",
    "data/batches/test_stream",
    "repository/test_packaging",
    "repository/test_configs",
    "recipes/tools/test_inference_recipe",
    "recipes/tools/test_plan_recipe",
    "recipes/test_start",
    "recipes/objectives/test_distill_runs",
    "recipes/ends/test_stop",
    "recipes/tools/test_export_recipe",
    "recipes/images/test_image_pairs",
    "recipes/images/test_image_answers",
    "recipes/published/test_as_stored_runs",
    "recipes/test_sequence_parallel",
    "recipes/images/test_train_vision",
    "recipes/checkpoints/test_elastic_run",
    "models/weights/test_loading_memory",
    "recipes/ends/test_pods",
    "plan/test_longest",
    "models/test_remote_code",
    "runtime/test_elastic",
)
QUESTIONS = [
    "What is a shard",
    "Who reads the checkpoint",
    "Why is the loss a sum",
    "Where do adapters live",
]
ANSWERS = [
    "Some rows of a weight.",
    "Rank 0.",
    "So that it does not depend on how rows were dealt.",
    "Beside.",
]


def run(command: list[str], timeout: float = 240, **environment: str) -> Finished:
    """Run a command as a user would, with this checkout's package and one thread a process."""
    started = time.monotonic()
    variables = {**os.environ, **ENVIRONMENT, **environment}
    streams: Any = {
        "stdin": subprocess.DEVNULL,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.STDOUT,
    }
    finished = subprocess.run(
        command, **streams, text=True, timeout=timeout, cwd=REPOSITORY, env=variables
    )
    return Finished(finished.returncode, finished.stdout, time.monotonic() - started)


def torchrun(processes: int, *arguments: str, timeout: float = 240, **environment: str) -> Finished:
    """torchrun on one machine; `arguments` begin with the script."""
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        str(processes),
    ]
    return run([*launcher, *arguments], timeout, **environment)


def recipe(*flags: str, processes: int = 0, timeout: float = 240, **environment: str) -> Finished:
    """recipes/finetuning.py with `flags`: through torchrun, or (0) as a process of its own."""
    if processes:
        return torchrun(processes, str(RECIPE), *flags, timeout=timeout, **environment)
    return run([sys.executable, str(RECIPE), *flags], timeout, **environment)


def run_cases(
    folder: Path, cases: Any, ranks: int = 0, script: Path = CASES, timeout: float = 240
) -> Finished:
    """A launch of a script that does every case of `folder`/cases.json; usually the recipe for
    lists of flags."""
    (folder / "cases.json").write_text(json.dumps(cases))
    finished = forked(script, folder / "cases.json", ranks=ranks, timeout=timeout)
    assert finished.exit_code == 0, finished.output
    return finished


def metrics(output_dir: Path) -> list[dict[str, Any]]:
    """metrics.jsonl of a run."""
    return [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]


def series(output_dir: Path, key: str) -> list[float]:
    """Every value of a key in metrics.jsonl, in order."""
    return [line[key] for line in metrics(output_dir) if key in line]


def losses(output_dir: Path) -> list[float]:
    """Training losses of a run, step by step."""
    return series(output_dir, "train/loss")


def reproducible_metrics(output_dir: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without what depends on the machine and the moment."""
    lines = metrics(output_dir)
    for line in lines:
        for key in [*line]:
            if key.startswith(("perf/", "memory/")):
                del line[key]
    return lines


def load_script(file: Path) -> ModuleType:
    """A recipe or benchmark as a module."""
    name = f"{file.parent.name}_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))  # scripts import each other
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # where its dataclasses look
    spec.loader.exec_module(module)
    return module


def build_model() -> Any:
    """The recipe's function, as its tools get it."""
    return load_script(RECIPE).build_model


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is large as slow, too, and put the longest files first."""
    for item in items:
        if item.get_closest_marker("large"):
            item.add_marker("slow")
    places = {f"{file}.py": place for place, file in enumerate(LONGEST_FIRST)}
    tests = REPOSITORY / "tests"
    assert all((tests / file).exists() for file in places)

    def place_of(item: pytest.Item) -> int:
        file = item.path.relative_to(tests) if item.path.is_relative_to(tests) else item.path
        return places.get(file.as_posix(), len(places))

    items.sort(key=place_of)


def pytest_collection_finish() -> None:
    """Leave what is there now, a million objects, out of every garbage collection, also of forks and
    of pytest's five at its end. Triton's bindings would report all that the interpreter has not freed
    at its own end, hundreds of lines."""
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell a worker of xdist where the fork server listens."""
    node.workerinput["fork_server"] = SERVER.address


def pytest_configure(config: pytest.Config) -> None:
    """Let a worker use the fork server of all workers."""
    if hasattr(config, "workerinput"):
        SERVER.share(config.workerinput["fork_server"])


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Print how a worker of xdist has ended. xdist itself says only that it is down."""
    if error:
        with suppress(subprocess.TimeoutExpired):
            code = node.gateway._io.popen.wait(10)
            ended = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            reporter = node.config.pluginmanager.getplugin("terminalreporter")
            reporter.write_line(f"[{node.gateway.id}] ended with {ended}")


@pytest.fixture(autouse=True)
def _sigpipe_stays_ignored() -> Iterator[None]:
    """Servers for tests run in this process. With the default of SIGPIPE, a client that a test
    kills would end it without a message."""
    yield
    handler = signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    assert handler == signal.SIG_IGN


@pytest.fixture(autouse=True)
def _log_of_a_new_process() -> Iterator[None]:
    """Undo configure_console of an earlier test of this process: caplog would see no record, or those
    of other levels."""
    log = logging.getLogger("llama_ft")
    log.handlers = []
    log.setLevel(logging.NOTSET)
    log.propagate = True
    yield


@pytest.fixture(scope="session")
def finetuning() -> ModuleType:
    """The recipe."""
    return load_script(RECIPE)


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache of the test session's own, which the processes it starts inherit."""
    folder = tmp_path_factory.mktemp("cache")
    os.environ["LLAMA_FT_CACHE"] = str(folder)
    return folder


@pytest.fixture(scope="session")
def save_tokenizer() -> Callable[..., Path]:
    """Train a small byte-level BPE tokenizer and save it into a folder."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    def save(folder: Path, pad: bool = True) -> Path:
        inner = Tokenizer(models.BPE())
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        inner.decoder = decoders.ByteLevel()
        special = ["<s>", "</s>", *(["<pad>"] if pad else [])]
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        sizes = {"vocab_size": 301, "special_tokens": special, "initial_alphabet": alphabet}
        inner.train_from_iterator(
            QUESTIONS + ANSWERS, trainers.BpeTrainer(**sizes, show_progress=False)
        )
        tokens = {
            "bos_token": "<s>",
            "eos_token": "</s>",
            **({"pad_token": "<pad>"} if pad else {}),
        }
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, **tokens)
        tokenizer.save_pretrained(folder)
        return folder

    return save


@pytest.fixture(scope="session")
def save_model(save_tokenizer: Callable[..., Path]) -> Callable[..., Path]:
    """Save a tiny random Llama with a tokenizer, several safetensors files and grouped-query
    attention."""
    from tiny_llama import tiny_llama

    def save(
        folder: Path, tied: bool = False, pad: bool = True, seed: int = 0, **settings: Any
    ) -> Path:
        shape = {
            "intermediate_size": 66,  # rows that do not divide evenly over 4 ranks
            "vocab_size": 301,
            "max_position_embeddings": 256,
            "tie_word_embeddings": tied,
            "initializer_range": 0.1,
        }
        model = tiny_llama(seed, **{**shape, **settings})
        model.save_pretrained(folder, max_shard_size="60KB")
        return save_tokenizer(folder, pad=pad)

    return save


@pytest.fixture(scope="session")
def tiny_model(save_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny untied Llama."""
    return save_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def tied_model(save_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny Llama whose head is its embedding."""
    return save_model(tmp_path_factory.mktemp("models") / "tied", tied=True)


@pytest.fixture(scope="module")
def runtime() -> Iterator["Ranks"]:
    """A process group of one, for what needs no launch."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from llama_ft.runtime import Ranks

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("shard",))
    cpu = torch.device("cpu")
    yield Ranks(0, 1, 0, 1, cpu, cpu, "CPU", mesh, None)
    dist.destroy_process_group()


def write_jsonl(file: Path, rows: Iterable[object]) -> Path:
    """A .jsonl file of rows; one that is text already is a line as it is."""
    file.write_text(
        "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    )
    return file


def write_rows(file: Path, count: int) -> Path:
    """A .jsonl file of alpaca rows of uneven length, no two alike."""
    questions = [f"{QUESTIONS[n % 4]}, number {n}?" for n in range(count)]
    answers = [" ".join([ANSWERS[(n + n // 4) % 4]] * (1 + n % 5)) for n in range(count)]
    rows = [
        {"instruction": question, "output": answer}
        for question, answer in zip(questions, answers, strict=True)
    ]
    return write_jsonl(file, rows)


@pytest.fixture(scope="session")
def rows16(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """16 rows: with a global batch of 16, every step sees all of them, whatever their order."""
    return write_rows(tmp_path_factory.mktemp("data") / "rows16.jsonl", 16)


@pytest.fixture(scope="session")
def rows70(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """70 rows: with a global batch of 16 the last batch of an epoch has 6."""
    return write_rows(tmp_path_factory.mktemp("data") / "rows70.jsonl", 70)
