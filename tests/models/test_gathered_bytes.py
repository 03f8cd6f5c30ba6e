"""What fully_shard moves between ranks for a quantized model is int8 and packed 4-bit weights, not their bf16 form."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from forked import forked

SCRIPT = Path(__file__).with_name("count_gathered.py")
HIDDEN, MIDDLE, KEYS, LAYERS, WORDS, RANK = 128, 192, 64, 3, 320, 4
LINEARS = [  # out, in
    (HIDDEN, HIDDEN),  # q_proj
    (KEYS, HIDDEN),
    (KEYS, HIDDEN),
    (HIDDEN, HIDDEN),
    (MIDDLE, HIDDEN),
    (MIDDLE, HIDDEN),
    (HIDDEN, MIDDLE),
]
DOWN = HIDDEN * MIDDLE
WEIGHTS = sum(rows * columns for rows, columns in LINEARS)
IN_BF16 = 2 * (2 * HIDDEN + RANK * 2 * HIDDEN)  # two norms, and LoRA's A and B of q_proj
REST = 2 * (2 * WORDS * HIDDEN + HIDDEN)  # embedding, head and the last norm
LAYER_BYTES = {
    "none": 2 * WEIGHTS + IN_BF16,
    "8bit": WEIGHTS + 4 * sum(rows for rows, _ in LINEARS) + IN_BF16,
    "nf4": WEIGHTS // 2 + 4 * WEIGHTS // 64 + IN_BF16,
    "fp4-128": (WEIGHTS - DOWN) // 2 + 4 * (WEIGHTS - DOWN) // 128 + 2 * DOWN + IN_BF16,
}
CASES = {
    "none": {},
    "8bit": {"mode": "8bit"},
    "nf4": {"mode": "4bit"},
    "fp4-128": {"mode": "4bit", "quant_type": "fp4", "block_size": 128},  # 192 are no whole blocks: down_proj stays
}


@pytest.fixture(scope="module")
def gathered(save_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[int]]:
    """Case -> bytes of every all-gather of a forward pass on 2 ranks, those of LAYER_BYTES and of REST."""
    folder, out = tmp_path_factory.mktemp("gathered") / "model", tmp_path_factory.mktemp("gathered") / "counts.json"
    shape = {"hidden_size": HIDDEN, "intermediate_size": MIDDLE, "num_hidden_layers": LAYERS, "vocab_size": WORDS}
    save_model(folder, **shape)
    finished = forked(SCRIPT, folder, json.dumps(CASES), out, ranks=2)
    assert finished.exit_code == 0, finished.output
    counted: dict[str, list[int]] = json.loads(out.read_text())
    return counted


@pytest.mark.parametrize("case", CASES)
def test_a_layer_is_gathered_in_its_quantized_form(gathered: dict[str, list[int]], case: str) -> None:
    assert Counter(gathered[case]) == {LAYER_BYTES[case]: LAYERS, REST: 1}
